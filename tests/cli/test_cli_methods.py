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
from skipstone.cli import app, check, generate
from tests.helpers.commandline import LAYERSKIP, PROMPT, assert_refused, document, run, succeed


def test_json_settings_and_flags_ask_for_the_same(folder: Path) -> None:
    config = '{"method": "layerskip", "exit_layer": 2, "num_speculative_tokens": 3}'
    common = ("generate", folder, "--prompt", PROMPT, "--max-new-tokens", 4)
    whole = document(*common, "--speculative-config", config)
    mixed = document(
        *common, "--num-speculative-tokens", 3, "--exit-layer", 2, "--speculative-config", '{"method": "layerskip"}'
    )
    agreeing = document(*common, "--exit-layer", 2, "--speculative-config", config)
    assert whole["method"] == mixed["method"] == agreeing["method"]
    assert whole["method"]["num_speculative_tokens"] == 3


def test_a_models_own_default_is_used_and_flags_change_it(variant: Callable[..., Path]) -> None:
    default = {"method": "layerskip", "exit_layer": 1, "num_speculative_tokens": 2}
    own = variant("generation_config.json", skipstone=default, _from_model_config=False)
    common = ("generate", own, "--prompt", PROMPT, "--max-new-tokens", 4)
    assert document(*common)["method"]["exit_layer"] == 1
    changed = document(*common, "--exit-layer", 3, "--confidence-threshold", "adaptive")["method"]
    assert (changed["exit_layer"], changed["num_speculative_tokens"], changed["confidence_threshold"]) == (3, 2, "adaptive")
    other = document(*common, "--method", "early_exit", "--exit-layer", 3)["method"]
    assert other == {"method": "early_exit", "exit_layer": 3}


def test_flag_values_arrive_with_their_fields_types(folder: Path) -> None:
    flags = ("--confidence-threshold", "0.5", "--reuse-cache", "false", "--rejection-sample-method", "coupled")
    method = document("generate", folder, "--prompt", "x", *LAYERSKIP, *flags, "--max-new-tokens", 2)["method"]
    assert method == {
        "method": "layerskip",
        "exit_layer": 2,
        "num_speculative_tokens": 4,
        "confidence_threshold": 0.5,
        "reuse_cache": False,
        "rejection_sample_method": "coupled",
    }


@dataclasses.dataclass(frozen=True)
class Invented(skipstone.Autoregressive):
    """fancy_width: how wide. never_mind: what for."""

    name: ClassVar[str] = "invented"
    fancy_width: int = 7
    never_mind: float | None = None


