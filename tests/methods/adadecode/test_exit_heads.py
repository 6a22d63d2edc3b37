"""Files of exit heads: written whole, read back, refused where they are another model's or damaged."""

import copy
import json
from pathlib import Path
from typing import Any

import pytest
import torch

import skipstone
from skipstone import AdaDecode, ExitHeads
from skipstone.engines.model_runner import ModelRunner
from skipstone.methods.adadecode import heads as exit_heads
from skipstone.methods.adadecode.heads import new_card
from tests.helpers.machine import llama, prompt


def runner(**shape: Any) -> ModelRunner:
    return ModelRunner(llama(**{"layers": 6, **shape}))


def disturbed(model: ModelRunner, kind: Any = "square", rank: int | None = None) -> ExitHeads:
    heads = ExitHeads(new_card(model, (2, 4), kind, rank, name="mine"))
    heads.start_from(model)
    torch.manual_seed(0)
    with torch.no_grad():
        for one in heads.parameters():
            one += 0.05 * torch.randn_like(one)
    return heads


KINDS = [("square", None), ("low_rank", 3), ("full", None)]


@pytest.mark.parametrize(("kind", "rank"), KINDS)
def test_saved_heads_are_loaded_and_draft(kind: Any, rank: int | None, tmp_path: Path) -> None:
    model, folder = runner(), tmp_path / "heads"
    heads = disturbed(model, kind, rank)
    heads.save(folder)
    assert sorted(path.name for path in folder.iterdir()) == ["exit_heads.json", "exit_heads.safetensors"]
    again = exit_heads.load_heads(folder, model)
    assert again.card == heads.card
    hidden = torch.randn(2, 3, 32)
    with torch.no_grad():
        for index in range(2):
            assert torch.equal(again.logits(model, index, hidden), heads.logits(model, index, hidden))
    wish = {"max_new_tokens": 30, "do_sample": False}
    out: Any = skipstone.generate(model.model, prompt(9), AdaDecode(str(folder), 0.1), **wish)
    assert out.new_tokens == skipstone.generate(model.model, prompt(9), "autoregressive", **wish).new_tokens
    assert out.stats.drafted > 0


@pytest.mark.parametrize(("kind", "rank"), [*KINDS, ("original", None)])
def test_new_heads_say_what_the_models_own_head_says(kind: Any, rank: int | None) -> None:
    model = runner()
    heads = ExitHeads(new_card(model, (2, 4), kind, rank))
    heads.start_from(model)
    hidden = torch.randn(2, 3, 32)
    with torch.no_grad():
        assert torch.allclose(heads.logits(model, 1, hidden), model.logits(hidden), atol=1e-5)


def test_heads_of_another_model_or_vocabulary_are_refused(tmp_path: Path) -> None:
    model, folder = runner(), tmp_path / "heads"
    disturbed(model).save(folder)
    assert exit_heads.load_heads(folder, ModelRunner(copy.deepcopy(model.model))).card.name == "mine"
    with pytest.raises(ValueError, match=r"holds the heads of another model \(mine; this one is"):
        exit_heads.load_heads(folder, runner(seed=1))
    with pytest.raises(ValueError, match="heads for a vocabulary of 97 and states of 32, this model has 50 and 32"):
        exit_heads.load_heads(folder, runner(vocab=50))
    with pytest.raises(ValueError, match=r"after layers 1 to 3 of this model, in order, found \[2, 4\]"):
        exit_heads.load_heads(folder, runner(layers=4))
    with pytest.raises(ValueError, match=r"exit_layers must be among the heads' layers, \[2, 4\], found \[3\]"):
        AdaDecode(str(folder), exit_layers=(2, 3)).check(model)


def test_damaged_heads_are_one_sentence(tmp_path: Path) -> None:
    model, folder = runner(), tmp_path / "heads"
    heads = disturbed(model)
    heads.save(folder)
    weights, card = folder / exit_heads.WEIGHTS, folder / exit_heads.CARD
    whole, said = weights.read_bytes(), card.read_text()

    def refused(words: str, kind: type[Exception] = ValueError, folder: Path = folder) -> None:
        with pytest.raises(kind, match=words):
            exit_heads.load_heads(folder, model)

    for data in (whole[:-7], b"", whole.replace(b"heads.0", b"heads.9")):
        weights.write_bytes(data)
        refused(r"exit_heads.safetensors is damaged or does not fit")
    with torch.no_grad():
        next(heads.parameters())[0, 0] = torch.nan
    heads.save(folder)
    refused("holds numbers that are not finite")
    weights.write_bytes(whole)
    for text, words in (
        ("{", "exit_heads.json is damaged"),
        ("{}", "says nothing of exit heads: model is missing"),
        (json.dumps({**json.loads(said), "version": 9}), "of version 9, this skipstone reads version 1"),
        (json.dumps({**json.loads(said), "depth": 9}), "unknown setting 'depth'"),
    ):
        card.write_text(text)
        refused(words)
    weights.unlink()
    card.write_text(said)
    refused("exit_heads", FileNotFoundError)
    card.unlink()
    refused("no exit heads", FileNotFoundError)
    refused("bundled are nano-code, nano-maths", FileNotFoundError, tmp_path / "none")


def test_an_interrupted_save_leaves_the_heads_that_were_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model, folder = runner(), tmp_path / "heads"
    disturbed(model).save(folder)
    before = {path.name: path.read_bytes() for path in folder.iterdir()}

    def full(*_: Any, **__: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(exit_heads, "save_file", full)
    with pytest.raises(OSError, match="No space left"):
        disturbed(model, "full").save(folder)
    assert {path.name: path.read_bytes() for path in folder.iterdir()} == before
    monkeypatch.undo()
    first = exit_heads.load_heads(folder, model)
    assert exit_heads.load_heads(folder, model) is first
    ExitHeads(new_card(model, (3,), "square")).save(folder)
    assert exit_heads.load_heads(folder, model).card.layers == (3,), "new files are read anew"
    assert [path.name for path in tmp_path.iterdir()] == ["heads"]
