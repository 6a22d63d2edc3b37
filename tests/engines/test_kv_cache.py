"""Slots and buffers: where entries go, and that growing, moving and trash lose or leak nothing."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from transformers import LlamaConfig, LlamaForCausalLM

from skipstone import Autoregressive, EarlyExit, LayerSkip, Method, Request, Sampling, SelfSpeculative, Swift
from skipstone.engines.kv_cache import KVCache
from skipstone.engines.model_runner import ModelRunner
from skipstone.models.passes import Pass
from tests.helpers import planted
from tests.helpers.machine import decode, llama, mistral, prompt, sharpened, small, start
from tests.helpers.pairwise import pairwise, slow_except
from tests.helpers.trees import Trees, reference


def filled(rows: int = 2, layers: int = 3, capacity: int = 600, slots: int = 20) -> tuple[KVCache, Callable[[], Tensor]]:
    """A store whose first slots hold random numbers (one layer unused), and a reader of all that."""
    store = KVCache(rows, layers, capacity)
    store.reserve(slots)
    positions = torch.arange(slots).expand(rows, -1)
    view = store.view(Pass(positions, positions, None, slice(0, rows), slots, 0))
    generator = torch.Generator().manual_seed(0)
    for layer in range(layers - 1):
        keys, values = torch.randn(2, rows, 2, slots, 4, generator=generator)
        view.update(keys, values, layer)
    store.length = [slots] * rows
    used = [*store.keys[:-1], *store.values[:-1]]
    assert all(buffer is not None for buffer in used)
    return store, lambda: torch.stack([b[:, :, :slots] for b in [*store.keys[:-1], *store.values[:-1]] if b is not None])


def test_reserve_doubles_keeps_the_content_and_stops_at_the_limit() -> None:
    store, read = filled()
    before, capacities = read(), [store.capacity]
    for slots in range(1, 601):
        store.reserve(slots)
        assert store.capacity >= slots
        assert store.trash == store.capacity
        assert all(b is None or b.shape[2] == store.capacity + 1 for b in (*store.keys, *store.values))
        if store.capacity != capacities[-1]:
            capacities.append(store.capacity)
    assert capacities == [64, 128, 256, 512, 600]
    assert torch.equal(read(), before)
    with pytest.raises(ValueError, match="made for 600 slots a row, 601 are needed"):
        store.reserve(601)


def test_move_copies_slots_of_one_row_in_every_layer() -> None:
    """Sources and targets overlap: a slot is read before it is overwritten."""
    store, read = filled()
    before = read()
    store.move(1, [7, 9, 10, 16], range(8, 12))
    expected = before.clone()
    expected[:, 1, :, 8:12] = before[:, 1][:, :, [7, 9, 10, 16]]
    assert torch.equal(read(), expected)
    store.move(0, [3, 4], [3, 4])
    store.move(0, [], [])
    assert torch.equal(read(), expected)


@pytest.mark.parametrize("dense", [True, False])
def test_a_view_writes_to_its_slots_and_returns_what_may_be_seen(dense: bool) -> None:
    store, read = filled(rows=3)
    before = read()
    slots = torch.tensor([[4, 5], [4, 5]]) if dense else torch.tensor([[4, 9], [2, 3]])
    valid = None if dense else torch.tensor([[True, True], [True, False]])
    view = store.view(Pass(slots, slots, valid, slice(1, 3), 12, 4 if dense else None))
    new = torch.randn(2, 2, 2, 2, 4)
    keys, values = view.update(new[0], new[1], 0)
    expected = before.clone()
    for row, column in itertools.product(range(2), range(2)):
        if valid is None or valid[row, column]:
            expected[[0, 2], row + 1, :, slots[row, column]] = new[:, row, :, column]
    assert torch.equal(read(), expected)
    assert torch.equal(keys, expected[0, 1:3, :, :12])
    assert torch.equal(values, expected[2, 1:3, :, :12])


def test_check_sees_a_wrong_entry_a_missing_layer_and_a_short_reference() -> None:
    store, _ = filled()
    twin, _ = filled()
    store.check(twin, 1, 1)
    store.length[1] = 19
    keys = store.keys[1]
    assert keys is not None
    keys[1, 0, 19, 2] += 1
    store.check(twin, 1, 1)  # slot 19 is scratch now
    keys[1, 0, 18, 2] += 1
    with pytest.raises(AssertionError, match="layer 1 keys of row 1 differ"):
        store.check(twin, 1, 1)
    store.check(twin, 0)
    twin.length[0] = 3
    with pytest.raises(AssertionError, match="shorter"):
        store.check(twin, 0)
    twin.length[0], twin.keys[0] = 20, None
    with pytest.raises(AssertionError, match="one side only"):
        store.check(twin, 0)


def ragged(tokens: int, temperature: float = 0.0, lengths: tuple[int, ...] = (5, 11, 3)) -> list[Request]:
    return [
        Request(prompt(length, length), tokens + 3 * row, sampling=Sampling(temperature, seed=row))
        for row, length in enumerate(lengths)
    ]


def peeking(method: Method, runner: ModelRunner, requests: list[Request]) -> Method:
    """The method; a tree drafter gets to see the true texts, so that its deep paths are accepted."""
    if not isinstance(method, Trees):
        return method
    texts, _, _ = decode(Autoregressive(), runner, requests)
    paths = tuple(reference(request.prompt, text) for request, text in zip(requests, texts, strict=True))
    return replace(method, references=paths)


METHODS: list[Method] = [
    Autoregressive(),
    EarlyExit(exit_layer=2),
    LayerSkip(exit_layer=2, num_speculative_tokens=4),
    LayerSkip(exit_layer=1, num_speculative_tokens=3, reuse_cache=False, confidence_threshold="adaptive"),
    Trees(nodes=9, peeking=0.4),
    SelfSpeculative((1,), (2,), num_speculative_tokens=4),
    Swift(0.5, 4, context_window=4),
]


@pairwise(
    lengths=[pytest.param((6,), id="one row"), pytest.param((5, 11, 3), id="three rows")],
    method=[pytest.param(method, id=method.name) for method in METHODS],
    temperature=[0.0, 1.0],
)
def test_the_store_holds_what_a_fresh_forward_gives_after_every_commit(
    method: Method, lengths: tuple[int, ...], temperature: float
) -> None:
    """Through Session.check, on a sliding-window model: rows accept different numbers of tokens and end at different times."""
    runner, requests = ModelRunner(mistral(window=6)), ragged(12, temperature, lengths)
    _, figures, steps = decode(peeking(method, runner, requests), runner, requests, check=True)
    if method.name in ("layerskip", "trees"):
        assert figures.accepted > 0
        assert any("recovered" in origin for step in steps for origin in step.origin)
    if method.name == "layerskip" and len(lengths) > 1:
        assert any(len(set(step.accepted)) > 1 for step in steps), "no step accepted different numbers"


@torch.inference_mode()
def poison(store: KVCache, dice: torch.Generator) -> None:
    """NaN in the trash, large numbers in every slot that holds nothing committed."""
    for buffer in (*store.keys, *store.values):
        if buffer is not None:
            buffer[:, :, store.trash] = float("nan")
            for row, length in enumerate(store.length):
                free = buffer[row, :, length : store.trash]
                free.copy_(1e3 * torch.randn(free.shape, generator=dice))


@pairwise(
    build=[pytest.param(llama, id="llama"), pytest.param(lambda: mistral(window=5), id="mistral")],
    method=[pytest.param(method, id=method.name) for method in (METHODS[0], METHODS[2], *METHODS[4:])],
    temperature=[0.0, 1.0],
)
def test_stale_slots_and_the_trash_are_never_read(build: Any, method: Method, temperature: float) -> None:
    runner, requests = ModelRunner(build()), ragged(10, temperature)
    method = peeking(method, runner, requests)
    expected, _, _ = decode(method, runner, requests)
    generator = torch.Generator().manual_seed(0)
    decoder = start(method, runner, requests, chunk=3)
    texts: list[list[int]] = [[], [], []]
    while decoder.busy:
        poison(decoder.session.store, generator)
        for row, tokens in enumerate(decoder.step().tokens):
            texts[row] += tokens
    assert texts == expected


@pytest.mark.usefixtures("eager_engine")
@pytest.mark.parametrize("method", slow_except((METHODS[2],), METHODS), ids=lambda method: method.name)
def test_memory_is_one_cache_of_full_length_plus_scratch(method: Method) -> None:
    """2 buffers x layers x rows x (capacity + scratch + the trash) x kv_heads x head_dim x 4 bytes, and never more."""
    runner = ModelRunner(llama())
    requests = ragged(90)
    capacity = max(len(request.prompt) + request.max_new_tokens for request in requests)
    decoder = start(method, runner, requests)
    scratch = method.nodes if isinstance(method, Trees) else 4 * 10 if isinstance(method, Swift) else 0
    config: Any = runner.config
    token = 2 * decoder.session.store.layers * config.num_key_value_heads * config.head_dim * 4
    most = 0
    while decoder.busy:
        decoder.step()
        most = max(most, decoder.session.store.bytes())
    assert 0 < most <= len(requests) * (capacity + scratch + 1) * token


class Largest(TorchDispatchMode):
    """The most entries that any operator's result holds in memory of its own: views of what it was given do not count."""

    def __init__(self) -> None:
        super().__init__()
        self.entries, self.operator = 0, ""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        given = {leaf.untyped_storage().data_ptr() for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)}
        for leaf in tree_leaves(out):
            if isinstance(leaf, Tensor) and leaf.untyped_storage().data_ptr() not in given and leaf.numel() > self.entries:
                self.entries, self.operator = leaf.numel(), str(func)
        return out


