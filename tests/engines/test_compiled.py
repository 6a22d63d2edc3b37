"""The engine that compiles layers: the eager engine's texts, few graphs, and the types that it runs."""

import functools
import gc
from collections.abc import Iterator
from dataclasses import replace
from itertools import product
from typing import Any
from weakref import ref

import pytest
import torch
from torch._dynamo.utils import counters
from transformers import PreTrainedModel

from skipstone.cli.families import described
from skipstone.engines.compiled import BACKEND_VARIABLE, COLUMNS
from skipstone.engines.kv_cache import KVCache
from skipstone.engines.model_runner import ModelRunner
from skipstone.models.known_types import TESTED, TESTED_AROUND_TEXT, UNCOMPILED
from skipstone.models.passes import Pass
from tests.helpers import families, wrapped
from tests.helpers.conformance import COMMON, ROWS
from tests.helpers.pairwise import slow_except
from tests.helpers.settings import QUIET
from tests.helpers.support import assert_same_texts, decode

pytestmark = QUIET

METHODS = [*COMMON, "layerskip, some tokens"]
DRAFTED = ("speculative", "adasd")  # by another model, which has graphs of its own
SAMPLING: list[dict[str, Any]] = [{"do_sample": False}, {"do_sample": True, "temperature": 0.8, "top_p": 0.9, "seed": 3}]
WIDTHS = 7  # of compiled passes: 1, 2, 4, ... COLUMNS tokens


