"""What a head is expected to bring: accepted drafts as chains from every place would have them, and speed-ups by hand."""

from pathlib import Path

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

from skipstone.engines.model_runner import ModelRunner
from skipstone.lab.inspect.feature_heads import accepted_drafts, best_length, forecast
from skipstone.lab.timing.measure import PassTimes
from skipstone.methods.eagle3 import Eagle3
from skipstone.methods.mtp import Mtp
from tests.helpers import families
from tests.helpers.feature_heads import eagle3_folder
from tests.helpers.feature_references import Eagle3Reference, HeadReference, MtpReference, normed_states, target_states
from tests.helpers.mtp_checkpoints import mtp_checkpoint

TIMES = PassTimes([1.0] * 9, 1.0, {1: 10.0, 2: 10.0, 4: 13.0})


def test_the_best_length_and_its_speed_up_by_hand() -> None:
    """A plain step takes 10, a pass over drafts 11 with its head, 14 with four drafts."""
    assert best_length([0.8, 0.6, 0.1, 0.1], 0.5, TIMES) == (2, pytest.approx(2.4 * 10 / (2 * 0.5 + 11)))
    assert best_length([0.9, 0.9, 0.9, 0.9], 0.5, TIMES) == (4, pytest.approx(4.6 * 10 / (4 * 0.5 + 14)))
    assert best_length([0.9], 2.0, TIMES) == (1, pytest.approx(1.9 * 10 / 13))
    assert best_length([], 0.5, TIMES) == (0, 1.0)


def test_a_pass_over_drafts_takes_a_plain_step_at_least() -> None:
    """Times are noisy. Drafts that are never accepted must not pay."""
    assert best_length([0.0], 0.5, PassTimes([1.0] * 9, 1.0, {1: 7.0})) == (1, pytest.approx(10 / 10.5))


def expected(reference: HeadReference, states: Tensor, text: Tensor, first: int, num_drafts: int) -> Tensor:
    """By a chain of the head's own drafts from every place. first: the first root."""
    rows = []
    for root in range(first, len(text) - 1):
        drafts, row = reference.chain(states[:root], text[: root + 1], num_drafts)[1].tolist(), []
        for number, draft in enumerate(drafts, root + 1):
            ended = number >= len(text)
            row.append(-1 if ended else int(draft == text[number] and 0 not in row))
        rows.append(row)
    return torch.tensor(rows)


@pytest.mark.parametrize("engine", ["eager", "native"])
def test_accepted_drafts_are_those_of_chains_from_every_place(
    engine: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The text need not be the target's: it is written so that some chains of an EAGLE-3 head are right for a while. Logits are
    compared, too, because columns of a chain that do not see each other may have the same best tokens."""
    model = families.build("llama", layers=8)
    folder = eagle3_folder(tmp_path / "head", model.config)
    target, prompt = ModelRunner(model, engine), torch.tensor([5, 9, 31, 7, 22])
    reference = Eagle3Reference(folder, model.get_input_embeddings().weight, model.lm_head.weight)
    text = prompt
    while len(text) < 30:
        states = target_states(model, text[:-1], [2, 4, 5])
        drafts = reference.chain(states, text, 3)[1]
        text = torch.cat([text, drafts, (drafts[-1:] + 1) % 90])
    head = Eagle3(head=str(folder)).head_for(target)
    seen, logits_of = list[Tensor](), head.logits
    monkeypatch.setattr(head, "logits", lambda hidden: seen.append(logits_of(hidden)) or seen[-1])
    found = accepted_drafts(target, head, prompt, text[5:], 4)
    states = target_states(model, text, [2, 4, 5])
    wanted = expected(reference, states, text, 5, 4)
    for root in (5, 13, 24):
        logits = reference.chain(states[:root], text[: root + 1], 4, text[root + 1 :])[0]
        torch.testing.assert_close(torch.stack(seen)[:, 0, root - 5].double(), logits, rtol=0, atol=1e-4)
    assert torch.equal(found, wanted)
    assert {tuple(row) for row in wanted.tolist()} >= {(1, 1, 1, 0), (0, 0, 0, 0)}
    assert wanted[-1].tolist()[1:] == [-1, -1, -1]
    assert accepted_drafts(target, head, prompt, text[5:6], 4).shape == (0, 4)


@pytest.mark.parametrize("kind", ["glm4_moe", "qwen3_next"])
def test_an_mtp_layer_is_forecast_from_its_chains(kind: str, tmp_path: Path) -> None:
    folder = mtp_checkpoint(tmp_path, kind)
    target = ModelRunner(AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32), "eager")
    reference, text = MtpReference(folder), torch.tensor([5, 9, 31, 7, 22])
    for _ in range(3):
        drafts = reference.chain(normed_states(target.model, text[:-1]), text, 2)[1]
        text = torch.cat([text, drafts, (drafts[-1:] + 1) % 90])
    wanted = expected(reference, normed_states(target.model, text), text, 5, 4)
    shares = [float((one == 1).sum() / (one >= 0).sum()) for one in wanted.T]
    assert shares[0] > shares[2]
    found = forecast(Mtp(), target, [(text[:5], text[5:])], TIMES)
    assert (found.kind, found.layers) == ("mtp", [target.depth])
    assert found.accepted == pytest.approx(shares)
    assert 0 < found.weights_read < 1
    assert found.nbytes == Mtp().head_for(target).nbytes
    assert 0 < found.speed_up <= (1 + sum(shares)) * TIMES.plain / (TIMES.rows[1] + TIMES.head)
