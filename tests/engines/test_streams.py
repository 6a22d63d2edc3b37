"""Gemma 3n, whose layers hand on several streams of states (AltUp), share keys and values and are given inputs of their own:
its texts are `generate`'s own with every method, exits and skipped sublayers are what they are in its own forward, and streams
that are made or merged wrongly are found."""

from __future__ import annotations

import copy
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
from skipstone.models.passes import SkipSet
from skipstone.models.trace import ModuleCall
from skipstone.train.layerskip.run import _shorten
from tests.helpers import families, objectives, support, wrapped
from tests.helpers.conformance import LOSSLESS, ROWS, assert_greedy_equals_alone, assert_sampling_equals_plain
from tests.helpers.pairwise import slow_except
from tests.helpers.settings import QUIET

NAME = "gemma3n_text"
NEW = 24  # tokens of a text, which together with its prompt are far more than the window's 8
MAIN = [name for name in LOSSLESS if not ROWS[name].variant]
SAMPLING: dict[str, Any] = {"do_sample": True, "temperature": 1.3, "top_k": 40, "top_p": 0.95}
pytestmark = QUIET


@pytest.mark.parametrize("method", slow_except(MAIN[::2], LOSSLESS))
def test_greedy_text_of_a_ragged_batch_is_that_of_generate_on_each_row_alone(method: str) -> None:
    assert_greedy_equals_alone(replace(ROWS[method], second=families.near), NAME, 3, 4, NEW, {})


@pytest.mark.parametrize("method", slow_except(("layerskip",), MAIN))
def test_sampled_text_is_that_of_plain_sampling(method: str) -> None:
    row = replace(ROWS[method], second=families.near)
    for rule in row.same_text:
        assert_sampling_equals_plain(row, NAME, 3, 4, rule, NEW, SAMPLING)


EXITING = [
    *(LayerSkip(exit_layer=exit_layer, num_speculative_tokens=4) for exit_layer in (1, 2, 3)),
    AdaDecode("original", 0.3, 4, exit_layers=(1, 2, 3)),
]


@pytest.mark.parametrize("method", slow_except(EXITING[2:], EXITING))
def test_exits_below_and_above_the_layers_that_share_keys_and_values_are_exact(method: Any) -> None:
    prompts, expected, _ = support.references(NAME, 3, max_new_tokens=NEW)
    out = support.decode(families.cached(NAME), prompts, method, max_new_tokens=NEW)
    assert out.new_tokens == expected
    assert out.stats is not None
    assert out.stats.drafted > out.stats.accepted > 0


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


@torch.no_grad()
def test_a_skipped_sublayer_adds_nothing_and_its_layer_still_changes_the_streams() -> None:
    """Of layers whose keys and values no other layer reads."""
    model, ids = families.cached(NAME), families.prompts(1)[0][None]
    runner = ModelRunner(model)
    assert (runner.family.attention, runner.family.mlp) == ("self_attn", ("mlp",))
    plain = model(ids).logits
    for attention, mlp in (({2}, set()), (set(), {1}), ({2, 3}, {0, 3}), ({3}, {3})):
        silent: Any = copy.deepcopy(model)
        for index in attention:
            torch.nn.init.zeros_(silent.model.layers[index].self_attn.o_proj.weight)
        for index in mlp:
            torch.nn.init.zeros_(silent.model.layers[index].mlp.down_proj.weight)
        expected = silent(ids).logits
        assert (expected - plain).abs().max() > 0.1, "the skipped sublayers did nothing anyway"
        found = support.logits_in_chunks(runner, ids, [13, 21], SkipSet(frozenset(attention), frozenset(mlp)))
        torch.testing.assert_close(found, expected, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize(
    "fields",
    slow_except(
        [{"altup_num_inputs": 2}, {"num_kv_shared_layers": 0}],
        [
            {"altup_num_inputs": 2},
            {"altup_active_idx": 1},
            {"altup_correct_scale": False},
            {"num_kv_shared_layers": 0},
            {"tie_word_embeddings": True},
            {"attn_implementation": "eager"},
        ],
    ),
)
def test_what_only_some_configs_show_is_exact_too(fields: dict[str, Any]) -> None:
    model, prompt = families.build(NAME, **fields), families.prompts(1)[0]
    runner = ModelRunner(model)
    assert runner.family.streams == fields.get("altup_num_inputs", 4)
    expected, smallest = support.margin(model, prompt, max_new_tokens=NEW)
    assert smallest >= support.TIE
    out = support.decode(model, [prompt], LayerSkip(exit_layer=2, num_speculative_tokens=4), max_new_tokens=NEW)
    assert out.new_tokens == [expected]


# what goes wrong


def second_stream_too_large(patch: pytest.MonkeyPatch) -> None:
    own = altup.made
    patch.setattr(altup, "made", lambda *given: own(*given) * torch.tensor([1, 1, 1.01, 1]).view(4, 1, 1, 1))


def last_stream_left_out(patch: pytest.MonkeyPatch) -> None:
    own = altup.made
    patch.setattr(altup, "made", lambda *given: torch.cat([own(*given)[:3], torch.zeros_like(own(*given)[:1])]))


def streams_in_another_order(patch: pytest.MonkeyPatch) -> None:
    own = altup.unfolded
    patch.setattr(altup, "unfolded", lambda *given: own(*given)[[0, 2, 1, 3]])


def merged_without_their_magnitude(patch: pytest.MonkeyPatch) -> None:
    def merged(decoder: Any, streams: Tensor) -> Tensor:
        first, *others = streams
        pairs = zip(decoder.altup_unembed_projections, others, strict=True)
        return torch.stack([first, *(one(stream) for one, stream in pairs)]).mean(0)

    patch.setattr(altup, "merged", merged)


def first_stream_alone(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(altup, "merged", lambda decoder, streams: streams[0])


PLANTED: dict[Callable[[pytest.MonkeyPatch], None], str] = {
    second_stream_too_large: "what enters layer 0",
    last_stream_left_out: "what enters layer 0",
    streams_in_another_order: r"layer \d .*",
    merged_without_their_magnitude: "the logits",
    first_stream_alone: "the logits",
}
"""Mistakes, and where the verification finds them."""


@pytest.mark.parametrize("plant", PLANTED)
def test_streams_that_are_made_or_merged_wrongly_are_refused(
    plant: Callable[[pytest.MonkeyPatch], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    model = families.build(NAME, vocab=89)  # a shape of config that nobody has verified
    recognition.recognise(model)  # derived without the mistake
    plant(monkeypatch)
    with pytest.raises(ValueError, match=f"as its own forward does: {PLANTED[plant]} differs by .* where 0.001 is allowed"):
        ModelRunner(model, "eager")


def test_streams_of_another_kind_than_altup_are_refused() -> None:
    calls = [ModuleCall("0", {"": torch.zeros(4, 1, 3, 32)}, None)]
    assert _streams(families.cached(NAME).model, calls) == 4
    with pytest.raises(DerivationError, match="more than one stream of states"):
        _streams(families.cached("llama").model, calls)


def test_other_engines_say_that_they_cannot_run_it() -> None:
    model = families.build(NAME)
    for engine in ("native", "compiled"):
        with pytest.raises(ValueError, match=engine):
            ModelRunner(model, engine)
    assert ModelRunner(model, "auto").engine.name == "eager"


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