@pytest.fixture(autouse=True)
def _no_compiler(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv(BACKEND_VARIABLE, "eager")
    counters.clear()
    yield
    assert not counters["graph_break"]


cached = functools.cache(families.build)  # a family's model for all tests of it here, so that its graphs are compiled once


def engine_of(model: PreTrainedModel) -> Any:
    return ModelRunner(model, "compiled").engine


def method_of(method: str, family: str = "llama") -> Any:
    return replace(ROWS[method], second=families.near).method(family, 4, "standard")


FURTHER = ["gpt_oss", "deepseek_v3", "phimoe"]
"""Sinks of attention, latent keys and values, and experts with a large router: next to the usual families."""
FAMILIES, WAYS = [*families.NAMES, *FURTHER], ((3, SAMPLING[0]), (1, SAMPLING[1]))
CELLS = [
    (family, name, way)
    for index, (family, name) in enumerate(product(FAMILIES, METHODS))
    for way in ((0, 1) if family == "llama" else (index % 2,))
]
FAST = [("llama", "layerskip", 1)]
ONE_EACH = [CELLS[(place + 1) * len(METHODS) + place % len(METHODS)] for place in range(1, len(FAMILIES))]
"""Every other family with one method, which take turns."""
TREE_WITH_SINKS = [cell for cell in CELLS if cell[:2] == ("gpt_oss", "recycle")]


@pytest.mark.parametrize(
    ("family", "name", "way"), slow_except(FAST, CELLS, full=[*CELLS[: 2 * len(METHODS) : 2], *ONE_EACH, *TREE_WITH_SINKS])
)
def test_texts_are_those_of_the_eager_engine(family: str, name: str, way: int) -> None:
    """Ragged rows greedily, or one row drawn."""
    model, method, (rows, options) = cached(family), method_of(name, family), WAYS[way]
    prompts, engine = families.prompts(rows), engine_of(model)
    expected = decode(model, prompts, method, engine="eager", **options)
    found = decode(model, prompts, method, engine="compiled", **options)
    assert (found.engine, found.engine_reason) == ("compiled", None)
    assert engine.graphs.count
    assert len(set(engine._kinds)) <= 2, "layers of a kind share their graphs"
    assert expected.new_tokens is not None
    assert_same_texts(model, prompts, expected.new_tokens, found, options)


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
    for index, name in enumerate(name for name in METHODS if name not in DRAFTED):
        prompts = [torch.arange(1, 80), torch.arange(3, 40)]
        decode(model, prompts, method_of(name), engine="compiled", max_new_tokens=60, **SAMPLING[index % 2])
    assert engine_of(model) is engine
    assert engine.graphs.count == 2 * WIDTHS == counters["stats"]["unique_graphs"]


def test_a_graph_is_compiled_when_its_shape_is_first_met() -> None:
    model = families.build("llama")
    engine = engine_of(model)
    plain: dict[str, Any] = {"engine": "compiled", "max_new_tokens": 8, "do_sample": False}
    for prompts, graphs in [(1, 1), (1, 1), (3, 2), (4, 2)]:  # 3 rows are 4 to a graph
        decode(model, families.prompts(prompts), "autoregressive", **plain)
        assert engine.graphs.count == engine.preparations == graphs, prompts
    decode(model, families.prompts(1), "layerskip exit_layer=2 num_speculative_tokens=2", **plain)
    assert engine.graphs.count == 4, "2 tokens, and 3, which are 4 to a graph, whatever layers run"
    decode(model, [torch.arange(1, 96).repeat(2)[:125]], "autoregressive", **plain)
    assert engine.graphs.count == engine.preparations == 5, "beyond 128 slots a graph reads 256"


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
    """Buffers stay where they are, results are copied. A request gets the buffers of the request before: a CUDA graph knows
    addresses."""
    model, prompts = families.build("llama"), families.prompts(3)
    graphs, places = [], []
    for cuda in (False, True):
        engine = engine_of(model)
        engine.graphs.cuda, before = cuda, engine.graphs.count
        engine._regions.clear()
        for method in map(method_of, ("layerskip", "layerskip", "lookahead")):
            expected = decode(model, prompts, method, engine="eager", do_sample=False)
            assert decode(model, prompts, method, engine="compiled", do_sample=False).new_tokens == expected.new_tokens
            assert not engine._borrowed
            places.append({shape: [one.keys[0].data_ptr() for one in spare] for shape, spare in engine._spare.items()})
        graphs.append(engine.graphs.count - before)
    assert graphs[0] == graphs[1] > 0
    assert places[-1]
    assert places[-2] == places[-3]


class Peeking(torch.nn.Module):
    """Computes in a way that depends on a value, which no graph can hold."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x if x.sum() > 0 else x * 1


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
    model.model.layers[2].mlp = Peeking()
    with pytest.raises(ValueError, match=r"engine='compiled' cannot run this model: torch.compile says .*; take"):
        decode(model, families.prompts(1), "autoregressive", engine="compiled", do_sample=False)
    counters.clear()
    assert decode(model, families.prompts(1), "autoregressive", engine="eager", do_sample=False).new_tokens


@pytest.mark.slow
def test_new_weights_are_read_and_old_graphs_freed() -> None:
    model: Any = families.build("llama")
    layer, other = model.model.layers[1], families.build("llama", seed=5)

    def text(engine: str = "compiled") -> Any:
        return decode(model, families.prompts(1), "autoregressive", engine=engine, do_sample=False).new_tokens

    for change in (
        lambda: layer.mlp.up_proj.weight.data.mul_(-2),
        lambda: setattr(layer.self_attn, "scaling", 0.9),
        lambda: setattr(layer, "mlp", other.model.layers[0].mlp),
    ):
        before = text()
        change()
        assert before != text() == text("eager")
    engine, weight = ref(engine_of(model)), ref(model.model.layers[0].mlp.up_proj.weight)
    model = layer = change = None
    gc.collect()
    assert (engine(), weight()) == (None, None)


@pytest.mark.slow
def test_inductor_writes_the_same_texts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(BACKEND_VARIABLE, "inductor")
    model, prompts = families.build("llama"), families.prompts(3)
    for method in map(method_of, ("autoregressive", "layerskip")):
        expected = decode(model, prompts, method, engine="eager", do_sample=False)
        found = decode(model, prompts, method, engine="compiled", do_sample=False)
        assert expected.new_tokens is not None
        assert_same_texts(model, prompts, expected.new_tokens, found, {"do_sample": False})
    assert "layers compiled by inductor" in engine_of(model).detail


TYPES = [*families.FURTHER, *wrapped.WRAPPERS]


@pytest.mark.parametrize("name", slow_except(("lfm2", "qwen2_vl"), TYPES, full=["mpt", *TYPES[::4]]))
def test_a_type_runs_compiled_where_the_table_says_so(name: str) -> None:
    model = wrapped.build(name) if name in wrapped.WRAPPERS else families.build(name)
    if {name, model.config.model_type} & UNCOMPILED:
        with pytest.raises(ValueError, match=r"'compiled' cannot run this model: .* its graphs do not.*; take engine='auto'"):
            decode(model, families.prompts(1), "autoregressive", engine="compiled", max_new_tokens=2)
        assert ModelRunner(model, "eager").engine.name == "eager"
        return
    prompts, options = families.prompts(2), {"max_new_tokens": 8, "do_sample": False}
    assert ModelRunner(model, "compiled").engine.name == "compiled"
    plain: Any = decode(model, prompts, "autoregressive", engine="eager", **options)
    found = decode(model, prompts, "autoregressive", engine="compiled", **options)
    assert_same_texts(model, prompts, plain.new_tokens, found, options)


def test_the_table_of_families_lists_the_engines_of_every_type() -> None:
    rows = {row["type"]: row for row in described()}
    engines = {"llama": "native, eager, compiled", "qwen2_vl": "eager, compiled", "lfm2": "eager", "mamba": ""}
    assert {kind: rows[kind]["engines"] for kind in engines} == engines
    assert {kind for kind, row in rows.items() if "compiled" in row["engines"]} == (TESTED | TESTED_AROUND_TEXT) - UNCOMPILED
    assert UNCOMPILED <= TESTED | TESTED_AROUND_TEXT
    assert {rows[kind]["support"] for kind in wrapped.WRAPPERS} == {"tested"}
    assert (rows["llava_next"]["support"], rows["florence2"]["support"]) == ("derived", "refused")
