"""The layer of an EAGLE-3 head on the native engine: its numbers, its bits, and chains in one call."""

import functools
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from skipstone.engines.engine import ChainInputs, ChainOutputs, SurvivalThresholds
from skipstone.engines.kv_cache import KVCache
from skipstone.engines.model_runner import ModelRunner
from skipstone.engines.native.structs import LayerStruct
from skipstone.models.eagle3 import Eagle3Model, read_files
from skipstone.models.passes import Pass
from tests.helpers import families
from tests.helpers.feature_heads import LLAMA3_ROPE, eagle3_folder
from tests.helpers.feature_references import Eagle3Reference, target_states
from tests.helpers.native import NATIVE_ONLY, levels, native, stored, text

pytestmark = NATIVE_ONLY

VOCAB, COLUMNS = 97, 20
VARIANTS: dict[str, dict[str, Any]] = {
    "fewer tokens": {},
    "residual normed": {"norm_before_residual": True, "norm_output": True},
    "norms of queries and keys": {"kind": "qwen3", "rope_scaling": LLAMA3_ROPE},
    "biases": {"kind": "qwen2", "norm_before_residual": True},
    "all tokens": {"draft_vocab": None, "embedding": "own", "hidden_size": 36, "norm_output": True},
}
ARITHMETIC: dict[str, tuple[torch.dtype, dict[str, str], float]] = {
    "float32": (torch.float32, {}, 1e-5),
    "bfloat16 keys and values": (torch.float32, {"kv_dtype": "bfloat16"}, 2e-2),
    "bfloat16": (torch.bfloat16, {"compute_dtype": "float32"}, 1e-5),
    "bfloat16 inputs": (torch.bfloat16, {}, 3e-2),
    "int8": (torch.float32, {"quantize": "int8"}, 8e-2),
    "int4": (torch.float32, {"quantize": "int4"}, 0.6),
}
"""Dtype of the weights, settings, and the largest error (root mean square) in standard deviations."""


@functools.cache
def target() -> Any:
    return families.build("llama", layers=8)


