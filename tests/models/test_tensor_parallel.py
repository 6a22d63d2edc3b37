"""Two processes (gloo) that share a model's weights by transformers' tensor parallelism, against one that has them all."""

import json
import os
import random
import re
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch

import skipstone
from skipstone import AdaDecode, Swift
from skipstone.cli import main
from skipstone.engines.loading import load_model
from skipstone.engines.model_runner import ModelRunner
from skipstone.models import tensor_parallel, unsupported
from skipstone.models.fingerprint import fingerprint
from tests.helpers import families
from tests.helpers.conformance import COMMON, ROWS
from tests.helpers.served import free_port
from tests.helpers.support import save
from tests.helpers.training import in_processes

NEW = 8  # tokens
SAMPLED: dict[str, Any] = {"do_sample": True, "temperature": 0.8, "seed": 5}
EVERY = [*COMMON, "layerskip, some tokens"]


def texts(model: Any) -> dict[str, Any]:
    """Texts by method: by turns a ragged batch greedily, and one row drawn."""
    found: dict[str, Any] = {}
    ways = ("greedy", families.padded(families.prompts(2)), {}), ("drawn", {"input_ids": families.prompts(1)[0][None]}, SAMPLED)
    for index, name in enumerate(EVERY):
        method, (kind, inputs, options) = ROWS[name].method("llama", 4, "coupled"), ways[index % 2]
        output = skipstone.generate(model, inputs, method, max_new_tokens=NEW, engine="eager", **options)
        assert output.stats is not None
        found[f"{name}, {kind}"] = {"tokens": output.new_tokens, "drafted": output.stats.draft_steps}
    return found


def guarded(model: Any, number: int) -> dict[str, Any]:
    """Steps of methods that follow the clock, where the clocks of the processes say quite different things."""
    draws, reading, found = random.Random(number), [0.0], {}

    def clock() -> float:
        reading[0] += 0.001 if number == 0 else draws.choice([1e-5, 1e-3, 0.1])
        return reading[0]

    with mock.patch.object(tensor_parallel, "time", SimpleNamespace(perf_counter=clock)):
        for method in (Swift(skip_ratio=0.5, context_window=6), AdaDecode("original", 0.3, 4, exit_layers=(1, 2))):
            steps = list(skipstone.stream(model, families.prompts(1)[0][None], method, max_new_tokens=40))
            tokens = [token for step in steps for token in step.tokens[0]]
            found[method.name] = {"drafted": [step.drafted for step in steps], "tokens": tokens, "known": method.report(model)}
    return found


def disagreeing(model: Any, number: int) -> dict[str, Any]:
    """What only the first process may decide: a seed that nobody gave, and a criterion that looks at something else."""
    prompt = families.prompts(1)[0][None]
    torch.manual_seed(number)
    drawn = skipstone.generate(model, prompt, "autoregressive", max_new_tokens=NEW, do_sample=True)
    stopping: Any = [lambda ids, _: torch.tensor([number == 1])]
    stopped = skipstone.generate(model, prompt, "autoregressive", max_new_tokens=NEW, stopping_criteria=stopping)
    return {"drawn": drawn.new_tokens, "stopped": stopped.new_tokens}


def is_rank(number: int, port: int) -> None:
    """Say what torchrun says to each of two processes."""
    world = {"RANK": number, "LOCAL_RANK": number, "WORLD_SIZE": 2, "LOCAL_WORLD_SIZE": 2, "MASTER_PORT": port}
    os.environ.update({"MASTER_ADDR": "127.0.0.1", **{name: str(value) for name, value in world.items()}})


def rank(number: int, port: int, folder: Path) -> None:
    """One of the two processes. Its results are written to RANK.json."""
    is_rank(number, port)
    model, _ = skipstone.load(folder, tp_plan="auto")
    runner = ModelRunner(model)
    found = {"size": runner.ranks.size, "detail": runner.engine.detail, "reason": runner.engine_reason}
    options: dict[str, Any] = {"max_new_tokens": 4, "output_logits": True, "engine": "eager"}
    output = skipstone.generate(model, families.prompts(1)[0][None], "layerskip exit_layer=2", **options)
    found |= {"fingerprint": fingerprint(model), "logits": [one[0].tolist() for one in output.logits]}
    found |= {"texts": texts(model), "guarded": guarded(model, number), "disagreeing": disagreeing(model, number)}
    (folder / f"{number}.json").write_text(json.dumps(found))
    torch.distributed.destroy_process_group()


