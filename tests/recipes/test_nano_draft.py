"""The bundled draft model: small, nano's own vocabulary, what is taken unasked, and often right."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

import pytest
import torch

import skipstone
from skipstone import AdaSD, Method, Speculative
from skipstone.assets import DRAFTS, NANO
from skipstone.engines.loading import vocabulary
from skipstone.engines.model_runner import ModelRunner
from skipstone.train import resolve_model
from skipstone.train.layerskip.arguments import read
from tests.helpers.pairwise import slow_except

FOLDER = DRAFTS["nano-draft"]
RECIPES = Path(__file__).parents[2] / "recipes" / "train"
MOST_BYTES = 3_000_000
ASKED = [
    "> remind me to water the plants at 6 pm\n",
    'def read_lines(path):\n    """Return the lines of a file."""\n',
    "Question: Tom has 3 apples and buys 4 more. How many apples does he have?\nAnswer:",
]


@pytest.fixture(scope="module")
def nano() -> Any:
    return skipstone.load()


@pytest.fixture(scope="module")
def draft() -> Any:
    return skipstone.load(FOLDER)[0]


def test_it_is_small_has_nanos_tokens_and_is_what_its_recipe_and_card_say(nano: Any, draft: Any) -> None:
    assert sum(path.stat().st_size for path in FOLDER.iterdir()) <= MOST_BYTES
    parameters, large = (sum(parameter.numel() for parameter in model.parameters()) for model in (draft, nano[0]))
    assert parameters <= large / 6
    assert vocabulary(str(FOLDER)) == vocabulary(str(NANO))
    assert draft.config.vocab_size == nano[0].config.vocab_size
    assert draft.config.max_position_embeddings >= nano[0].config.max_position_embeddings
    recipe = read(RECIPES / "nano-draft.yaml")
    assert recipe.model.layers == draft.config.num_hidden_layers <= 2
    for name in (recipe.model.pretrained, recipe.teacher):
        assert name is not None
        assert Path(resolve_model(name, RECIPES)).resolve() == NANO.resolve()
    account = json.loads((FOLDER / "data.json").read_text(encoding="utf-8"))
    assert set(account["sources"]) == {source.name for source in recipe.data.sources}
    card = (FOLDER / "README.md").read_text(encoding="utf-8")
    digest = hashlib.sha256((FOLDER / "model.safetensors").read_bytes()).hexdigest()
    for fact in (digest, account["sha256"], f"{account['tokens']:,}", f"{parameters:,}"):
        assert fact in card, fact


METHODS: list[Method] = [Speculative(), AdaSD(relaxed=False)]


@pytest.mark.filterwarnings("ignore:.*x the speed of plain decoding:RuntimeWarning")
@pytest.mark.parametrize("method", slow_except(METHODS[:1], METHODS), ids=lambda one: one.name)
def test_unasked_it_drafts_for_nano_and_is_often_right(method: Method, nano: Any) -> None:
    model, tokenizer = nano
    helper = method.draft_model_for(ModelRunner(model))  # type: ignore[attr-defined]
    assert (Path(helper.name), helper.dtype) == (FOLDER, torch.float32), "in what the target computes with"
    accepted = tried = 0
    for asked in ASKED:
        wish: dict[str, Any] = {"tokenizer": tokenizer, "max_new_tokens": 32, "do_sample": False}
        out = skipstone.generate(model, asked, method, **wish)
        assert out.text == skipstone.generate(model, asked, "autoregressive", **wish).text
        assert out.stats is not None
        accepted, tried = accepted + out.stats.accepted, tried + out.stats.draft_steps
    assert accepted > 20
    assert accepted / tried > 0.3