def test_a_new_method_brings_its_flags_along(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(skipstone.METHODS, "invented", Invented)
    found = document("generate", folder, "--prompt", "x", "--max-new-tokens", 2, "--method", "invented", "--fancy-width", 9)
    assert found["method"] == {"method": "invented", "fancy_width": 9, "never_mind": None}
    ended = run("generate", folder, "--prompt", "x", *LAYERSKIP, "--fancy-width", 9)
    assert ended.stderr == "skipstone: layerskip has no --fancy-width; invented has it\n"
    help_text = " ".join(succeed("generate", "--help").stdout.replace("│", " ").split())
    assert "invented: how wide. [int, default 7]" in help_text


CHECK = """model --method --speculative-config --prompts --num-prompts --prompt-tokens --max-new-tokens --samples --seed --dtype
    --device --json --debug"""
MEASURING = {
    "run": """models --plan --method --task --protocol --data-dir --out --num-prompts --prompt-tokens --max-new-tokens
        --temperature --top-p --samples --shots --chat --tune --tune-prompts --tune-tokens --ignore-eos --perplexity
        --allow-code-execution --dtype --device --threads --seed --fresh""",
    "surrogate": """shape --agreement --exit-layer --skip-ratio --sure --contexts --method --out --num-prompts --prompt-tokens
        --max-new-tokens --tune-prompts --dtype --device --threads --seed --fresh""",
    "report": "files --format --layout --out --pictures",
    "compare": "before after --tolerance",
}


TRAINING = {
    "layerskip": "recipe --output --fresh --data-dir",
    "heads": "model --recipe --prompts --output --preset --max-disk --data-dir --dtype --device --fresh",
}


def test_flags_are_frozen() -> None:
    """A flag that goes or changes its name breaks scripts: change this list only on purpose."""
    flags = {name for parameter in generate.command().params for name in (*parameter.opts, *parameter.secondary_opts)}
    of_the_verb = """model --prompt --prompt-file --prompt-tokens --chat --method --speculative-config --max-new-tokens
        --temperature --top-k --top-p --min-p --seed --stop --ignore-eos --dtype --device --trust-remote-code --compare
        --repeat --json --stats --color --no-color --debug"""
    of_methods = """--exit-layer --num-speculative-tokens --confidence-threshold --reuse-cache --rejection-sample-method
        --skip-ratio --context-window --search --objective --max-steps --patience --enough --dynamic-verification --adjust
        --guard --profile --search-seed --skip-attention --skip-mlp --stop-threshold --heads --threshold
        --max-pending --exit-layers --verification --recheck --draft-model --schedule --draft-device --draft-dtype
        --max-window --relaxed --adaptive-length --fixed-window --variant --prompt-lookup-max --prompt-lookup-min --prefer
        --block --window --ngram --guesses"""
    assert flags == {*of_the_verb.split(), *of_methods.split()}
    root: Any = typer.main.get_command(app)
    assert set(root.commands) == {"demo", "generate", "methods", "env", "train", "bench", "check", "inspect", "search"}
    assert set(root.commands["bench"].commands) == {"run", "report", "compare", "surrogate"}
    checks = {name for parameter in check.command().params for name in parameter.opts}
    assert checks == {*CHECK.split(), *of_methods.split()}
    for verb, own in MEASURING.items():
        flags = {name for parameter in root.commands["bench"].commands[verb].params for name in parameter.opts}
        assert flags == {*own.split(), "--debug"}, verb
    searching = {name for parameter in root.commands["search"].params for name in parameter.opts}
    assert searching == {
        *("model", "--budget-seconds", "--out", "--prompt", "--max-new-tokens", "--skip-ratio", "--num-speculative-tokens"),
        *("--picture", "--dtype", "--device", "--seed", "--debug"),
    }
    looking = {name for parameter in root.commands["inspect"].params for name in parameter.opts}
    assert looking == {
        *("model", "--prompt", "--max-new-tokens", "--heads", "--out", "--dtype", "--device", "--json", "--debug"),
    }
    training = root.commands["train"].commands
    assert set(training) == {"layerskip", "heads"}
    for verb, own in TRAINING.items():
        flags = {name for parameter in training[verb].params for name in parameter.opts}
        assert flags == {*own.split(), "--debug"}, verb
    assert {name for verb in ("methods", "env") for p in root.commands[verb].params for name in p.opts} == {"--json"}


# the other verbs


def test_methods_lists_every_method_with_its_settings() -> None:
    listed = {method["name"]: method for method in json.loads(succeed("methods", "--json").stdout)}
    assert list(listed) == list(skipstone.METHODS)
    for name, kind in skipstone.METHODS.items():
        shown = {setting["name"]: setting["default"] for setting in listed[name]["settings"]}
        assert shown == json.loads(json.dumps({field.name: field.default for field in dataclasses.fields(kind)}))
        assert listed[name]["lossless"] is kind().lossless
        assert all(setting["help"] and setting["type"] for setting in listed[name]["settings"]), "undocumented setting"
    assert listed["layerskip"]["paper"] == "Elhoushi et al., ACL 2024, arXiv 2404.16710"
    table = succeed("methods").stdout
    assert all(word in table for word in (*listed, "num_speculative_tokens = 6", "exact", "lossy"))


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
