"""Gemma 3n: its layers pass on several streams of states (AltUp), share keys and values, and have inputs of their own."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

import skipstone
from skipstone import AdaDecode, LayerSkip
from skipstone.engines.exit_statistics import layer_states
from skipstone.engines.model_runner import ModelRunner
from skipstone.models import altup, recognition
from skipstone.models.derivation import DerivationError, _streams
from skipstone.models.families import text_ids
from skipstone.models.trace import ModuleCall
from skipstone.train.layerskip.run import _shorten
from tests.helpers import families, objectives, support, wrapped
from tests.helpers.conformance import LOSSLESS, ROWS, Row, assert_greedy_equals_alone, assert_sampling_equals_plain
from tests.helpers.pairwise import slow_except
from tests.helpers.settings import QUIET

NAME = "gemma3n_text"
NEW = 24  # tokens of a text, which together with its prompt are far more than the window's 8
METHODS = [name for name in LOSSLESS if NAME not in ROWS[name].refused]
MAIN = [name for name in METHODS if not ROWS[name].variant]
SAMPLING: dict[str, Any] = {"do_sample": True, "temperature": 1.3, "top_k": 40, "top_p": 0.95}
pytestmark = QUIET


EXITS: dict[str, Row] = {
    **{f"exit {layer}": replace(ROWS["layerskip"], make=lambda d, _, layer=layer: LayerSkip(layer, d)) for layer in (1, 2, 3)},
    "adaptive exits": replace(ROWS["adadecode"], make=lambda d, _: AdaDecode("original", 0.3, d, exit_layers=(1, 2, 3))),
}
"""Exits below and above the layers that share keys and values."""


@pytest.mark.parametrize("method", slow_except(["self_speculative", "exit 3"], [*METHODS, *EXITS]))
def test_greedy_text_of_a_ragged_batch_is_that_of_generate_on_each_row_alone(method: str) -> None:
    row = replace({**ROWS, **EXITS}[method], second=families.near)
    assert_greedy_equals_alone(row, NAME, 3, 4, NEW, {})


@pytest.mark.parametrize("method", slow_except(("layerskip",), MAIN))
def test_sampled_text_is_that_of_plain_sampling(method: str) -> None:
    row = replace(ROWS[method], second=families.near)
    for rule in row.same_text:
        assert_sampling_equals_plain(row, NAME, 3, 4, rule, NEW, SAMPLING)


@torch.no_grad()
def test_every_exit_merges_the_streams_as_the_model_itself_does() -> None:
    model, ids = families.cached(NAME), families.prompts(1)[0][None]
    runner = ModelRunner(model)
    states = model(ids, output_hidden_states=True).hidden_states
    for exit_layer in (1, 2, 3):
        expected = objectives.HEADS[NAME](model, states[exit_layer])
        torch.testing.assert_close(
            support.logits_in_chunks(runner, ids, [13, 21], depth=exit_layer), expected, atol=1e-4, rtol=1e-4
        )
    seen = layer_states(runner, ids[0])
    assert [one.shape[-1] for one in seen] == [4 * 32] * 5
    for mine, theirs in zip(seen[:-1], states, strict=False):
        torch.testing.assert_close(mine, altup.folded(theirs))
    torch.testing.assert_close(runner.logits(seen[4]), model(ids).logits)


FIELDS: list[dict[str, Any]] = [
    *({"altup_num_inputs": 2}, {"num_kv_shared_layers": 0}, {"altup_active_idx": 1}, {"altup_correct_scale": False}),
    *({"tie_word_embeddings": True}, {"attn_implementation": "eager"}),
]


@pytest.mark.parametrize("fields", slow_except(FIELDS[:1], FIELDS))
def test_what_only_some_configs_show_is_exact_too(fields: dict[str, Any]) -> None:
    model = families.build(NAME, **fields)
    assert ModelRunner(model).family.streams == fields.get("altup_num_inputs", 4)
    prompts, expected = support.without_ties(model, families.prompts(1), 1, max_new_tokens=NEW)
    out = support.decode(model, prompts, LayerSkip(exit_layer=2, num_speculative_tokens=4), max_new_tokens=NEW)
    assert out.new_tokens == expected


def made_with(change: Callable[[Tensor], Tensor], name: str = "made") -> Callable[[pytest.MonkeyPatch], None]:
    own = getattr(altup, name)
    return lambda patch: patch.setattr(altup, name, lambda *given: change(own(*given)))


def merged_without_their_magnitude(decoder: Any, streams: Tensor) -> Tensor:
    first, *others = streams
    pairs = zip(decoder.altup_unembed_projections, others, strict=True)
    return torch.stack([first, *(one(stream) for one, stream in pairs)]).mean(0)


PLANTED: dict[str, tuple[Callable[[pytest.MonkeyPatch], None], str]] = {
    "second stream too large": (
        made_with(lambda streams: streams * torch.tensor([1, 1, 1.01, 1]).view(4, 1, 1, 1)), "what enters layer 0",
    ),
    "last stream left out": (
        made_with(lambda streams: torch.cat([streams[:3], torch.zeros_like(streams[:1])])), "what enters layer 0",
    ),
    "streams in another order": (made_with(lambda streams: streams[[0, 2, 1, 3]], "unfolded"), r"layer \d .*"),
    "merged without their magnitude": (
        lambda patch: patch.setattr(altup, "merged", merged_without_their_magnitude), "the logits",
    ),
    "first stream alone": (lambda patch: patch.setattr(altup, "merged", lambda decoder, streams: streams[0]), "the logits"),
}  # fmt: skip
"""Mistakes, and where the verification finds them."""


@pytest.mark.usefixtures("untested")
@pytest.mark.parametrize("mistake", PLANTED)
def test_streams_that_are_made_or_merged_wrongly_are_refused(mistake: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model, (plant, place) = families.build(NAME, vocab=89), PLANTED[mistake]  # a shape of config that nobody has verified
    recognition.recognise(model)  # derived without the mistake
    plant(monkeypatch)
    with pytest.raises(ValueError, match=f"as its own forward does: {place} differs by .* where 0.001 is allowed"):
        ModelRunner(model, "eager")


def test_streams_of_another_kind_than_altup_and_other_engines_are_refused() -> None:
    calls, model = [ModuleCall("0", {"": torch.zeros(4, 1, 3, 32)}, None)], families.build(NAME)
    assert _streams(model.model, calls) == 4
    with pytest.raises(DerivationError, match="more than one stream of states"):
        _streams(families.cached("llama").model, calls)
    for engine in ("native", "compiled"):
        with pytest.raises(ValueError, match=engine):
            ModelRunner(model, engine)
    assert ModelRunner(model, "auto").engine.name == "eager"
    assert ModelRunner(model.bfloat16()).dtype == torch.bfloat16, "verified in half precision, too"


def test_ids_of_pictures_and_sound_are_no_text() -> None:
    """The whole model embeds ids from `vocab_offset` on by other modules than its text model does."""
    whole: Any = wrapped.build("gemma3n")
    assert text_ids(whole) == 97
    whole.config.vision_config.vocab_offset = 90
    assert text_ids(whole) == 90
    with pytest.raises(ValueError, match="token id 95 is out of range"):
        skipstone.generate(whole, torch.tensor([[5, 95]]), "autoregressive", max_new_tokens=2)


def test_a_model_of_this_kind_is_not_shortened_for_training() -> None:
    for name in (NAME, "gemma4_text"):
        with pytest.raises(ValueError, match=f"cannot shorten this {name} model"):
            _shorten(families.build(name), 2)
