"""The bundled models: that they are what their cards say, do what they were trained for, and that drafts change nothing."""

import hashlib
import json
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open

import skipstone
from skipstone import AdaDecode, AdaSD, Method, ModelRunner, Speculative
from skipstone.assets import DRAFTS, HEADS, NANO
from skipstone.lab.timing import statistics
from skipstone.methods.adadecode import heads as exit_heads
from skipstone.models.vocabularies import vocabulary
from skipstone.train import resolve_model
from skipstone.train.heads import recipe as heads_recipe
from skipstone.train.layerskip.arguments import read
from tests.helpers.pairwise import slow_except

pytestmark = pytest.mark.slow

RECIPES = Path(__file__).parents[2] / "recipes" / "train"
MOST_BYTES = 24_000_000
MOST_BYTES_OF_HEADS = 1_000_000
REQUESTS = 12

Nano = tuple[Any, Any]


@pytest.fixture(scope="module")
def nano() -> Nano:
    return skipstone.load()


@pytest.fixture(scope="module")
def examples() -> list[Any]:
    sys.path.insert(0, str(RECIPES.parent / "data"))
    try:
        import commands
    finally:
        sys.path.pop(0)
    return list(commands.examples("test", REQUESTS, 5))


def greedy(nano: Nano, prompt: str, method: Any = None, tokens: int = 96) -> Any:
    model, tokenizer = nano
    return skipstone.generate(model, prompt, method, tokenizer=tokenizer, max_new_tokens=tokens, do_sample=False)


@pytest.mark.parametrize("requests", [4, pytest.param(REQUESTS, marks=pytest.mark.slow)])
def test_requests_become_json_with_and_without_drafts(nano: Nano, examples: list[Any], requests: int) -> None:
    """On fillers and combinations that training never had; the answer is exact or it does not count."""
    examples = examples[:requests]
    drafted = [greedy(nano, example.prompt) for example in examples]
    plain = [greedy(nano, example.prompt, "autoregressive") for example in examples]
    assert [out.text for out in drafted] == [out.text for out in plain]
    exact = sum(_same_json(out.text, example.answer) for out, example in zip(drafted, examples, strict=True))
    assert exact >= 0.75 * requests
    accepted, tried = (sum(getattr(out.stats, name) for out in drafted) for name in ("accepted", "draft_steps"))
    assert accepted / tried > 0.6
    assert all(out.new_tokens[0][-1] == nano[1].eos_token_id for out in drafted), "an answer ends by itself"


def _same_json(one: str, other: str) -> bool:
    try:
        return json.loads(one) == json.loads(other)
    except json.JSONDecodeError:
        return False


def test_code_is_what_transformers_writes_and_no_mere_loop(nano: Nano) -> None:
    model, tokenizer = nano
    prompt = 'def read_lines(path):\n    """Return the lines of a file."""\n'
    ids = tokenizer(prompt, return_tensors="pt")["input_ids"]
    theirs = model.generate(ids, max_new_tokens=64, do_sample=False)
    ours = greedy(nano, prompt, tokens=64)
    assert torch.equal(ours.sequences, theirs)
    assert statistics.repeated_share(ids[0].tolist(), ours.new_tokens[0]) < 0.5  # the model itself repeats: .29 here


def test_recipe_model_and_card_agree(nano: Nano) -> None:
    assert (NANO / "model.safetensors").stat().st_size <= MOST_BYTES
    with safe_open(NANO / "model.safetensors", "pt") as weights:
        assert {weights.get_tensor(name).dtype for name in [*weights.keys()]} == {torch.bfloat16}
    assert nano[0].dtype == torch.float32
    assert not nano[0].training
    recipe = read(RECIPES / "nano.yaml")
    assert nano[0].generation_config.skipstone == recipe.decoding
    shape = recipe.model.config or {}
    assert {name: getattr(nano[0].config, name) for name in shape} == shape
    account = json.loads((NANO / "data.json").read_text(encoding="utf-8"))
    assert set(account["sources"]) == {source.name for source in recipe.data.sources}
    assert account["tokens"] >= 8_000_000
    card = (NANO / "README.md").read_text(encoding="utf-8")
    manifest = json.loads((RECIPES.parent / "data" / "stdlib.json").read_text(encoding="utf-8"))
    code = account["sources"]["code"]
    assert manifest["count"] == code["documents"]
    facts = [
        account["sha256"],
        manifest["python"],
        f"{account['tokens']:,}",
        f"{sum(p.numel() for p in nano[0].parameters()):,}",
    ]
    facts += [f"E = {recipe.decoding['exit_layer']}", f"{recipe.decoding['num_speculative_tokens']} draft"]
    for fact in facts:
        assert fact in card, fact


