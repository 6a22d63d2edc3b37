"""Logits of some tokens only: those of the whole LM head at their ids, -inf elsewhere, whatever the head does and becomes."""

import copy
import gc
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from skipstone.engines.choose_engine import EngineOptions, attach
from skipstone.engines.model_runner import ModelRunner
from skipstone.engines.native import library
from skipstone.models.layer_variants import LAYER_VARIANTS
from tests.helpers import families
from tests.helpers.machine import llama
from tests.helpers.pairwise import pairwise

pytestmark = pytest.mark.usefixtures("no_gradients")

NATIVE = pytest.mark.skipif(library.missing() is not None, reason=str(library.missing()))
ENGINES = ["eager", pytest.param("native", marks=NATIVE)]
VOCABULARY = 97
LISTS = {
    "the first ones": [*range(40)],
    "the first sixteen": [*range(16)],
    "some": [id for id in range(VOCABULARY) if id % 3],
    "the last one": [96],
    "the first one": [0],
    "all": [*range(VOCABULARY)],
}


def states(model: Any, rows: int = 3) -> Tensor:
    generator = torch.Generator().manual_seed(rows)
    return torch.randn(rows, 2, model.get_output_embeddings().weight.shape[1], generator=generator).to(model.dtype)


def assert_rows(runner: ModelRunner, exactly: bool = False, head: Any = None) -> None:
    normed = states(runner.model).to(runner.dtype)
    whole = runner.project(normed, head)
    share = 1e-4 if runner.model.dtype == torch.float32 else 2e-2
    for ids in map(torch.tensor, LISTS.values()):
        for _ in range(2):
            found = runner.project(normed, head, ids)
            assert found.shape == whole.shape
            assert found.dtype == torch.float32
            others = torch.ones(VOCABULARY, dtype=torch.bool).index_fill(0, ids, False)
            assert (found[..., others] == float("-inf")).all()
            if exactly:
                assert torch.equal(found[..., ids], whole[..., ids])
            else:
                torch.testing.assert_close(found[..., ids], whole[..., ids], rtol=share, atol=share * float(whole.std()))


@pytest.mark.parametrize("family", ["llama", "gemma2", "granite", "cohere", torch.bfloat16, torch.float16], ids=str)
def test_eager_logits_are_those_of_the_whole_head(family: str | torch.dtype) -> None:
    model = families.cached(family) if isinstance(family, str) else families.build("llama").to(family)
    assert_rows(ModelRunner(model, "eager"))


@pytest.mark.parametrize("engine", ENGINES)
def test_a_head_s_biases_go_with_their_rows_and_changes_are_copied(engine: str) -> None:
    model: Any = llama()
    model.lm_head = torch.nn.Linear(32, VOCABULARY)
    model.lm_head.bias.normal_(0, 3)
    model.eval().requires_grad_(False)
    assert_rows(ModelRunner(model, engine), exactly=engine == "native")
    assert_rows(ModelRunner(model, engine), exactly=engine == "native", head=torch.nn.Linear(32, VOCABULARY))
    normed, lists = states(model), [torch.tensor(LISTS[name]) for name in ("the first ones", "some")]

    def found() -> list[Tensor]:
        return [ModelRunner(model, engine).project(normed, None, ids) for ids in lists]

    before, bias = found(), model.lm_head.bias.clone()
    model.lm_head.bias.add_(3)
    torch.testing.assert_close(found(), [one + 3 for one in before])
    model.lm_head.bias.zero_()
    unbiased = found()
    torch.testing.assert_close(unbiased, [one - bias for one in before])
    model.lm_head.weight.mul_(2)
    torch.testing.assert_close(found(), [2 * one for one in unbiased])
    model.lm_head.weight = torch.nn.Parameter(model.lm_head.weight / 4)
    torch.testing.assert_close(found(), [one / 2 for one in unbiased])


@NATIVE
@pytest.mark.parametrize("family", list(LAYER_VARIANTS))
def test_native_logits_are_those_of_the_whole_head_bit_for_bit(family: str) -> None:
    assert_rows(ModelRunner(families.cached(family), "native"), exactly=True)


