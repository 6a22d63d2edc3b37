"""Two processes (gloo) that share a model's weights by transformers' tensor parallelism, against one that has them all."""

from __future__ import annotations

import contextlib
import io
import json
import os
import random
import socket
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

import skipstone
from skipstone import AdaDecode, Swift
from skipstone.cli import main
from skipstone.engines.loading import load_model
from skipstone.engines.model_runner import ModelRunner
from skipstone.methods import METHODS
from skipstone.models import tensor_parallel, unsupported
from skipstone.models.fingerprint import fingerprint
from tests.helpers import families
from tests.helpers.conformance import ROWS
from tests.helpers.support import tokenizer
from tests.helpers.training import in_processes

NEW, FEW = 20, 8  # tokens, in the full product and always
SAMPLED: dict[str, Any] = {"do_sample": True, "temperature": 0.8, "seed": 5}
ARGUMENTS = ["--prompt", "ab the stop", "--max-new-tokens", "8", "--method", "layerskip exit_layer=2", "--stats"]
EVERY = [*METHODS, "layerskip, some tokens"]
QUICK = ["llama"]
FAMILIES = ["qwen2", "mistral", "qwen3", "gemma3_text", "phi3", "mixtral", "qwen3_moe", "gpt_neox"]
"""All methods on the first; sliding windows, norms of heads, mixed layer types, fused projections and experts on the others."""


def texts(model: Any, family: str, names: list[str], new: int = NEW, both: bool = True) -> dict[str, Any]:
    """What methods write: a ragged batch greedily, and one row drawn. both: else the one or the other, method by method."""
    found: dict[str, Any] = {}
    greedily = ("greedy", families.padded(families.prompts(2)), {})
    at_random = ("drawn", {"input_ids": families.prompts(1)[0][None]}, SAMPLED)
    for index, name in enumerate(names):
        method = ROWS[name].method(family, 4, "coupled")
        for kind, inputs, options in (greedily, at_random) if both else ((greedily, at_random)[index % 2],):
            output = skipstone.generate(model, inputs, method, max_new_tokens=new, engine="eager", **options)
            assert output.stats is not None
            found[f"{name}, {kind}"] = {"tokens": output.new_tokens, "drafted": output.stats.draft_steps}
    return found


def logits(model: Any, prompt: Tensor) -> list[list[float]]:
    """Raw logits of four tokens."""
    output = skipstone.generate(model, prompt, "layerskip exit_layer=2", max_new_tokens=4, output_logits=True, engine="eager")
    return [one[0].tolist() for one in output.logits]


def guarded(model: Any, number: int) -> dict[str, Any]:
    """What methods do that follow the clock, where the clocks of the processes say quite different things."""
    draws, reading = random.Random(number), [0.0]

    def clock() -> float:
        reading[0] += 0.001 if number == 0 else draws.choice([1e-5, 1e-3, 0.1])
        return reading[0]

    found = {}
    tensor_parallel.time = SimpleNamespace(perf_counter=clock)  # type: ignore[assignment]
    try:
        for method in (Swift(skip_ratio=0.5, context_window=6), AdaDecode("original", 0.3, 4, exit_layers=(1, 2))):
            steps = list(skipstone.stream(model, families.prompts(1)[0][None], method, max_new_tokens=40))
            found[method.name] = {
                "drafted": [step.drafted for step in steps],
                "tokens": [token for step in steps for token in step.tokens[0]],
                "known": method.report(model),
            }
    finally:
        tensor_parallel.time = time
    return found


def disagreeing(model: Any, number: int) -> dict[str, Any]:
    """What only the first process may decide: a seed that nobody gave, and a criterion that looks at something else."""
    prompt = families.prompts(1)[0][None]
    torch.manual_seed(number)
    drawn = skipstone.generate(model, prompt, "autoregressive", max_new_tokens=FEW, do_sample=True)
    stopping: Any = [lambda ids, _: torch.tensor([number == 1])]
    stopped = skipstone.generate(model, prompt, "autoregressive", max_new_tokens=FEW, stopping_criteria=stopping)
    return {"drawn": drawn.new_tokens, "stopped": stopped.new_tokens}


