"""What `skipstone families` says of engine="compiled": which types it runs, with the eager engine's texts, and which not.
The main families run in test_compiled.py."""

from __future__ import annotations

from typing import Any

import pytest

from skipstone.cli.families import described
from skipstone.engines.compiled import BACKEND_VARIABLE
from skipstone.engines.model_runner import ModelRunner
from skipstone.models.known_types import TESTED, TESTED_AROUND_TEXT, UNCOMPILED
from tests.helpers import families, wrapped
from tests.helpers.pairwise import slow_except
from tests.helpers.settings import QUIET
from tests.helpers.support import assert_same_texts, decode

pytestmark = QUIET


MASKS = "mask or count by themselves, or add position biases, which its graphs do not do"
SHARES = "share keys and values, have several streams or inputs of their own, which its graphs do not know"
STATES = "some of its layers keep states without positions, which its graphs do not"
WHY = {
    **dict.fromkeys(("mpt", "bloom", "gpt_neo", "llama4", "llama4_text"), MASKS),
    **dict.fromkeys((f"gemma{kind}" for kind in ("3n", "3n_text", "4", "4_text", "4_unified", "4_unified_text")), SHARES),
}


QUICK = ("lfm2", "mpt", "qwen2_vl")


TYPES = [*families.FURTHER, *wrapped.WRAPPERS]


@pytest.mark.parametrize("name", slow_except(QUICK, TYPES, full=TYPES[::4]))
def test_a_type_runs_compiled_where_the_table_says_so(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(BACKEND_VARIABLE, "eager")
    model = wrapped.build(name) if name in wrapped.WRAPPERS else families.build(name)
    if {name, model.config.model_type} & UNCOMPILED:
        with pytest.raises(ValueError) as error:
            decode(model, families.prompts(1), "autoregressive", engine="compiled", max_new_tokens=2)
        why = f"its layers {WHY[name]}" if name in WHY else STATES
        assert str(error.value) == f"engine='compiled' cannot run this model: {why}; take engine='auto' or 'eager'"
        assert ModelRunner(model, "eager").engine.name == "eager"
        return
    prompts, options = families.prompts(2), {"max_new_tokens": 8, "do_sample": False}
    assert ModelRunner(model, "compiled").engine.name == "compiled"
    plain: Any = decode(model, prompts, "autoregressive", engine="eager", **options)
    found = decode(model, prompts, "autoregressive", engine="compiled", **options)
    assert_same_texts(model, prompts, plain.new_tokens, found, options)


def test_the_table_lists_the_engines_of_every_type() -> None:
    rows = {row["type"]: row for row in described()}
    assert rows["llama"]["engines"] == "native, eager, compiled"
    assert rows["qwen2_vl"]["engines"] == "eager, compiled"
    assert rows["lfm2"]["engines"] == "eager"
    assert rows["mamba"]["engines"] == ""
    assert {kind for kind, row in rows.items() if "compiled" in row["engines"]} == (TESTED | TESTED_AROUND_TEXT) - UNCOMPILED
    assert UNCOMPILED <= TESTED | TESTED_AROUND_TEXT


def test_multimodal_types_are_in_the_table() -> None:
    rows = {row["type"]: row["support"] for row in described()}
    assert {rows[kind] for kind in wrapped.WRAPPERS} == {"tested"}
    assert rows["llava_next"] == "derived"
    assert rows["florence2"] == "refused"
