"""What methods have learnt: kept for few settings, and for so many bytes."""

import gc
import tracemalloc
import weakref
from typing import Any

import pytest
import torch

import skipstone
from skipstone.decoding import method_states
from skipstone.engines.model_runner import ModelRunner
from skipstone.engines.native import library
from skipstone.methods.recycle import AdjacencyMatrix
from skipstone.utils.limits import MAX_METHOD_STATES
from tests.helpers import families

NATIVE = pytest.mark.skipif(library.missing() is not None, reason=str(library.missing()))


class Learnt:
    """A state of a known size."""

    steps = 1

    def __init__(self, nbytes: int) -> None:
        self.nbytes, self.report = nbytes, dict[str, Any]


@pytest.mark.parametrize(("size", "left"), [(1, MAX_METHOD_STATES), (method_states.METHOD_STATE_BYTES // 3, 3)])
def test_states_of_many_settings_are_kept_up_to_a_number_and_to_bytes_and_the_others_are_freed(size: int, left: int) -> None:
    model, made = ModelRunner(families.build("llama")), list[weakref.ref[Learnt]]()

    def make() -> Learnt:
        found = Learnt(size)
        made.append(weakref.ref(found))
        return found

    gc.disable()
    try:
        for count in range(1, 101):
            method_states.method_state(skipstone.Recycle(count % 64 + 1, count % 8 + 1), model, count, None, make)
        assert [one for one in made if one() is not None] == made[-left:]
    finally:
        gc.enable()


@pytest.mark.parametrize("options", [{"engine": "eager"}, {"quantize": "int8"}, {"compute_dtype": "float32"}])
@NATIVE
def test_engines_of_other_arithmetic_have_states_of_their_own(options: Any) -> None:
    model = families.build("llama").bfloat16()
    usual, other = (
        method_states.method_state(skipstone.Auto(), ModelRunner(model, **given), 1, None, lambda: Learnt(1))
        for given in ({"engine": "native"}, options)
    )
    assert usual is not other


def test_what_recycled_tokens_take_is_about_what_is_accounted() -> None:
    """By Python's own count of allocated bytes."""
    draws = torch.randint(300, 100_000, (5_000, 8), generator=torch.Generator().manual_seed(0))
    tracemalloc.start()
    try:
        kept = AdjacencyMatrix({token: row.tolist() for token, row in enumerate(draws, 1000)})
        taken = tracemalloc.get_traced_memory()[0]
    finally:
        tracemalloc.stop()
    assert taken / 2 < kept.nbytes < 2 * taken


@pytest.mark.parametrize("method", [skipstone.Recycle(), skipstone.Auto(), skipstone.Swift()], ids=lambda one: one.name)
def test_every_state_says_what_it_takes(method: Any) -> None:
    raw = families.build("llama")
    skipstone.generate(raw, torch.arange(5, 25)[None], method, max_new_tokens=8, do_sample=False)
    found: list[Any] = list(method_states._STATES.known(raw).values())
    assert found
    assert all(0 < one.nbytes < method_states.METHOD_STATE_BYTES for one in found)