def command(folder: Path) -> dict[str, Any]:
    """What the command line prints and says."""
    out, said = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(said), pytest.raises(SystemExit) as left:
        main(["generate", str(folder), *ARGUMENTS, "--tp", "auto"])
    return {"out": out.getvalue(), "said": said.getvalue(), "code": left.value.code}


def is_rank(number: int, port: int) -> None:
    """Say what torchrun says to each of two processes."""
    world = {"RANK": number, "LOCAL_RANK": number, "WORLD_SIZE": 2, "LOCAL_WORLD_SIZE": 2, "MASTER_PORT": port}
    os.environ.update({"MASTER_ADDR": "127.0.0.1", **{name: str(value) for name, value in world.items()}})


def rank(number: int, port: int, folder: Path, names: list[str]) -> None:
    """One of the two processes. What it finds is written to NAME-RANK.json."""
    is_rank(number, port)
    for family in names:
        model, _ = skipstone.load(folder / family, tp_plan="auto")
        found: dict[str, Any] = {}
        if family in QUICK:
            runner = ModelRunner(model)
            found = {"size": runner.ranks.size, "detail": runner.engine.detail, "reason": runner.engine_reason}
            found |= {"fingerprint": fingerprint(model), "logits": logits(model, families.prompts(1)[0][None])}
            found |= {"texts": texts(model, family, EVERY, FEW, both=False), "guarded": guarded(model, number)}
            found |= {"disagreeing": disagreeing(model, number), "command": command(folder / family)}
        else:
            found["texts"] = texts(model, family, list(METHODS) if family == "qwen2" else ["layerskip", "swift"])
        (folder / f"{family}-{number}.json").write_text(json.dumps(found))
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def together(folder: Path, names: list[str]) -> dict[str, list[dict[str, Any]]]:
    """What both processes found, by family."""
    for family in names:
        families.build(family).save_pretrained(folder / family)
        tokenizer().save_pretrained(folder / family)
    port = free_port()
    assert in_processes(rank, (0, port, folder, names), (1, port, folder, names), timeout=60) == [0, 0]
    return {name: [json.loads((folder / f"{name}-{number}.json").read_text()) for number in (0, 1)] for name in names}


