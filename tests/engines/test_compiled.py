"""The engine that compiles layers: the texts of the eager engine, and few graphs, all of them before the first token if asked.

"eager" as torch.compile's backend captures graphs and compiles nothing, so that counting is quick.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from itertools import product
from typing import Any

import pytest
import torch
from torch._dynamo.utils import counters
from transformers import PreTrainedModel

from skipstone.engines import choose_engine as choice
from skipstone.engines.compiled import BACKEND_VARIABLE, COLUMNS
from skipstone.engines.kv_cache import KVCache
from skipstone.engines.model_runner import ModelRunner
from skipstone.methods import METHODS as KNOWN
from skipstone.methods import AdaSD, Speculative
from skipstone.models.passes import Pass
from tests.helpers import families
from tests.helpers.pairwise import round_robin, slow_except
from tests.helpers.settings import QUIET
from tests.helpers.support import assert_same_texts, decode

pytestmark = QUIET

METHODS = [
    "autoregressive",
    "layerskip exit_layer=2 num_speculative_tokens=4",
    "swift skip_ratio=0.5 num_speculative_tokens=4 context_window=6",
    "adadecode heads=original confidence_threshold=0.3",
    "lookahead",
    "recycle num_speculative_tokens=5 num_candidates=3",
    "layerskip exit_layer=2 num_speculative_tokens=4 draft_vocabulary=60",
    "early_exit exit_layer=2",
    "self_speculative skip_attention=1 skip_mlp=2 num_speculative_tokens=4",
    "prompt_lookup num_speculative_tokens=4",
    "jacobi num_speculative_tokens=5",
    "speculative num_speculative_tokens=4",
    "adasd num_speculative_tokens=4",
    "auto",
]
DRAFTED = ("speculative", "adasd")  # by another model, which has graphs of its own
SAMPLING: list[dict[str, Any]] = [{"do_sample": False}, {"do_sample": True, "temperature": 0.8, "top_p": 0.9, "seed": 3}]
WIDTHS = 7  # of compiled passes: 1, 2, 4, ... COLUMNS tokens


@pytest.fixture(autouse=True)
def _no_compiler(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv(BACKEND_VARIABLE, "eager")
    counters.clear()
    yield
    assert not counters["graph_break"]


@pytest.fixture(scope="module")
def model() -> PreTrainedModel:
    return families.build("llama")


@functools.cache
def kept(name: str) -> PreTrainedModel:
    """A family's model for all tests of it here, so that its graphs are compiled once."""
    return families.build(name)


def engine_of(model: PreTrainedModel) -> Any:
    return ModelRunner(model, "compiled").engine


def method_of(text: str, name: str) -> Any:
    if text.startswith("speculative"):
        return Speculative(families.near(name), 4)
    return AdaSD(families.near(name), num_speculative_tokens=4, relaxed=False) if text.startswith("adasd") else text


def assert_texts_are_the_eager_engine_s(model: Any, name: str, text: str, rows: int, options: dict[str, Any]) -> None:
    prompts, method = families.prompts(rows), method_of(text, name)
    expected = decode(model, prompts, method, engine="eager", **options)
    found = decode(model, prompts, method, engine="compiled", **options)
    assert (found.engine, found.engine_reason) == ("compiled", None)
    assert engine_of(model).graphs.count
    assert expected.new_tokens is not None
    assert_same_texts(model, prompts, expected.new_tokens, found, options)


USUAL = [(3, SAMPLING[0]), (1, SAMPLING[1])]


def test_every_method_is_decoded_with() -> None:
    assert {text.split()[0] for text in METHODS} == {*KNOWN}


@round_robin(text=slow_except(METHODS[:6], METHODS), rows=(1, 3), options=SAMPLING)
def test_texts_are_those_of_the_eager_engine(model: PreTrainedModel, text: str, rows: int, options: dict[str, Any]) -> None:
    assert_texts_are_the_eager_engine_s(model, "llama", text, rows, options)


