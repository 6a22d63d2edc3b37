"""Methods on the command line, in whatever way they are named; the verbs `methods` and `env`."""

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
from tests.helpers.parcels import model_folder, target


def test_text_and_json_ask_for_the_same_and_values_have_their_fields_types(folder: Path) -> None:
    config = '{"method": "layerskip", "exit_layer": 2, "confidence_threshold": 0.5, "reuse_cache": false}'
    text = "layerskip exit-layer=2 confidence_threshold=0.5 reuse_cache=false"
    common = ("generate", folder, "--prompt", PROMPT, "--max-new-tokens", 4)
    ways = [
        ("--speculative-config", config),
        ("--method", config),
        ("--method", text),
        ("--method", text.removeprefix("layerskip "), "--speculative-config", '{"method": "layerskip"}'),
        ("--method", text, "--speculative-config", config),
    ]
    first, *others = [document(*common, *way)["method"] for way in ways]
    assert others == [first] * 4
    assert first | {"exit_layer": 2, "confidence_threshold": 0.5, "reuse_cache": False} == first


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
    config = json.loads((own / "generation_config.json").read_text())
    (own / "generation_config.json").write_text(json.dumps(config | {"skipstone": {"exit_layer": 2}}))
    assert_refused(run(*common), "the key 'method' is missing in generation_config.skipstone")


@dataclasses.dataclass(frozen=True)
class Invented(skipstone.Autoregressive):
    """A method of this test."""

    name: ClassVar[str] = "invented"
    fancy_width: int = setting(7, "how wide.")
    never_mind: float | None = setting(None, "what for.")


