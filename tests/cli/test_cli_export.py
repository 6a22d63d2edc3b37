"""`skipstone export`: two formats, the commands for other engines, and refusals in a sentence that leave nothing behind."""

import json
import sys
from pathlib import Path

import gguf
import pytest
from transformers import AutoModelForCausalLM, AutoTokenizer

from tests.helpers.commandline import PROMPT, assert_refused, expected, run, succeed

NANO = "skipstone-nano"


def test_a_draft_and_the_commands_for_other_engines(folder: Path, tmp_path: Path) -> None:
    out = tmp_path / "a draft"
    said = succeed("export", folder, out, "--to", "draft", "--exit-layer", 2).stdout
    assert_refused(run("export", folder, out, "--exit-layer", 2), f"{out}: there already, and an export overwrites nothing")
    assert_refused(run("export", folder, tmp_path / "no" / "out", "--exit-layer", 2), "no such folder")
    assert f"{out}: layers 0 to 1 of 4, with norm and head, " in said
    lines = {line.split(":")[0].strip(): line for line in said.splitlines()[2:]}
    assert list(lines) == ["transformers", "vLLM", "SGLang", "TensorRT-LLM", "llama.cpp"]
    speculative = json.loads(lines["vLLM"].partition("'")[2].rpartition("'")[0])
    assert speculative == {"method": "draft_model", "model": str(out), "num_speculative_tokens": 6}
    assert f"--speculative-draft-model-path '{out}' --speculative-num-steps 6" in lines["SGLang"]
    assert f'DraftTargetDecodingConfig(max_draft_len=6, speculative_model="{out}")' in lines["TensorRT-LLM"]
    target, draft = AutoModelForCausalLM.from_pretrained(folder), AutoModelForCausalLM.from_pretrained(out)
    ids = AutoTokenizer.from_pretrained(out)(PROMPT, return_tensors="pt")["input_ids"]
    text = target.generate(ids, assistant_model=draft, max_new_tokens=24, do_sample=False)
    assert text[0, ids.shape[1] :].tolist() == expected(folder)[0]


def test_the_bundled_model_as_a_pair_of_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    out = tmp_path / "pair"
    refused = run("export", NANO, out, "--to", "gguf")
    assert_refused(refused, "the tokenizer cuts texts into words by a rule of its own")
    assert list(tmp_path.iterdir()) == []
    said = succeed("export", NANO, out, "--to", "gguf", "--pre-tokenizer", "gpt-2").stdout
    assert f"{out / 'draft.gguf'}: layers 0 to 5 of 24, with norm and head, " in said
    assert f"-md {out / 'draft.gguf'} --spec-type draft-simple --spec-draft-n-max 8 --spec-draft-p-min 0.5" in said
    assert "The files cut texts as gpt-2 does, not as the tokenizer: give prompts as token ids." in said
    for name, layers in (("target.gguf", 24), ("draft.gguf", 6)):
        file = gguf.GGUFReader(out / name)
        assert file.fields["llama.block_count"].contents() == layers
        assert {one.tensor_type.name for one in file.tensors} == {"BF16", "F32"}, "weights keep their own type"
    monkeypatch.setitem(sys.modules, "gguf", None)
    refused = run("export", NANO, tmp_path / "other", "--to", "gguf", "--pre-tokenizer", "gpt-2")
    assert_refused(refused, 'GGUF files need gguf: pip install "skipstone[export]"')


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (("--exit-layer", 4), "exit_layer must lie between 1 and 3 for a model of 4 layers, found 4"),
        (("--exit-layer", 2, "--method", "early_exit"), "give either an exit layer or a method, found both"),
        (("--exit-layer", 2, "--to", "gguf", "--type", "Q8_0"), "--type must be one of F32, F16, BF16, found 'Q8_0'"),
        (("--exit-layer", 2, "--type", "F32"), "--type is for --to gguf"),
    ],
)
def test_bad_input_is_one_sentence(flags: tuple[str, ...], said: str, folder: Path, tmp_path: Path) -> None:
    assert_refused(run("export", folder, tmp_path / "out", *flags), said)
    assert list(tmp_path.iterdir()) == []
