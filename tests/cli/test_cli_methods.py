"""Methods on the command line, in whatever way they are named; the verbs `methods` and `env`."""

from __future__ import annotations

import dataclasses
import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
import typer.main

import skipstone
from skipstone.cli import app
from skipstone.decoding.settings import setting, settings_of
from tests.helpers.commandline import PROMPT, assert_refused, document, run, succeed


def test_text_and_json_ask_for_the_same(folder: Path) -> None:
    config = '{"method": "layerskip", "exit_layer": 2, "num_speculative_tokens": 3}'
    text = "layerskip exit-layer=2 num_speculative_tokens=3"
    common = ("generate", folder, "--prompt", PROMPT, "--max-new-tokens", 4)
    ways = [
        ("--speculative-config", config),
        ("--method", config),
        ("--method", text),
        ("--method", "num_speculative_tokens=3 exit_layer=2", "--speculative-config", '{"method": "layerskip"}'),
        ("--method", text, "--speculative-config", config),
    ]
    first, *others = [document(*common, *way)["method"] for way in ways]
    assert others == [first] * 4
    assert first["num_speculative_tokens"] == 3


def test_a_models_own_method_is_used_and_text_without_a_name_changes_it(variant: Callable[..., Path]) -> None:
    default = {"method": "layerskip", "exit_layer": 1, "num_speculative_tokens": 2}
    own = variant("generation_config.json", skipstone=default, _from_model_config=False)
    common = ("generate", own, "--prompt", PROMPT, "--max-new-tokens", 4)
    assert document(*common)["method"]["exit_layer"] == 1
    for text in ("exit_layer=3 confidence_threshold=adaptive", "layerskip exit_layer=3 confidence_threshold=adaptive"):
        changed = document(*common, "--method", text)["method"]
        assert (changed["exit_layer"], changed["num_speculative_tokens"]) == (3, 2)
        assert changed["confidence_threshold"] == "adaptive"
    other = document(*common, "--method", "early_exit exit_layer=3")["method"]
    assert other == {"method": "early_exit", "exit_layer": 3}


def test_values_arrive_with_their_fields_types(folder: Path) -> None:
    text = "layerskip exit_layer=2 confidence_threshold=0.5 reuse_cache=false rejection_sample_method=coupled"
    method = document("generate", folder, "--prompt", "x", "--method", text, "--max-new-tokens", 2)["method"]
    assert method == {
        "method": "layerskip",
        "exit_layer": 2,
        "num_speculative_tokens": 6,
        "confidence_threshold": 0.5,
        "reuse_cache": False,
        "rejection_sample_method": "coupled",
        "guard": False,
        "draft_vocabulary": None,
    }


def test_every_verb_that_takes_a_method_understands_the_one_spelling(folder: Path, tmp_path: Path) -> None:
    """A setting that does not exist is found out everywhere, in the same words, before any work."""
    said = "layerskip has no setting 'depth'; it has exit_layer, num_speculative_tokens"
    for verb in (("generate", folder, "--prompt", "x"), ("check", folder), ("bench", "run", folder), SURROGATE):
        out = ("--out", tmp_path / "results.jsonl") if verb[0] == "bench" else ()
        for text in ("layerskip depth=3", '{"method": "layerskip", "depth": 3}'):
            assert_refused(run(*verb, *out, "--method", text), said)
        assert_refused(run(*verb, *out, "--method", "layerskip exit_layer=two"), "exit_layer takes int|none, found 'two'")


SURROGATE = ("bench", "surrogate", "layers=2,hidden=64,vocab=128")


@dataclasses.dataclass(frozen=True)
class Invented(skipstone.Autoregressive):
    """A method of this test."""

    name: ClassVar[str] = "invented"
    fancy_width: int = setting(7, "how wide.")
    never_mind: float | None = setting(None, "what for.")