def test_a_new_method_brings_its_settings_along(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(skipstone.METHODS, "invented", Invented)
    common = ("generate", folder, "--prompt", "x", "--max-new-tokens", 2, "--method")
    result = document(*common, "invented fancy_width=9")
    assert result["method"] == {"method": "invented", "fancy_width": 9, "never_mind": None}
    said = "layerskip has no setting 'fancy_width'; it has exit_layer, num_speculative_tokens, "
    assert_refused(run(*common, "layerskip fancy_width=9"), said)
    assert "(fancy_width is a setting of invented)" in run(*common, "layerskip fancy_width=9").stderr
    explained = succeed("methods", "invented").stdout
    assert "fancy_width=7   int; default of skipstone.Invented\n      how wide." in explained


ENGINE = "--dtype --device --engine --quantize"
MODEL = f"{ENGINE} --compute-dtype --no-mtp"
GENERATION = f"{MODEL} --kv-dtype --trust-remote-code --no-cache --generation-config --override-generation-config"
METHOD = "--method --speculative-config"
FLAGS = {
    "generate": f"""model --prompt --prompt-file --prompt-tokens --chat {METHOD} --max-new-tokens --temperature --top-k --top-p
        --min-p --seed --stop --ignore-eos {GENERATION} --device-map --offload-folder --tp --compare --repeat --json --stats
        --explain --color --no-color""",
    "chat": f"model {METHOD} --system --max-new-tokens --temperature --top-p --seed {GENERATION} --color --no-color",
    "check": f"""model {METHOD} --prompts --num-prompts --prompt-tokens --max-new-tokens --samples --seed {MODEL} --json""",
    "search": f"""model --search --budget-seconds --iterations --out --prompt --prompts --max-new-tokens --skip-ratio
        --num-speculative-tokens --picture {MODEL} --seed""",
    "tune": f"""model --prompt --prompts --budget-seconds --method --max-new-tokens --temperature --keep --no-keep
        {GENERATION} --json""",
    "inspect": f"model --prompt --max-new-tokens --heads --method --replay --out {MODEL} --json",
    "costs": f"model --batch --draft-model --again {MODEL} --json",
    "demo": "model --json --svg --engine --quantize",
    "serve": f"""model {METHOD} --host --port --api-key --served-model-name --max-num-seqs --max-model-len --max-waiting
        --request-timeout --drain-timeout --kv-cache-memory-bytes --log-format --ray --ray-address --replicas --min-replicas
        --max-replicas --cpus-per-replica --gpus-per-replica {GENERATION}""",
    "batch": f"""requests output --model --resume {METHOD} --served-model-name --max-num-seqs --max-model-len --ray --address
        --actors --cpus-per-actor {GENERATION}""",
    "push": "path repo_id --private --revision --dry-run",
    "export": "model out --to --exit-layer --method --dtype --type --pre-tokenizer",
    "methods": "name --json",
    "families": "name --json --markdown",
    "env": "model --quantize --json",
    "cache list": "--json",
    "cache clear": "",
    "cache verify": "",
    "bench run": f"""models --plan --method --task --protocol --data-dir --out --num-prompts --skip-looping --prompt-tokens
        --max-new-tokens --temperature --top-p --samples --shots --chat --no-chat --tune --tune-prompts --tune-tokens
        --ignore-eos --perplexity --allow-code-execution {ENGINE} --threads --device-map --seed --fresh --no-fresh""",
    "bench surrogate": f"""shape --agreement --exit-layer --skip-ratio --sure --contexts --method --out --num-prompts
        --prompt-tokens --max-new-tokens --tune-prompts {ENGINE} --threads --seed --fresh --no-fresh""",
    "bench report": "files --format --layout --out --pictures",
    "bench compare": "before after --tolerance",
    "bench record": "files --out",
    "bench repeat": "file --task --method --temperature --model --folder --data-dir --threads --out",
    "train layerskip": """recipe --output --fresh --no-fresh --seed --data-dir --dry-run --no-dry-run --gpus --shape --mfu
        --peak-tflops --json""",
    "train heads": """model --recipe --prompts --output --preset --max-disk --data-dir --dtype --device --fresh --no-fresh""",
}


def test_flags_are_frozen() -> None:
    """A flag that goes or changes its name breaks scripts: change this list only on purpose."""
    root: Any = typer.main.get_command(app)
    commands = {}
    for verb, command in root.commands.items():
        commands |= {f"{verb} {name}": one for name, one in getattr(command, "commands", {}).items()} or {verb: command}
    assert set(commands) == set(FLAGS)
    for verb, flags in FLAGS.items():
        result = {name for one in commands[verb].params for name in (*one.opts, *one.secondary_opts)}
        assert result == {*flags.split(), "--debug"}, verb


def test_methods_lists_and_explains_every_method_with_its_settings() -> None:
    listed = {method["name"]: method for method in json.loads(succeed("methods", "--json").stdout)}
    assert list(listed) == list(skipstone.METHODS)
    for name, kind in skipstone.METHODS.items():
        result, said = listed[name], succeed("methods", name).stdout
        shown = {setting["name"]: setting["default"] for setting in result["settings"]}
        assert shown == json.loads(json.dumps({name: one.default for name, one in settings_of(kind).items()}))
        assert result["lossless"] is kind().lossless
        for one in result["settings"]:
            own = one["name"] in kind.by_model
            assert one["from"] == ("generation_config.skipstone" if own else f"skipstone.{kind.__name__}")
            assert all(one[part] and f"{one[part]}" in said for part in ("name", "type", "from", "help"))
        assert all(alias in said for alias in kind.aliases)
        assert list(result["presets"]) == list(kind.presets)
        assert all(f"preset={name}" in said and preset.source in said for name, preset in kind.presets.items())
        assert result["paper"] is None or result["paper"] in said
    assert json.loads(succeed("methods", "swift", "--json").stdout) == listed["swift"]
    table = succeed("methods").stdout
    assert all(word in table for word in (*listed, "num_speculative_tokens = 6", "exact", "lossy"))


@pytest.mark.parametrize(("quantize", "path"), [("none", "computed as stored"), ("int8", "quantised to int8")])
def test_env_tells_how_the_matrices_of_a_model_are_computed(quantize: str, path: str, tmp_path: Path) -> None:
    folder, model = model_folder(tmp_path / "model"), target().model
    matrices = [weight for weight in model.state_dict().values() if weight.dim() == 2]
    embedding = model.get_input_embeddings().weight.nbytes  # rows of it are read, so it is never quantised
    stored = sum(weight.nbytes for weight in matrices)
    expected = {"computed as stored": (stored, stored)}
    if quantize == "int8":
        expected = {"computed as stored": (embedding, embedding), path: (stored - embedding, (stored - embedding) * 34 / 128)}
    found = json.loads(succeed("env", str(folder), "--quantize", quantize, "--json").stdout)["matrices"]
    assert {one["path"]: (one["stored_bytes"], one["computed_bytes"]) for one in found} == expected
    assert {one["kind"] for one in found} == {"float32"}
    assert path in succeed("env", str(folder), "--quantize", quantize).stdout


def test_env_tells_versions_and_nothing_about_the_user() -> None:
    facts, said = json.loads(succeed("env", "--json").stdout), succeed("env").stdout
    assert (facts["torch"], facts["skipstone"]) == (torch.__version__, skipstone.__version__)
    assert facts["torch_threads"] == torch.get_num_threads()
    assert facts["engines"][0] == "eager"
    assert all(name in said for name in facts)
    assert str(Path.home()) not in said
    assert os.uname().nodename not in said
