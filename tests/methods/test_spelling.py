"""How a method is said: text and JSON are read with the types of the fields, and a method can be spelled again."""

from __future__ import annotations

import dataclasses
import json
from typing import Any

import pytest

from skipstone import METHODS, LayerSkip, SelfSpeculative, Speculative
from skipstone.decoding.settings import Setting, settings_of
from skipstone.methods import MethodMissing, parse, resolve, spell


@pytest.mark.parametrize("name", METHODS)
def test_what_is_spelled_is_read_as_the_same_method(name: str) -> None:
    kind = METHODS[name]
    assert resolve(spell(kind())) == kind()
    assert resolve(json.dumps({"method": name, **kind().settings})) == kind()
    for setting in settings_of(kind).values():
        changed = dataclasses.replace(kind(), **{setting.name: another_value(setting)})
        assert resolve(spell(changed)) == changed, spell(changed)


def another_value(setting: Setting) -> Any:
    """A value that is no default."""
    first, *_, last = setting.type.split("|") * 2
    values = {"text": "a b", "float": 0.25, "int": 3, "true": False}
    return values[first] if first in values else (1, 2) if setting.is_list else setting.parse(last)


ANOTHER_NAME = pytest.mark.filterwarnings("ignore:num_assistant_tokens is called num_speculative_tokens:FutureWarning")
"""The name of another package."""


@pytest.mark.parametrize(
    ("text", "method"),
    [
        ("layerskip", LayerSkip()),
        ("  layerskip   exit-layer=4 confidence_threshold=NONE reuse_cache=off ", LayerSkip(4, reuse_cache=False)),
        ("layerskip confidence_threshold=adaptive", LayerSkip(confidence_threshold="adaptive")),
        ("self_speculative skip_attention=1,2 skip_mlp=[3]", SelfSpeculative((1, 2), (3,))),
        ("self_speculative skip_attention=3 profile=null", SelfSpeculative((3,))),
        ("self_speculative profile='my sets/a=b.json'", SelfSpeculative(profile="my sets/a=b.json")),
        (r"speculative draft_model=C:\models\small#1", Speculative(r"C:\models\small#1")),
        (' {"method": "layerskip", "exit_layer": 4}', LayerSkip(4)),
        pytest.param("layerskip num_assistant_tokens=3", LayerSkip(num_speculative_tokens=3), marks=ANOTHER_NAME),
    ],
)
def test_texts(text: str, method: Any) -> None:
    assert resolve(text) == method


def test_a_text_fills_in_the_models_own_method_and_one_without_a_name_changes_it() -> None:
    own = "layerskip exit_layer=3 num_speculative_tokens=9"
    assert resolve(None, own) == LayerSkip(3, 9)
    assert resolve("layerskip exit_layer=2", own) == LayerSkip(2, 9)
    assert resolve("exit_layer=2", own) == LayerSkip(2, 9)
    assert resolve("early_exit exit_layer=2", own).settings == {"exit_layer": 2}
    with pytest.raises(ValueError, match="num_speculative_tokens takes int, found 'few'"):
        resolve("layerskip num_assistant_tokens=few")
    with pytest.raises(MethodMissing, match="'exit_layer=2' names no method; there are auto, autoregressive"):
        resolve("exit_layer=2")


def test_several_values_are_a_list_but_a_list_is_one_value() -> None:
    read = {"method": "layerskip", "exit_layer": [3, 6], "label": "1"}
    assert parse("layerskip exit_layer=3,6 label=1", labels=("label",), several=True) == read
    assert parse("adadecode exit_layers=3,6", several=True)["exit_layers"] == [3, 6]
    with pytest.raises(ValueError, match=r"exit_layer takes int\|none, found '3,6'"):
        parse("layerskip exit_layer=3,6")