FURTHER = ["gpt_oss", "deepseek_v3", "phimoe"]
"""Sinks of attention, latent keys and values, experts whose router computes much: beside the usual families."""
OTHERS = [name for name in families.NAMES if name != "llama"] + FURTHER
QUICK = [("gpt_oss", "early_exit exit_layer=2")]


PAIRS = list(product(OTHERS, METHODS))


@pytest.mark.parametrize(("name", "text"), slow_except(QUICK, PAIRS, full=PAIRS[::9]))
def test_every_method_on_every_family_writes_what_the_eager_engine_writes(name: str, text: str) -> None:
    """Ragged rows greedily, or one row drawn."""
    rows, options = USUAL[(OTHERS.index(name) + METHODS.index(text)) % 2]
    assert_texts_are_the_eager_engine_s(kept(name), name, text, rows, options)


@pytest.mark.slow
def test_all_graphs_are_there_after_the_warm_up() -> None:
    """Whatever the method, the lengths and the sampling; and torch.compile says the same as the engine."""
    model = families.build("llama")
    engine = engine_of(model)
    assert "eager: 0 graphs of 1 kinds of layers in 0.0 s" in engine.detail
    counters.clear()
    told = engine.warm_up(rows=2, slots=129)
    assert engine.graphs.count == 2 * WIDTHS == counters["stats"]["unique_graphs"]
    assert told == engine.detail
    assert f"{2 * WIDTHS} graphs" in told
    assert engine.graphs.seconds > 0
    for index, text in enumerate(text for text in METHODS if not text.startswith(DRAFTED)):
        prompts = [torch.arange(1, 80), torch.arange(3, 40)]
        decode(model, prompts, text, engine="compiled", max_new_tokens=60, **SAMPLING[index % 2])
    assert engine_of(model) is engine
    assert engine.graphs.count == 2 * WIDTHS == counters["stats"]["unique_graphs"]


def test_a_graph_is_compiled_when_its_shape_is_first_met() -> None:
    model = families.build("llama")
    engine = engine_of(model)
    plain: dict[str, Any] = {"engine": "compiled", "max_new_tokens": 8, "do_sample": False}
    for prompts, graphs in [(1, 1), (1, 1), (3, 2), (4, 2), (2, 3)]:  # 3 rows are 4 to a graph
        decode(model, families.prompts(prompts), "autoregressive", **plain)
        assert engine.graphs.count == graphs, prompts
    decode(model, families.prompts(1), "layerskip exit_layer=2 num_speculative_tokens=2", **plain)
    assert engine.graphs.count == 5, "2 tokens, and 3, which are 4 to a graph, whatever layers run"
    decode(model, [torch.arange(1, 96).repeat(2)[:125]], "autoregressive", **plain)
    assert engine.graphs.count == 6, "beyond 128 slots a graph reads 256"


def test_passes_that_compile_are_counted() -> None:
    """tests/test_cuda.py: those that record, too."""
    model = families.build("llama")
    engine, runner, counted = engine_of(model), ModelRunner(model, "compiled"), list[int]()
    for width in (3, 3, 4, 5, 5):
        passes(engine, runner, width, inference=True)
        counted.append(engine.preparations)
    assert counted == [1, 1, 1, 2, 2], "3 tokens are 4 to a graph"


def passes(engine: Any, model: ModelRunner, width: int, inference: bool) -> torch.Tensor:
    """The states of `width` tokens behind 5 others."""
    store, ids = KVCache(1, model.depth, 256), torch.arange(1, width + 6)[None]
    store.reserve(width + 5)
    with torch.inference_mode(inference), torch.no_grad():
        hidden = ids
        for start, stop in ((0, 5), (5, width + 5)):
            positions = torch.arange(start, stop)[None]
            at = Pass(positions, positions, None, slice(0, 1), stop, start)
            hidden = engine.run(engine.embed(ids[:, start:stop], positions), at, store, range(model.depth))
    return hidden