@NATIVE
@pairwise(dtype=[torch.float32, torch.bfloat16, torch.float16], quantize=["none", "int8", "int4"], keep_weights=[True, False])
def test_rows_of_packed_weights_are_exact(dtype: torch.dtype, quantize: str, keep_weights: bool) -> None:
    model = copy.deepcopy(families.cached("gemma2")).to(dtype)
    attach(model, EngineOptions("native", quantize, keep_weights=keep_weights))
    runner = ModelRunner(model)
    assert runner.engine.quantize == (None if quantize == "none" else quantize)
    assert_rows(runner, exactly=True)


class Adapted(torch.nn.Module):
    """What an adapter puts in the place of a head."""

    def __init__(self, inner: Any) -> None:
        super().__init__()
        self.inner, self.weight = inner, inner.weight

    def forward(self, hidden: Tensor) -> Tensor:
        return 2 * self.inner(hidden)


def own_forward(model: Any) -> None:
    own = model.lm_head.forward
    model.lm_head.forward = lambda states: 2 * own(states)


CHANGES: dict[str, Callable[[Any], Any]] = {
    "hook": lambda model: model.lm_head.register_forward_hook(lambda *given: 2 * given[-1]),
    "hook before": lambda model: model.lm_head.register_forward_pre_hook(lambda _, given: (2 * given[0],)),
    "forward": own_forward,
    "adapter": lambda model: setattr(model, "lm_head", Adapted(model.lm_head)),
}


@pytest.mark.parametrize("change", CHANGES)
def test_what_a_head_does_beyond_its_weights_is_done(change: str) -> None:
    model: Any = llama()
    normed, ids = states(model), torch.tensor(LISTS["some"])
    before = ModelRunner(model, "eager").project(normed, None, ids)
    CHANGES[change](model)
    runner = ModelRunner(model, "eager")
    torch.testing.assert_close(runner.project(normed, None, ids), 2 * before)
    assert_rows(runner)


@NATIVE
def test_the_engine_picks_among_some_tokens() -> None:
    runner = ModelRunner(families.cached("gemma2"), "native")
    hidden = torch.randn(5, states(runner.model).shape[-1], generator=torch.Generator().manual_seed(1))
    transform = torch.randn(hidden.shape[1], hidden.shape[1], generator=torch.Generator().manual_seed(2))
    for ids in map(torch.tensor, LISTS.values()):
        for matrix in (None, transform):
            normed = runner.normed(hidden)
            logits = runner.project(normed if matrix is None else normed @ matrix.t(), None, ids)
            picked, probability = runner.engine.score_exit(hidden, matrix, ids)
            assert torch.equal(picked, logits.argmax(-1))
            torch.testing.assert_close(probability, logits.softmax(-1).amax(-1), rtol=1e-4, atol=1e-6)


@NATIVE
def test_only_lists_of_the_heads_own_ids_are_read() -> None:
    runner = ModelRunner(llama(), "native")
    for ids in ([], [-1, 3], [5, 97], [*range(98)]):
        with pytest.raises(ValueError, match="a shortlist must name ids from 0 to 96"):
            runner.project(torch.zeros(1, 1, 32), None, torch.tensor(ids, dtype=torch.int64))
    with pytest.raises(ValueError, match=r"the native engine wants shortlist \[2\] in int64"):
        runner.project(torch.zeros(1, 1, 32), None, torch.tensor([1, 2], dtype=torch.int32))


@pytest.mark.parametrize("engine", ENGINES)
def test_rows_go_with_their_list(engine: str) -> None:
    runner, ids = ModelRunner(llama(), engine), torch.tensor(LISTS["some"])
    runner.project(torch.zeros(1, 1, 32), None, ids)
    kept: Any = runner.engine
    assert len(kept._shortlists) == 1
    gone = weakref.ref(ids)
    del ids
    gc.collect()
    assert gone() is None
    assert len(kept._shortlists) == 0