class Head:
    """A head on the native engine, its reference, and columns of a text.

    tokens: [T + 1]. features: [T, 3 D]. states: [T, d]. entering: [T, 2 d]. d: size of the head's states. tolerance: as in
    ARITHMETIC.
    """

    def __init__(self, folder: Path, variant: str = "fewer tokens", arithmetic: str = "float32") -> None:
        dtype, settings, self.tolerance = ARITHMETIC[arithmetic]
        eagle3_folder(folder, target().config, dtype=dtype, **VARIANTS[variant])
        self.model = Eagle3Model(read_files(folder), ModelRunner(target(), "eager"), 3, None, None)
        self.runner = ModelRunner(self.model, "native", **settings)
        self.engine: Any = self.runner.engine
        weights = [part.weight for part in (target().get_input_embeddings(), target().get_output_embeddings())]
        self.reference = Eagle3Reference(folder, *weights)
        self.ids = self.reference.ids
        self.tokens = text(COLUMNS + 1)
        self.features = target_states(target(), self.tokens[:-1], [2, 4, 5])
        self.states = self.reference.read_states(self.features)
        self.entering = self.reference.enter(self.tokens[1:], self.states).float()

    @property
    def layer(self) -> LayerStruct:
        return LayerStruct.from_address(self.engine._weights.model.layers)

    def new_store(self) -> KVCache:
        store = KVCache(4, 1, 40, self.runner.kv_dtype)
        store.reserve(40)
        return store

    def run(self, entering: Tensor, starts: list[int], counts: list[int], store: KVCache, first: int = 0) -> Tensor:
        """Run the last counts[row] columns of rows `first` and later, at positions from starts[row] on."""
        rows, n = entering.shape[:2]
        skipped = n - torch.tensor(counts)[:, None]
        positions = (torch.tensor(starts)[:, None] + torch.arange(n) - skipped).clamp(0)
        valid = torch.arange(n) >= skipped
        extent = max(map(sum, zip(starts, counts, strict=True)))
        at = Pass(positions, positions, None if valid.all() else valid, slice(first, first + rows), extent)
        return self.runner.run(entering, at, store, range(1))

    def read(self, widths: list[int], together: bool = False) -> tuple[Tensor, Tensor]:
        """What leaves the layer [T, d], and keys and values, for the text in passes of these widths. together: other rows of
        the passes have other columns, and there are invalid ones."""
        store, parts, start = self.new_store(), [], 0
        for width in widths:
            own = self.entering[start : start + width]
            if together:
                columns = torch.stack([torch.cat([torch.full_like(own[:1], 7.0), one]) for one in (own.flip(0), own, -own)])
                found = self.run(columns, [start, start, 0], [width // 2, width, 1], store)
                assert found[:, 0].eq(7.0).all(), "the state of an invalid column was changed"
                parts.append(found[1, 1:])
            else:
                parts.append(self.run(own[None], [start], [width], store, 1)[0])
            start += width
        return torch.cat(parts), stored(store, 1, slice(0, start))

    def inputs(self, max_drafts: list[int], bases: list[int], **rules: Any) -> ChainInputs:
        """A chain on every row, after so many columns of the text."""
        rows, size, ends = len(max_drafts), max(max_drafts) + 1, rules.pop("ends", [frozenset()] * len(max_drafts))
        inputs = ChainInputs(max_drafts, rules.pop("thresholds", None), ends, 1, **rules)
        inputs.roots, inputs.bases = self.tokens[1:][bases], bases
        inputs.states, inputs.extent, inputs.columns = self.states[bases].float(), max(bases) + size, size
        assert inputs.roots.shape == (rows,)
        return inputs

    def store_of(self, inputs: ChainInputs) -> KVCache:
        """The KV cache before a chain."""
        store = self.new_store()
        for row, base in enumerate(inputs.bases):
            self.run(self.entering[None, :base], [0], [base], store, row)
        return store


@pytest.fixture
def head(tmp_path: Path) -> Head:
    return Head(tmp_path)


def assert_near(found: Tensor, expected: Tensor, tolerance: float) -> None:
    error = (found.double() - expected).square().mean().sqrt() / expected.std()
    assert error < tolerance, f"off by {error:.3g} standard deviations"


def assert_computes_the_formulas(head: Head) -> None:
    expected = head.reference.layer(head.entering.double(), torch.arange(COLUMNS))
    assert_near(head.read([COLUMNS])[0], expected, head.tolerance)
    assert_near(head.engine.multiply(head.model.fc, head.features.float()), head.states, head.tolerance)
    logits = torch.stack([head.reference.logits(one) for one in expected])
    assert_near(head.engine.project(head.runner.normed(expected.float())), logits[:, head.ids], head.tolerance)


def assert_drafts_by_the_formulas(head: Head, drafts: int = 6) -> None:
    for last in (COLUMNS - 1, 7, 0):
        _, expected = head.reference.chain(head.features[: last + 1], head.tokens[: last + 2], drafts)
        inputs = head.inputs([drafts], [last])
        assert head.runner.chain(inputs, head.store_of(inputs)).tokens[0].tolist() == expected.tolist()


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("arithmetic", ARITHMETIC)
def test_the_layer_computes_its_formulas(variant: str, arithmetic: str, tmp_path: Path) -> None:
    assert_computes_the_formulas(Head(tmp_path, variant, arithmetic))


@pytest.mark.parametrize("variant", VARIANTS)
def test_a_chain_drafts_by_the_formulas(variant: str, tmp_path: Path) -> None:
    assert_drafts_by_the_formulas(Head(tmp_path, variant))


@pytest.mark.parametrize("arithmetic", ARITHMETIC)
def test_a_column_has_the_same_bits_in_every_pass_and_on_every_level(arithmetic: str, tmp_path: Path) -> None:
    head = Head(tmp_path, "residual normed", arithmetic)
    head.engine.threads = 1
    expected = head.read([1] * COLUMNS)
    products = head.engine.multiply(head.model.fc, head.features.float())
    for level in (*levels(), head.engine.level):
        head.engine.level = level
        for threads, widths, together in ((1, [20], False), (3, [3, 9, 8], False), (2, [12, 8], True), (1, [2, 17, 1], True)):
            head.engine.threads = threads
            for found, right in zip(head.read(widths, together), expected, strict=True):
                assert torch.equal(found, right)
        alone = [head.engine.multiply(head.model.fc, one) for one in head.features.float()]
        assert torch.equal(torch.stack(alone), products)


def score(head: Head, hidden: Tensor) -> tuple[list[int], list[float], list[float]]:
    """The greedy token of every row, its probability, and the entropy in bits."""
    tokens, probability = head.engine.score_exit(hidden[:, 0], None)
    logits = head.engine.project(head.runner.normed(hidden[:, 0]))
    assert torch.equal(tokens, head.ids[logits.argmax(-1)])
    p = logits.double().softmax(-1)
    return tokens.tolist(), probability.tolist(), (-(p * p.log2()).sum(-1)).tolist()


def draft_token_by_token(head: Head, inputs: ChainInputs, store: KVCache) -> tuple[list[list[int]], list[list[float]], Tensor]:
    """The drafts of every row, their probabilities, and the states of roots and drafts, by the rules of `ChainInputs`."""
    rows, start, rule = range(len(inputs.max_drafts)), torch.tensor(inputs.bases)[:, None], inputs.survival
    drafts, sure = [list[int]() for _ in rows], [list[float]() for _ in rows]
    drafting, survival = [count > 0 for count in inputs.max_drafts], [1.0] * len(rows)
    runs = [count > 0 or (inputs.keep_states and count == 0) for count in inputs.max_drafts]
    tokens, states, found = (
        inputs.roots[:, None].clone(),
        inputs.states,
        torch.zeros(len(rows), inputs.columns, head.states.shape[1]),
    )
    assert states is not None
    states = states[:, None]
    for place in range(max(inputs.max_drafts) + 1):
        embedded = head.runner.embed(tokens, start + place)
        at = Pass(start + place, start + place, torch.tensor(runs)[:, None], slice(0, len(rows)), inputs.extent)
        hidden = head.runner.run(torch.cat([embedded, states], -1), at, store, range(1))
        found[:, place] = (hidden if inputs.keep_states else embedded)[:, 0]
        best, probability, entropy = score(head, hidden)
        for row in rows:
            if not drafting[row]:
                runs[row] = False
                continue
            p, limit = probability[row], -1.0 if inputs.thresholds is None else inputs.thresholds[row]
            if inputs.excludes_uncertain and p <= limit:
                drafting[row] = runs[row] = False
                continue
            drafts[row].append(best[row])
            sure[row].append(p)
            tokens[row] = best[row]
            drafting[row] = len(drafts[row]) < inputs.max_drafts[row] and best[row] not in inputs.ends[row] and p >= limit
            if inputs.max_entropy is not None:
                drafting[row] &= entropy[row] <= inputs.max_entropy[row]
            if rule is not None:
                survival[row] /= 1 + math.exp(-rule.offset - rule.slope * math.log(p / (1 - p)))
                drafting[row] &= place < len(rule.min_survival_shared) and survival[row] >= rule.min_survival_shared[place]
            runs[row] = drafting[row] or inputs.keep_states
        if rule is not None and place < len(rule.min_survival):
            alone, shared = rule.min_survival[place], rule.min_survival_shared[place]
            surplus = sum(one - shared for one, goes_on in zip(survival, drafting, strict=True) if goes_on)
            if surplus < sum(count >= 0 for count in inputs.max_drafts) * (alone - shared):
                runs = [was and (inputs.keep_states or not goes_on) for was, goes_on in zip(runs, drafting, strict=True)]
                drafting = [False] * len(rows)
        states = head.runner.normed(hidden) if head.model.norm_output else hidden
    return drafts, sure, found


LIMITS = [0.3, 0.5, 0.0, 0.4]
RULES: dict[str, dict[str, Any]] = {
    "limits": {"max_drafts": [5, 0, -1, 3]},
    "limits, states": {"max_drafts": [5, 0, -1, 3], "keep_states": True},
    "thresholds": {"max_drafts": [6, 6, -1, 4], "thresholds": LIMITS},
    "uncertain drafts dropped": {"thresholds": LIMITS, "excludes_uncertain": True, "keep_states": True},
    "ends": {"ends": [frozenset(range(0, VOCAB, 2)), frozenset(range(1, VOCAB, 2)), frozenset(), frozenset({5})]},
    "entropy": {"max_entropy": [2.0, 3.0, math.inf, 1.0]},
    "survival": {
        **{"max_drafts": [6, 6, -1, 6], "thresholds": [0.0] * 4, "keep_states": True},
        "survival": SurvivalThresholds(1.0, 0.5, [0.4, 0.3, 0.25, 0.2, 0.2, 0.2], [0.2, 0.1, 0.05, 0.01, 0.01, 0.01]),
    },
}


@pytest.mark.parametrize("rules", RULES)
@pytest.mark.parametrize("kind", [("residual normed", "float32"), ("fewer tokens", "bfloat16 inputs"), ("all tokens", "int8")])
def test_a_chain_in_one_call_is_the_chain_token_by_token(rules: str, kind: tuple[str, str], tmp_path: Path) -> None:
    head = Head(tmp_path, *kind)
    inputs = head.inputs(**{"max_drafts": [6] * 4, "bases": [7, 4, 0, 11]} | RULES[rules])
    for threads in (1, 2):
        head.engine.threads = threads
        stores = head.store_of(inputs), head.store_of(inputs)
        found = head.runner.chain(inputs, stores[0])
        drafts, sure, states = draft_token_by_token(head, inputs, stores[1])
        assert found.counts == [*map(len, drafts)]
        for row, count in enumerate(found.counts):
            assert torch.equal(stored(stores[0], row, slice(0, 40)), stored(stores[1], row, slice(0, 40)))
            assert inputs.max_drafts[row] < 0 or torch.equal(found.states[row, : count + 1], states[row, : count + 1])
            assert found.tokens[row, :count].tolist() == drafts[row]
            if found.confidence is not None:
                assert found.confidence[row, :count].tolist() == sure[row]
    assert sum(found.counts) > 0
    assert rules.startswith("limits") or sum(found.counts) < sum(inputs.max_drafts), "no rule ended a draft"


def test_draft_ids_are_ids_of_the_target(head: Head) -> None:
    hidden = torch.randn(5, head.states.shape[1])
    logits = head.engine.project(head.runner.normed(hidden))
    assert logits.shape[1] == len(head.ids) == 61
    assert torch.equal(head.engine.greedy_tokens(hidden), head.ids[logits.argmax(-1)])
    some = head.ids[[3, 10, 40]]
    assert torch.equal(head.engine.project(head.runner.normed(hidden), None, some), logits[:, [3, 10, 40]])
    unknown = next(one for one in range(VOCAB) if one not in head.ids.tolist())
    with pytest.raises(ValueError, match="a shortlist must name ids that the head has"):
        head.engine.project(hidden, None, torch.tensor([unknown]))

    def chain(size: int, shortlist: Tensor | None = None) -> ChainOutputs:
        inputs = head.inputs([4, 4], [3, 9], max_entropy=[math.inf] * 2, num_ranked=70, distribution_size=size)
        inputs.shortlist = shortlist
        return head.runner.chain(inputs, head.store_of(inputs))

    found: Any = chain(VOCAB)
    assert found.ranked.shape == (2, 4, 61)
    assert torch.equal(found.ranked.sort().values, head.ids.expand(2, 4, 61))
    assert torch.equal(found.ranked[..., 0], found.tokens)
    assert torch.equal(found.distributions.argmax(-1), found.tokens)
    torch.testing.assert_close(found.distributions[..., head.ids].sum(-1), torch.ones(2, 4))
    assert found.distributions.count_nonzero() == 8 * 61
    assert set(chain(VOCAB, some).tokens.flatten().tolist()) <= set(some.tolist())
    with pytest.raises(RuntimeError, match="a size that is negative or does not fit"):
        chain(int(head.ids[-1]))


@pytest.mark.parametrize("quantize", [None, "int8", "int4"])
def test_a_further_matrix_is_packed_once_and_has_a_bias(quantize: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    engine: Any = ModelRunner(families.build("llama"), "native", quantize or "none").engine
    linear, states, before = nn.Linear(50, 19), torch.randn(3, 4, 50), engine.nbytes
    tolerance = {None: 1e-5, "int8": 3e-2, "int4": 0.5}[quantize]
    found = engine.multiply(linear, states)
    assert_near(found, linear.double()(states.double()), tolerance)
    assert engine.nbytes > before
    monkeypatch.setattr(engine._weights, "multiplier", None)
    assert torch.equal(engine.multiply(linear, states), found)
    assert engine.multiply(linear, states[:0]).shape == (0, 4, 19)
    with pytest.raises(ValueError, match=r"wants states \[3, 4, 50\] in float32 on the CPU, found \[3, 4, 49\]"):
        engine.multiply(linear, states[..., :49])


def test_inputs_that_do_not_fit_are_refused(head: Head) -> None:
    store, inputs, missing = head.new_store(), head.inputs([3], [4]), "something with a buffer that is missing"
    plain = native(families.cached("llama"))
    assert inputs.states is not None
    at, own = Pass(torch.arange(3)[None], torch.arange(3)[None], None, slice(0, 1), 3), head.entering[None, :3]
    for wrong in (own[..., :32], own[:, :2], own.double()):
        with pytest.raises(ValueError, match=r"wants hidden \[1, 3, 64\] in float32 on the CPU"):
            head.runner.run(wrong, at, store, range(1))
    with pytest.raises(RuntimeError, match="a layer that the model does not have"):
        head.runner.run(own, at, store, range(2))
    assert torch.equal(head.runner.run(own, at, store, range(0)), own[..., 32:])
    inputs.states = inputs.states[:, :31]
    with pytest.raises(ValueError, match=r"wants states \[1, 32\] in float32 on the CPU, found \[1, 31\]"):
        head.runner.chain(inputs, store)
    inputs.states = None
    with pytest.raises(RuntimeError, match=missing):
        head.runner.chain(inputs, store)
    inputs.states, inputs.layers = torch.zeros(1, 32), 4
    with pytest.raises(RuntimeError, match=missing):
        plain.chain(inputs, KVCache(1, 4, 40))


def test_a_changed_rule_makes_a_new_engine(tmp_path: Path) -> None:
    head = Head(tmp_path, "residual normed")
    assert head.engine.is_current(head.engine.version)
    head.model.norm_output = False
    assert not head.engine.is_current(head.engine.version)
    head.model.norm_output, layer = True, head.model.model.layers[0]
    assert head.engine.is_current(head.engine.version)
    layer.norm_before_residual = False
    assert not head.engine.is_current(head.engine.version)


def _without_hidden_norm(head: Head) -> None:
    head.layer.norm_before_attention = None


def _norms_swapped(head: Head) -> None:
    layer = head.layer
    layer.norm_of_embedding, layer.norm_before_attention = layer.norm_before_attention, layer.norm_of_embedding


def _residual_not_normed(head: Head) -> None:
    head.layer.norm_before_residual = 0


def _state_before_embedding(head: Head) -> None:
    own = head.engine.run
    head.engine.run = lambda hidden, *more: own(hidden.roll(hidden.shape[-1] // 2, -1), *more)


def _fed_back_before_the_norm(head: Head) -> None:
    head.engine._weights.model.feeds_back_normed = 0


def _ids_off_by_one(head: Head) -> None:
    head.engine._weights.ids = head.ids + 1


def _drafts_one_position_later(head: Head) -> None:
    own = head.runner.chain

    def chain(inputs: ChainInputs, store: KVCache) -> ChainOutputs:
        inputs.bases, inputs.extent = [base + 1 for base in inputs.bases], inputs.extent + 1
        return own(inputs, store)

    head.runner.chain = chain  # pyright: ignore[reportAttributeAccessIssue]


PLANTED: dict[str, tuple[str, Callable[[Head], None], Callable[[Head], None]]] = {
    "no norm of the state": ("fewer tokens", _without_hidden_norm, assert_computes_the_formulas),
    "norms swapped": ("fewer tokens", _norms_swapped, assert_computes_the_formulas),
    "residual not normed": ("residual normed", _residual_not_normed, assert_computes_the_formulas),
    "embedding and state swapped": ("fewer tokens", _state_before_embedding, assert_computes_the_formulas),
    "fed back before the norm": ("residual normed", _fed_back_before_the_norm, assert_drafts_by_the_formulas),
    "ids off by one": ("fewer tokens", _ids_off_by_one, assert_drafts_by_the_formulas),
    "drafts one position later": ("fewer tokens", _drafts_one_position_later, assert_drafts_by_the_formulas),
}


@pytest.mark.parametrize("mistake", PLANTED)
def test_a_planted_mistake_is_noticed(mistake: str, tmp_path: Path) -> None:
    variant, plant, proof = PLANTED[mistake]
    head = Head(tmp_path, variant)
    proof(head)
    plant(head)
    with pytest.raises(AssertionError):
        proof(head)