@pytest.mark.parametrize(("width", "inference", "graphs"), [(COLUMNS, True, 1), (COLUMNS + 1, True, 0), (3, False, 0)])
def test_wide_passes_and_those_outside_inference_mode_are_the_eager_engine_s(width: int, inference: bool, graphs: int) -> None:
    model = families.build("llama")
    engine, runner = engine_of(model), ModelRunner(model, "eager")
    expected = passes(runner.engine, runner, width, inference)
    found = passes(engine, runner, width, inference)
    assert engine.graphs.count == graphs
    assert torch.allclose(found, expected, rtol=1e-4, atol=1e-4)
    assert torch.equal(found, expected) or graphs


@pytest.mark.slow
def test_what_is_done_for_cuda_graphs_changes_no_text() -> None:
    """Buffers that stay where they are, results that are copied; what lowers the graphs is the same."""
    model, prompts = families.build("llama"), families.prompts(3)
    graphs = []
    for cuda in (False, True):
        engine = engine_of(model)
        engine.graphs.cuda, before = cuda, engine.graphs.count
        engine._regions.clear()
        for text in (METHODS[1], METHODS[4]):
            expected = decode(model, prompts, text, engine="eager", do_sample=False)
            assert decode(model, prompts, text, engine="compiled", do_sample=False).new_tokens == expected.new_tokens
        graphs.append(engine.graphs.count - before)
    assert graphs[0] == graphs[1] > 0


def test_auto_never_takes_it(model: PreTrainedModel, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(choice.VARIABLE, raising=False)
    assert ModelRunner(model).engine.name != "compiled"
    monkeypatch.setenv(choice.VARIABLE, "compiled")
    assert ModelRunner(model).engine.name == "compiled"


def test_what_cannot_be_compiled_is_refused_in_one_sentence() -> None:
    model: Any = families.build("llama")
    with pytest.raises(ValueError, match="needs the native engine, found engine='compiled'"):
        ModelRunner(model, "compiled", quantize="int8")
    engine = engine_of(model)
    handle = model.model.layers[1].mlp.register_forward_hook(lambda *_: None)
    with pytest.raises(ValueError, match=r"cannot run this model: model.layers.1.mlp has hooks"):
        ModelRunner(model, "compiled")
    handle.remove()
    assert engine_of(model) is engine


class Peeking(torch.nn.Module):
    """Does what no graph can hold: how it computes depends on a value."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x if x.sum() > 0 else x * 1


def test_a_layer_that_is_no_graph_is_an_error_that_says_so() -> None:
    model: Any = families.build("llama")
    model.model.layers[2].mlp = Peeking()
    with pytest.raises(ValueError, match=r"engine='compiled' cannot run this model: torch.compile says .*; take"):
        decode(model, families.prompts(1), "autoregressive", engine="compiled", do_sample=False)
    counters.clear()
    assert decode(model, families.prompts(1), "autoregressive", engine="eager", do_sample=False).new_tokens


@pytest.mark.slow
def test_new_weights_are_read() -> None:
    """In place, and in the place of the old ones."""
    model = families.build("llama")
    layer: Any = model.get_decoder().layers[1]
    other: Any = families.build("llama", seed=5).get_decoder()
    for change in (lambda: layer.mlp.up_proj.weight.data.mul_(-2), lambda: setattr(layer, "mlp", other.layers[0].mlp)):
        before = decode(model, families.prompts(1), "autoregressive", engine="compiled", do_sample=False).new_tokens
        change()
        after = decode(model, families.prompts(1), "autoregressive", engine="compiled", do_sample=False).new_tokens
        assert after == decode(model, families.prompts(1), "autoregressive", engine="eager", do_sample=False).new_tokens
        assert after != before


@pytest.mark.slow
def test_inductor_writes_the_same_texts(monkeypatch: pytest.MonkeyPatch) -> None:
    """It compiles C++ for half a minute."""
    monkeypatch.setenv(BACKEND_VARIABLE, "inductor")
    model, prompts = families.build("llama"), families.prompts(3)
    for text in ("autoregressive", METHODS[1]):
        expected = decode(model, prompts, text, engine="eager", do_sample=False)
        found = decode(model, prompts, text, engine="compiled", do_sample=False)
        assert expected.new_tokens is not None
        assert_same_texts(model, prompts, expected.new_tokens, found, {"do_sample": False})
    assert "layers compiled by inductor" in engine_of(model).detail