@pytest.fixture(scope="module")
def two(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    return together(tmp_path_factory.mktemp("two"), QUICK)["llama"]


def assert_same(found: list[dict[str, Any]], alone: dict[str, Any]) -> None:
    first, second = (one["texts"] for one in found)
    assert first.keys() == alone.keys()
    for name, text in alone.items():
        assert first[name] == second[name], name
        assert first[name]["tokens"] == text["tokens"], name
        decides = ROWS[name.rsplit(", ", 1)[0]].decides  # by the clock, which is another one alone
        assert decides or first[name] == text, name


@pytest.mark.slow
def test_two_processes_write_with_every_method_what_one_writes(two: Any) -> None:
    alone = texts(families.build("llama"), "llama", EVERY, FEW, both=False)
    assert len(alone) == len(EVERY)
    assert sum(one["drafted"] > 0 for one in alone.values()) >= 6
    assert_same(two, alone)


@pytest.mark.slow
def test_the_weights_are_shared_and_the_engine_says_so(two: Any) -> None:
    for one in two:
        assert one["size"] == 2
        assert "sharded over 2 processes" in one["detail"]
        assert one["reason"].startswith("its weights are sharded over 2 processes, and the native engine wants all of them")
        assert one["fingerprint"] == fingerprint(families.build("llama"))


@pytest.mark.slow
def test_logits_have_the_same_bits_in_both_processes(two: Any) -> None:
    assert two[0]["logits"] == two[1]["logits"]


@pytest.mark.slow
@pytest.mark.parametrize("name", ["swift", "adadecode"])
def test_the_first_process_decides_what_follows_a_clock(two: Any, name: str) -> None:
    """By their own clocks the processes would draft at different steps, and wait for one another forever."""
    first, second = (one["guarded"][name] for one in two)
    assert first == second
    assert any(drafted != [0] for drafted in first["drafted"]), "nothing was decided"
    assert len({str(drafted) for drafted in first["drafted"]}) > 1, "nothing was decided"


@pytest.mark.slow
def test_a_seed_and_the_end_of_a_text_are_the_first_process_s(two: Any) -> None:
    first, second = (one["disagreeing"] for one in two)
    assert first == second
    assert len(first["stopped"][0]) == FEW, "the first process's criterion never stops"


@pytest.mark.slow
def test_only_the_first_process_prints(two: Any, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    first, second = (one["command"] for one in two)
    families.build("llama").save_pretrained(tmp_path)
    tokenizer().save_pretrained(tmp_path)
    with pytest.raises(SystemExit):
        main(["generate", str(tmp_path), *ARGUMENTS, "--engine", "eager"])
    printed = capsys.readouterr().out
    assert printed
    assert first["out"] == printed
    assert "tokens" in first["said"]
    assert (first["code"], second["code"]) == (0, 0)
    assert (second["out"], second["said"]) == ("", "")


@pytest.mark.slow
def test_two_processes_write_what_one_writes_in_every_kind_of_family(tmp_path: Path) -> None:
    found = together(tmp_path, FAMILIES)
    for family in FAMILIES:
        names = list(METHODS) if family == "qwen2" else ["layerskip", "swift"]
        assert_same(found[family], texts(families.build(family), family, names))


def apart(number: int, port: int, folder: Path, attentions: dict[str, str]) -> None:
    """One of the two processes. How far the sharded model's logits are from the whole model's, in parts of the largest, is
    written to apart-RANK.json by name. attentions: how each model in the folder attends."""
    is_rank(number, port)
    ids, found = families.prompts(1)[0][None], {}
    for name, attention in attentions.items():
        whole = load_model(folder / name, attn_implementation=attention)
        sharded = load_model(folder / name, attn_implementation=attention, tp_plan="auto")
        with torch.no_grad():
            expected, told = (model(ids, use_cache=False).logits for model in (whole, sharded))
        ModelRunner(sharded, "eager")  # whose layers are compared with the sharded forward
        found[name] = float((told - expected).abs().max() / expected.abs().max())
    (folder / f"apart-{number}.json").write_text(json.dumps(found))
    torch.distributed.destroy_process_group()


NOT_SPARSE = "gemma3n_text, not sparse"


@pytest.mark.slow
def test_a_sharded_model_of_every_type_computes_what_the_whole_one_computes(tmp_path: Path) -> None:
    """What is compared with transformers' sharded forward alone may be wrong like that."""
    models = {name: families.build(name) for name in (*families.NAMES, *families.FURTHER)}
    models[NOT_SPARSE] = families.build("gemma3n_text", activation_sparsity_pattern=[0.0] * 4)
    refused = {name: reason for name, model in models.items() if (reason := tensor_parallel.cannot_share(model.config, 2))}
    assert {name for name in refused if "has no plan" not in refused[name]} == {"cohere", "gemma3n_text", "doge"}
    attentions = {name: model.config._attn_implementation for name, model in models.items() if name not in refused}
    assert len(attentions) >= 80, "docs/lab/models.md says how many, and there is the one that is not sparse"
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
    model, logs = tmp_path / "model", tmp_path / "logs"
    families.build("llama").save_pretrained(model)
    tokenizer().save_pretrained(model)
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    torchrun += ["--log-dir", str(logs), "--redirects", "3"]  # what each process prints and says to files of its own
    generate = ["generate", str(model), *ARGUMENTS]
    done = subprocess.run(
        [*torchrun, "-m", "skipstone", *generate, "--tp", "auto"], capture_output=True, text=True, timeout=300, check=False
    )
    assert done.returncode == 0, done.stderr
    with pytest.raises(SystemExit):
        main([*generate, "--engine", "eager"])
    printed = capsys.readouterr().out
    outs = {int(file.parent.name): file.read_text() for file in logs.rglob("stdout.log")}
    assert outs == {0: printed, 1: ""}
    assert printed.strip()
    assert done.stdout == ""


def refused(monkeypatch: pytest.MonkeyPatch, size: int, folder: Path) -> str:
    """What `load` says to one of so many processes."""
    for name, value in {"RANK": 0, "WORLD_SIZE": size}.items():
        monkeypatch.setenv(name, str(value))
    with pytest.raises(ValueError) as error:
        skipstone.load(folder, tp_plan="auto")
    return str(error.value)


@pytest.mark.parametrize(
    ("family", "size", "words"),
    [
        ("llama", 3, "over 3 processes needs numbers of heads that 3 divides, found 4 attention heads and 2 key/value heads"),
        ("llama", 4, "needs numbers of heads that 4 divides, found 4 attention heads and 2 key/value heads"),
        ("gpt2", 2, "no plan for tensor parallelism of gpt2 models, found 2 processes"),
        ("cohere", 2, "norms of queries and keys"),
        ("gemma3n_text", 2, "activation_sparsity_pattern), of which a process that shares the model has a part only: load it"),
        ("doge", 2, "but not the dynamic masks that every head has of its own: load it whole"),
    ],
)
def test_processes_that_cannot_share_a_model_are_refused_before_anything_is_loaded(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, family: str, size: int, words: str
) -> None:
    config = families.build(family).config
    config.save_pretrained(tmp_path)  # there are no weights
    assert words in refused(monkeypatch, size, tmp_path)


def test_tensor_parallelism_is_refused_outside_of_torchrun_and_beside_a_device_map(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("RANK", raising=False)
    cases: list[tuple[dict[str, Any], str]] = [
        ({"tp_plan": "auto"}, "torchrun --nproc-per-node"),
        ({"tp_plan": "rows"}, "tp_plan must be \"auto\" or None, found 'rows'"),
        ({"tp_plan": "auto", "device_map": "auto"}, "give one of them"),
        ({"device_map": "auto", "device": "meta"}, "found device='meta'"),
        ({"offload_folder": "there"}, "give device_map, too"),
    ]
    for options, words in cases:
        with pytest.raises(ValueError) as error:
            skipstone.load(**options)
        assert words in str(error.value)


def shard(size: int, *names: str) -> Any:
    return SimpleNamespace(device_mesh=SimpleNamespace(mesh_dim_names=names or None, size=lambda: size))


def test_weights_that_are_sharded_otherwise_are_refused() -> None:
    model: Any = SimpleNamespace(config=families.build("llama").config)
    unsupported._refuse_shards(model, [shard(2, "tp"), shard(2)])
    for shards, words in (([shard(2, "fsdp")], "sharded over fsdp"), ([shard(3, "tp")], "3 divides")):
        with pytest.raises(ValueError, match=words):
            unsupported._refuse_shards(model, shards)


def test_methods_read_no_clock_of_their_own() -> None:
    """What they decide by time is agreed on by all processes only where `Ranks` read it."""
    package = Path(skipstone.__file__).parent
    for folder in ("methods", "hf"):
        for file in (package / folder).rglob("*.py"):
            assert "perf_counter" not in file.read_text(), file
            assert "import time" not in file.read_text(), file


def test_gemma_3n_is_shared_where_no_activations_are_cut_off() -> None:
    config = families.build("gemma3n_text", activation_sparsity_pattern=[0.0] * 4).config
    assert tensor_parallel.cannot_share(config, 2) is None
    config.activation_sparsity_pattern = [0.0, 0.0, 0.0, 0.5]
    assert "activation_sparsity_pattern" in str(tensor_parallel.cannot_share(config, 2))