def test_a_new_method_brings_its_settings_along(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(skipstone.METHODS, "invented", Invented)
    common = ("generate", folder, "--prompt", "x", "--max-new-tokens", 2, "--method")
    found = document(*common, "invented fancy_width=9")
    assert found["method"] == {"method": "invented", "fancy_width": 9, "never_mind": None}
    said = "layerskip has no setting 'fancy_width'; it has exit_layer, num_speculative_tokens, "
    assert_refused(run(*common, "layerskip fancy_width=9"), said)
    assert "(fancy_width is a setting of invented)" in run(*common, "layerskip fancy_width=9").stderr
    explained = succeed("methods", "invented").stdout
    assert "fancy_width=7   int; default of skipstone.Invented\n      how wide." in explained


CHECK = """model --method --speculative-config --prompts --num-prompts --prompt-tokens --max-new-tokens --samples --seed --dtype
    --engine --quantize --device --json --debug"""
MEASURING = {
    "run": """models --plan --method --task --protocol --data-dir --out --num-prompts --skip-looping --prompt-tokens
        --max-new-tokens --temperature --top-p --samples --shots --chat --tune --tune-prompts --tune-tokens --ignore-eos
        --perplexity --allow-code-execution --dtype --device --engine --quantize --threads --seed --fresh""",
    "surrogate": """shape --agreement --exit-layer --skip-ratio --sure --contexts --method --out --num-prompts --prompt-tokens
        --max-new-tokens --tune-prompts --dtype --device --engine --quantize --threads --seed --fresh""",
    "report": "files --format --layout --out --pictures",
    "compare": "before after --tolerance",
}


TRAINING = {
    "layerskip": "recipe --output --fresh --data-dir --dry-run --gpus --shape --mfu --peak-tflops --json",
    "heads": "model --recipe --prompts --output --preset --max-disk --data-dir --dtype --device --fresh",
}


def test_flags_are_frozen() -> None:
    """A flag that goes or changes its name breaks scripts: change this list only on purpose."""
    root: Any = typer.main.get_command(app)
    generate = {name for p in root.commands["generate"].params for name in (*p.opts, *p.secondary_opts)}
    of_the_verb = """model --prompt --prompt-file --prompt-tokens --chat --method --speculative-config --max-new-tokens
        --temperature --top-k --top-p --min-p --seed --stop --ignore-eos --dtype --device --engine --quantize
        --kv-dtype --device-map --offload-folder --tp --trust-remote-code --compare --repeat --json --stats --explain --color
        --no-color --debug --generation-config --override-generation-config"""
    assert generate == {*of_the_verb.split()}
    verbs = "batch bench chat check costs demo env export families generate inspect methods push search serve train tune"
    assert set(root.commands) == {*verbs.split()}
    assert set(root.commands["bench"].commands) == {"run", "report", "compare", "surrogate"}
    checks = {name for parameter in root.commands["check"].params for name in parameter.opts}
    assert checks == {*CHECK.split()}
    for verb, own in MEASURING.items():
        flags = {name for parameter in root.commands["bench"].commands[verb].params for name in parameter.opts}
        assert flags == {*own.split(), "--debug"}, verb
    searching = {name for parameter in root.commands["search"].params for name in parameter.opts}
    assert searching == {
        *("model", "--budget-seconds", "--out", "--prompt", "--prompts", "--max-new-tokens", "--skip-ratio"),
        *("--num-speculative-tokens", "--picture", "--dtype", "--device", "--engine", "--quantize", "--seed", "--debug"),
    }
    looking = {name for parameter in root.commands["inspect"].params for name in parameter.opts}
    assert looking == {
        *("model", "--prompt", "--max-new-tokens", "--heads", "--out", "--dtype", "--device", "--engine", "--quantize"),
        *("--replay", "--json", "--debug"),
    }
    pricing = {name for parameter in root.commands["costs"].params for name in parameter.opts}
    assert pricing == {
        *("model", "--batch", "--draft-model", "--again", "--dtype", "--device", "--engine", "--quantize", "--json", "--debug")
    }
    answering = {name for parameter in root.commands["batch"].params for name in parameter.opts}
    assert answering == {
        *("requests", "output", "--model", "--resume", "--method", "--speculative-config", "--served-model-name"),
        *("--max-num-seqs", "--max-model-len", "--ray", "--address", "--actors", "--cpus-per-actor", "--dtype", "--device"),
        *("--engine", "--quantize", "--kv-dtype", "--trust-remote-code", "--debug"),
        *("--generation-config", "--override-generation-config"),
    }
    exporting = {name for parameter in root.commands["export"].params for name in parameter.opts}
    assert exporting == {
        *("model", "out", "--to", "--exit-layer", "--method", "--dtype", "--type", "--pre-tokenizer", "--debug")
    }
    training = root.commands["train"].commands
    assert set(training) == {"layerskip", "heads"}
    for verb, own in TRAINING.items():
        flags = {name for parameter in training[verb].params for name in parameter.opts}
        assert flags == {*own.split(), "--debug"}, verb
    assert {name for parameter in root.commands["methods"].params for name in parameter.opts} == {"name", "--json"}
    assert {name for parameter in root.commands["env"].params for name in parameter.opts} == {"--json"}


# the other verbs


def test_methods_lists_every_method_with_its_settings() -> None:
    listed = {method["name"]: method for method in json.loads(succeed("methods", "--json").stdout)}
    assert list(listed) == list(skipstone.METHODS)
    for name, kind in skipstone.METHODS.items():
        shown = {setting["name"]: setting["default"] for setting in listed[name]["settings"]}
        assert shown == json.loads(json.dumps({name: one.default for name, one in settings_of(kind).items()}))
        assert listed[name]["lossless"] is kind().lossless
        assert all(setting["help"] and setting["type"] for setting in listed[name]["settings"]), "undocumented setting"
    assert listed["layerskip"]["paper"] == "Elhoushi et al., ACL 2024, arXiv 2404.16710"
    table = succeed("methods").stdout
    assert all(word in table for word in (*listed, "num_speculative_tokens = 6", "exact", "lossy"))


@pytest.mark.parametrize("name", skipstone.METHODS)
def test_a_method_is_explained_setting_by_setting(name: str) -> None:
    kind, said = skipstone.METHODS[name], succeed("methods", name).stdout
    found = json.loads(succeed("methods", name, "--json").stdout)
    assert found in json.loads(succeed("methods", "--json").stdout)
    assert [one["name"] for one in found["settings"]] == list(settings_of(kind))
    for one in found["settings"]:
        own = one["name"] in kind.by_model
        assert one["from"] == ("generation_config.skipstone" if own else f"skipstone.{kind.__name__}")
        assert all(f"{one[part]}" in said for part in ("name", "type", "from", "help"))
    assert all(alias in said for alias in kind.aliases)
    assert f"{name}: " in said
    assert found["paper"] is None or found["paper"] in said


def test_a_method_that_does_not_exist_is_not_explained() -> None:
    assert_refused(run("methods", "medusa"), "unknown method 'medusa'; there are auto, autoregressive, early_exit")


def test_env_tells_versions_and_nothing_about_the_user() -> None:
    facts = json.loads(succeed("env", "--json").stdout)
    assert facts["torch"] == torch.__version__
    assert facts["skipstone"] == skipstone.__version__
    assert facts["torch_threads"] == torch.get_num_threads()
    assert facts["cores"] >= 1
    assert facts["memory_gib"] > 0
    said = succeed("env").stdout
    assert all(name in said for name in facts)
    assert str(Path.home()) not in said
    assert os.uname().nodename not in said


def test_version_and_bare_help() -> None:
    assert succeed("--version").stdout == f"skipstone {skipstone.__version__}\n"
    assert "generate" in succeed().stdout


@pytest.mark.parametrize("default", ["autoregressive", {"exit_layer": 2}])
def test_a_default_that_is_a_bare_name_or_lacks_one(variant: Callable[..., Path], default: Any) -> None:
    own = variant("generation_config.json", skipstone=default, _from_model_config=False)
    result = run("generate", own, "--prompt", PROMPT, "--max-new-tokens", 4)
    if isinstance(default, str):
        assert result.exit_code == 0
    else:
        assert_refused(result, "the key 'method' is missing in generation_config.skipstone")
