"""Settings that a method refuses, in one sentence and before any work."""

import dataclasses
from typing import Any

import pytest

import skipstone
from skipstone import METHODS, AdaDecode, AdaSD, Lookahead, PromptLookup, SelfSpeculative, Speculative, Swift
from skipstone.decoding.settings import settings_of
from skipstone.engines.model_runner import ModelRunner
from tests.helpers import families
from tests.helpers.machine import llama, prompt
from tests.helpers.native import NATIVE_ONLY


@pytest.mark.parametrize("name", METHODS)
def test_every_setting_with_a_range_is_checked(name: str) -> None:
    """2.5 is no whole number, no share and no choice. tests/decoding/test_settings.py has the rule itself."""
    kind, model = METHODS[name], ModelRunner(families.cached("llama"))
    for setting in settings_of(kind).values():
        if setting.type.split("|")[0] not in ("text", "method;...") and setting.name != "draft_vocabulary":
            with pytest.raises(ValueError, match=f"{setting.name} (must be .*, found 2.5|goes with)"):
                dataclasses.replace(kind(), **{setting.name: 2.5}).check(model)


IMPOSSIBLE: list[Any] = [
    (PromptLookup(2, 3), "prompt_lookup_min=3 is more than prompt_lookup_max=2"),
    (Lookahead(7, 1), "ngram must be at least 2, found 1"),
    (Speculative(draft_device=[]), "draft_device must be a text or None"),  # type: ignore[arg-type]
    (Speculative("x", confidence_threshold=0.4), 'confidence_threshold goes with schedule="confidence"'),
    (AdaSD("x", variant="A", relaxed=False), "it goes with relaxed=True"),
    (Swift(skip_ratio=1.0), "leaves out 4 of the 4 sublayers"),
    (Swift(skip_ratio=0.0), "leaves out 0 of the 4 sublayers"),
    (Swift(candidate_counts=(10, 5, 3)), r"candidate_counts must be 4 numbers of at least 1, found \(10, 5, 3\)"),
    (Swift(profile=5), "profile must be a text or None, found 5"),  # type: ignore[arg-type]
    (SelfSpeculative(), "no layer set is given: name skip_attention .* or let all layers draft in fewer bits"),
    (SelfSpeculative((9,)), r"attention of layers 1 to 2 may be skipped in a model of 4 layers.*found \[9\]"),
    (SelfSpeculative((1, 2), (1, 2)), "skips everything between the first and the last layer"),
    (SelfSpeculative((1,), (), "x.json"), "give either a profile or skip_attention and skip_mlp"),
    (SelfSpeculative(draft_quantize="int2"), 'draft_quantize must be "int8", "int4" or None, found \'int2\''),
    (AdaDecode("original", exit_layers=(4,)), r"after layers 1 to 3 of this model, in order, found \[4\]"),
    (AdaDecode("original", exit_layers=(0, 2)), r"after layers 1 to 3 of this model, in order, found \[0, 2\]"),
    (AdaDecode("original", exit_layers=[3, 2]), r"in order, found \[3, 2\]"),  # type: ignore[arg-type]
    (AdaDecode(), "no exit heads for this model: `skipstone train heads MODEL` makes some"),
    (AdaDecode(3), "heads must be a folder, a hub id or one of nano-code, nano-maths, found 3"),  # type: ignore[arg-type]
    ('auto candidates="adasd"', "adasd with these settings changes texts"),
    ("adasd guard=true", "adasd with these settings changes texts"),
    ('auto candidates="auto"', "auto drafts nothing that could be chosen or left out"),
    ("autoregressive guard=true", "autoregressive has no setting 'guard'"),
    ('auto candidates="layerskip exit_layer=9"', "exit_layer"),
    ('auto candidates="nothing"', "unknown method"),
]


@pytest.mark.parametrize(("method", "words"), IMPOSSIBLE)
def test_impossible_settings_are_one_sentence(method: Any, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        skipstone.generate(families.cached("llama"), prompt(5), method, max_new_tokens=4)


@pytest.mark.parametrize(
    ("engine", "quantize", "words"),
    [
        ("eager", None, "draft_quantize=int4 needs the native engine, .* runs on the eager one"),
        pytest.param("native", "int8", "quantised to int8 already: leave one of the two out", marks=NATIVE_ONLY[0]),
        pytest.param("native", "int4", "quantised to int4 already: leave one of the two out", marks=NATIVE_ONLY[0]),
    ],
)
def test_drafts_in_fewer_bits_need_the_native_engine_and_whole_weights(engine: str, quantize: str | None, words: str) -> None:
    method = SelfSpeculative(draft_quantize="int4")
    with pytest.raises(ValueError, match=words):
        skipstone.generate(llama(), prompt(9), method, engine=engine, quantize=quantize, max_new_tokens=8)


def test_other_layer_numbers_and_models_of_few_layers_are_refused() -> None:
    for layers in (None, "12", (1.5,), True, [1, "2"]):
        with pytest.raises(ValueError, match="skip_attention must be layer numbers"):
            SelfSpeculative(skip_attention=layers)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="at least 4 layers, found 3"):
        skipstone.generate(families.build("llama", layers=3), prompt(5, vocab=50), Swift(), max_new_tokens=4)