@pytest.mark.parametrize(
    ("name", "text"),
    [("code", "def read_lines(path):"), pytest.param("maths", "Question: Tom has 3 apples.\nAnswer:", marks=pytest.mark.slow)],
)
def test_exit_heads_are_what_their_recipes_made_and_predict_early(nano: Nano, name: str, text: str) -> None:
    recipe = heads_recipe.read(RECIPES / f"nano-heads-{name}.yaml")
    folder = HEADS[f"nano-{name}"]
    assert sum(path.stat().st_size for path in folder.iterdir()) <= MOST_BYTES_OF_HEADS
    heads = exit_heads.load_heads(f"nano-{name}", ModelRunner(nano[0]))
    told = heads.card.training
    assert {key: told[key] for key in recipe.training.model_dump()} == recipe.training.model_dump()
    assert (told["prompts"], heads.card.name) == ([source.name for source in recipe.prompts], recipe.name)
    for figures in heads.card.metrics.values():
        assert figures["divergence"] < figures["before"]["divergence"]
        assert figures["agreement"] > figures["before"]["agreement"]
    out = greedy(nano, text, AdaDecode(f"nano-{name}"), 48)
    assert out.text == greedy(nano, text, "autoregressive", 48).text
    assert out.stats.accepted > 5
    assert out.stats.acceptance_rate > 0.8
    assert exit_heads.bundled_name_for(ModelRunner(nano[0])) == "nano-code", "what adadecode takes unasked"


DRAFT = DRAFTS["nano-draft"]
DRAFT_BYTES = 3_000_000
ASKED = [
    "> remind me to water the plants at 6 pm\n",
    'def read_lines(path):\n    """Return the lines of a file."""\n',
    "Question: Tom has 3 apples and buys 4 more. How many apples does he have?\nAnswer:",
]


@pytest.fixture(scope="module")
def draft() -> Any:
    return skipstone.load(DRAFT)[0]


def test_the_draft_model_is_small_has_nanos_tokens_and_is_what_its_recipe_and_card_say(nano: Any, draft: Any) -> None:
    assert sum(path.stat().st_size for path in DRAFT.iterdir()) <= DRAFT_BYTES
    parameters, large = (sum(parameter.numel() for parameter in model.parameters()) for model in (draft, nano[0]))
    assert parameters <= large / 6
    assert vocabulary(str(DRAFT)) == vocabulary(str(NANO))
    assert draft.config.vocab_size == nano[0].config.vocab_size
    assert draft.config.max_position_embeddings >= nano[0].config.max_position_embeddings
    recipe = read(RECIPES / "nano-draft.yaml")
    assert recipe.model.layers == draft.config.num_hidden_layers <= 2
    for name in (recipe.model.pretrained, recipe.teacher):
        assert name is not None
        assert Path(resolve_model(name, RECIPES)).resolve() == NANO.resolve()
    account = json.loads((DRAFT / "data.json").read_text(encoding="utf-8"))
    assert set(account["sources"]) == {source.name for source in recipe.data.sources}
    card = (DRAFT / "README.md").read_text(encoding="utf-8")
    digest = hashlib.sha256((DRAFT / "model.safetensors").read_bytes()).hexdigest()
    for fact in (digest, account["sha256"], f"{account['tokens']:,}", f"{parameters:,}"):
        assert fact in card, fact


METHODS: list[Method] = [Speculative(), AdaSD(relaxed=False)]


@pytest.mark.filterwarnings("ignore:.*x the speed of plain decoding:RuntimeWarning")
@pytest.mark.parametrize("method", slow_except(METHODS[:1], METHODS), ids=lambda one: one.name)
def test_unasked_the_draft_model_drafts_for_nano_and_is_often_right(method: Method, nano: Any) -> None:
    model, tokenizer = nano
    helper = method.draft_model_for(ModelRunner(model))  # type: ignore[attr-defined]
    assert (Path(helper.name), helper.dtype) == (DRAFT, torch.float32), "in what the target computes with"
    accepted = tried = 0
    for asked in ASKED:
        wish: dict[str, Any] = {"tokenizer": tokenizer, "max_new_tokens": 32, "do_sample": False}
        out = skipstone.generate(model, asked, method, **wish)
        assert out.text == skipstone.generate(model, asked, "autoregressive", **wish).text
        assert out.stats is not None
        accepted, tried = accepted + out.stats.accepted, tried + out.stats.draft_steps
    assert accepted > 20
    assert accepted / tried > 0.3