@pytest.fixture(scope="module")
def two(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    folder, port = save(families.build("llama"), tmp_path_factory.mktemp("two")), free_port()
    assert in_processes(rank, (0, port, folder), (1, port, folder), timeout=60) == [0, 0]
    return [json.loads((folder / f"{number}.json").read_text()) for number in (0, 1)]


@pytest.mark.slow
def test_two_processes_write_with_every_method_what_one_writes(two: Any) -> None:
    alone, (first, second) = texts(families.build("llama")), two
    assert len(alone) == len(EVERY)
    assert sum(one["drafted"] > 0 for one in alone.values()) >= 6
    assert first["texts"] == second["texts"]
    for name, text in alone.items():
        assert first["texts"][name]["tokens"] == text["tokens"], name
        decides = ROWS[name.rsplit(", ", 1)[0]].decides  # by the clock, which is another one alone
        assert decides or first["texts"][name] == text, name
    assert first["logits"] == second["logits"]
    for one in two:
        assert one["size"] == 2
        assert "sharded over 2 processes" in one["detail"]
        assert one["reason"].startswith("its weights are sharded over 2 processes, and the native engine wants all of them")
        assert one["fingerprint"] == fingerprint(families.build("llama"))


@pytest.mark.slow
def test_the_first_process_decides_what_follows_a_clock_a_seed_and_the_end_of_a_text(two: Any) -> None:
    """By their own clocks the processes would draft at different steps, and wait for one another forever."""
    for name in ("swift", "adadecode"):
        first, second = (one["guarded"][name] for one in two)
        assert first == second
        assert any(drafted != [0] for drafted in first["drafted"]), "nothing was decided"
        assert len({str(drafted) for drafted in first["drafted"]}) > 1, "nothing was decided"
    first, second = (one["disagreeing"] for one in two)
    assert first == second
    assert len(first["stopped"][0]) == NEW, "the first process's criterion never stops"


def apart(number: int, port: int, folder: Path, attentions: dict[str, str]) -> None:
    """One of the two processes. It writes by name how far the sharded model's logits are from the whole one's, in parts of the
    largest. attentions: the attention of each model in the folder."""
    is_rank(number, port)
    ids, found = families.prompts(1)[0][None], {}
    for name, attention in attentions.items():
        whole = load_model(folder / name, attn_implementation=attention)
        sharded = load_model(folder / name, attn_implementation=attention, tp_plan="auto")
        with torch.no_grad():
            expected, shared = (model(ids, use_cache=False).logits for model in (whole, sharded))
        ModelRunner(sharded, "eager")  # its layers are compared with the sharded forward
        found[name] = float((shared - expected).abs().max() / expected.abs().max())
    (folder / f"apart-{number}.json").write_text(json.dumps(found))
    torch.distributed.destroy_process_group()


NOT_SPARSE = "gemma3n_text, not sparse"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("names", "sharing"),
    [
        pytest.param((*families.NAMES[::3], "cohere", "doge", "gemma3n_text"), 6, id="some"),
        pytest.param((*families.NAMES, *families.FURTHER), 80, id="every", marks=pytest.mark.product),
    ],
)
def test_a_sharded_model_of_every_type_computes_what_the_whole_one_computes(
    names: tuple[str, ...], sharing: int, tmp_path: Path
) -> None:
    """What is compared with transformers' sharded forward alone may be wrong like that. sharing: number of types at least that
    can be shared, of all those that docs/lab/models.md names."""
    models = {name: families.build(name) for name in names}
    models[NOT_SPARSE] = families.build("gemma3n_text", activation_sparsity_pattern=[0.0] * 4)
    refused = {name: reason for name, model in models.items() if (reason := tensor_parallel.cannot_share(model.config, 2))}
    assert {name for name in refused if "has no plan" not in refused[name]} == {"cohere", "gemma3n_text", "doge"}
    attentions = {name: model.config._attn_implementation for name, model in models.items() if name not in refused}
    assert len(attentions) >= sharing
    assert NOT_SPARSE in attentions
    for name in attentions:
        models[name].save_pretrained(tmp_path / name)
    port = free_port()
    assert in_processes(apart, *((number, port, tmp_path, attentions) for number in (0, 1)), timeout=600) == [0, 0]
    for number in (0, 1):
        found = json.loads((tmp_path / f"apart-{number}.json").read_text())
        assert found.keys() == attentions.keys()
        assert {name: far for name, far in found.items() if not far < 1e-4} == {}


