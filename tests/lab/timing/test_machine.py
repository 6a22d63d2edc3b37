"""What the machine could do at best, and what it is."""

import pytest
import torch

from skipstone.lab.timing import machine
from tests.helpers import families


@pytest.mark.usefixtures("eager_engine")
def test_ceiling_counts_the_bytes_that_a_token_reads():
    model = families.build("llama", vocab=50)
    total = sum(p.numel() for p in model.parameters()) * 4
    assert machine.weight_bytes(model) == total - 50 * 32 * 4  # of an embedding table of its own a token reads one row
    tied = families.build("llama", vocab=50, tie_word_embeddings=True)
    assert machine.weight_bytes(tied) == total - 50 * 32 * 4  # the head reads the shared table
    assert machine.kv_bytes(model) == 2 * 4 * 2 * 8 * 4  # keys and values x layers x heads x dimensions x float32
    found = machine.ceiling(model, mean_length=10.0, megabytes=4)
    read = total - 50 * 32 * 4 + 10 * 512
    assert found["tokens_per_second"] == pytest.approx(found["bandwidth_gb_per_second"] * 1e9 / read)


def test_provenance_names_the_versions_and_the_command():
    found = machine.provenance(["bench", "model", "--quick"], seed=3)
    assert found["packages"]["torch"] == torch.__version__
    assert found["argv"] == ["bench", "model", "--quick"]
    assert (found["seed"], found["threads"]) == (3, torch.get_num_threads())