def addresses(store: KVCache) -> list[int]:
    return [buffer.data_ptr() for buffer in (*store.keys, *store.values) if buffer is not None]


@pytest.mark.parametrize("method", slow_except((METHODS[0], METHODS[2], METHODS[-1]), METHODS), ids=lambda method: method.name)
def test_no_step_copies_a_cache(method: Method) -> None:
    """After a long prompt, nothing that a step makes is as large as the keys of one layer and row."""
    torch.manual_seed(0)
    config = small(LlamaConfig, vocab=97, hidden=256, layers=4)
    runner = ModelRunner(sharpened(LlamaForCausalLM(config), 2))
    request = Request(prompt(300), 12)
    decoder = start(peeking(method, runner, [request]), runner, [request])
    decoder.step()
    before = addresses(decoder.session.store)
    with Largest() as largest:
        while decoder.busy:
            decoder.step()
    assert 0 < largest.entries < 2 * 300 * 64, largest.operator
    assert addresses(decoder.session.store) == before


def a_drafts_store_is_right() -> None:
    test_the_store_holds_what_a_fresh_forward_gives_after_every_commit(METHODS[2], (4, 17, 9), 0.0)


@planted.found_by(
    (planted.one_draft_too_many, a_drafts_store_is_right), (planted.rejected_drafts_kept, a_drafts_store_is_right)
)
def test_planted_bugs_are_found(plant: Any, proof: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    planted.assert_found(plant, proof, monkeypatch)