@pytest.mark.slow
def test_torchrun_starts_the_command_and_one_text_is_printed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model, logs = save(families.build("llama"), tmp_path / "model"), tmp_path / "logs"
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    torchrun += ["--log-dir", str(logs), "--redirects", "3"]  # the output of each process goes to files of its own
    generate = ["generate", str(model), "--prompt", "ab the stop"]
    generate += ["--max-new-tokens", "8", "--method", "layerskip exit_layer=2"]
    command = [*torchrun, "-m", "skipstone", *generate, "--stats", "--tp", "auto"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout == ""
    with pytest.raises(SystemExit):
        main([*generate, "--engine", "eager"])
    whole = capsys.readouterr().out
    assert whole.strip()
    assert {int(file.parent.name): file.read_text() for file in logs.rglob("stdout.log")} == {0: whole, 1: ""}
    assert {int(file.parent.name): "tokens" in file.read_text() for file in logs.rglob("stderr.log")} == {0: True, 1: False}


def test_one_process_of_torchrun_has_the_whole_model(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "1")
    assert ModelRunner(skipstone.load(save(families.build("gpt2"), tmp_path), tp_plan="auto")[0]).ranks.size == 1


UNSHARED = [
    ("llama", 3, "over 3 processes needs numbers of heads that 3 divides, found 4 attention heads and 2 key/value heads"),
    ("llama", 4, "needs numbers of heads that 4 divides, found 4 attention heads and 2 key/value heads"),
    ("gpt2", 2, "no plan for tensor parallelism of gpt2 models, found 2 processes"),
    ("cohere", 2, "norms of queries and keys"),
    ("gemma3n_text", 2, "activation_sparsity_pattern), of which a process that shares the model has a part only: load it"),
    ("doge", 2, "but not the dynamic masks that every head has of its own: load it whole"),
]


@pytest.mark.parametrize(("family", "size", "words"), UNSHARED)
def test_processes_that_cannot_share_a_model_are_refused_before_anything_is_loaded(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, family: str, size: int, words: str
) -> None:
    families.build(family).config.save_pretrained(tmp_path)  # there are no weights
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", str(size))
    with pytest.raises(ValueError, match=re.escape(words)):
        skipstone.load(tmp_path, tp_plan="auto")


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"tp_plan": "auto"}, "torchrun --nproc-per-node"),
        ({"tp_plan": "rows"}, "tp_plan must be \"auto\" or None, found 'rows'"),
        ({"tp_plan": "auto", "device_map": "auto"}, "give one of them"),
        ({"device_map": "auto", "device": "meta"}, "found device='meta'"),
        ({"offload_folder": "there"}, "give device_map, too"),
    ],
)
def test_tensor_parallelism_is_refused_outside_of_torchrun_and_beside_a_device_map(
    options: dict[str, Any], words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("RANK", raising=False)
    with pytest.raises(ValueError, match=words):
        skipstone.load(**options)


def test_weights_that_are_sharded_otherwise_are_refused() -> None:
    def shard(size: int, *names: str) -> Any:
        return SimpleNamespace(device_mesh=SimpleNamespace(mesh_dim_names=names or None, size=lambda: size))

    model: Any = SimpleNamespace(config=families.build("llama").config)
    unsupported._refuse_shards(model, [shard(2, "tp"), shard(2)])
    for shards, words in (([shard(2, "fsdp")], "sharded over fsdp"), ([shard(3, "tp")], "3 divides")):
        with pytest.raises(ValueError, match=words):
            unsupported._refuse_shards(model, shards)


def test_methods_read_no_clock_of_their_own() -> None:
    """All processes agree on decisions by time only where `Ranks` reads the clock."""
    package = Path(skipstone.__file__).parent
    for file in [*package.glob("methods/**/*.py"), *package.glob("hf/**/*.py")]:
        assert not re.search("perf_counter|import time", file.read_text()), file
