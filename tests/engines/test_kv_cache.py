"""The KV cache: slots that entries go to, and that growth, moves and the trash lose or leak nothing."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from skipstone import Autoregressive, EarlyExit, LayerSkip, Method, Request, Sampling, SelfSpeculative, Swift
from skipstone.engines.kv_cache import KVCache
from skipstone.engines.model_runner import ModelRunner
from skipstone.models.passes import Pass
from tests.helpers import planted
from tests.helpers.machine import decode, llama, mistral, prompt, start
from tests.helpers.pairwise import pairwise, slow_except
from tests.helpers.trees import Trees, reference


def filled() -> KVCache:
    """A store with random numbers in the first 20 slots of two of three layers."""
    store, slots = KVCache(2, 3, 600), torch.arange(20).expand(2, -1)
    store.reserve(20)
    view = store.view(Pass(slots, slots, None, slice(0, 2), 20, 0))
    numbers = torch.randn(2, 2, 2, 2, 20, 4, generator=torch.Generator().manual_seed(0))
    for layer, (keys, values) in enumerate(numbers):
        view.update(keys, values, layer)
    store.length = [20, 20]
    return store


def test_check_sees_a_wrong_entry_a_missing_layer_and_a_short_reference() -> None:
    store, twin = filled(), filled()
    store.check(twin, 1, 1)
    store.length[1], keys = 19, store.keys[1]
    assert keys is not None
    keys[1, 0, 19, 2] += 1  # slot 19 is scratch now
    store.check(twin, 1, 1)
    keys[1, 0, 18, 2] += 1
    with pytest.raises(AssertionError, match="layer 1 keys of row 1 differ"):
        store.check(twin, 1, 1)
    store.check(twin, 0)
    for length, first, words in ((3, twin.keys[0], "shorter"), (20, None, "one side only")):
        twin.length[0], twin.keys[0] = length, first
        with pytest.raises(AssertionError, match=words):
            store.check(twin, 0)
    with pytest.raises(ValueError, match="made for 600 slots a row, 601 are needed"):
        store.reserve(601)


@pytest.mark.parametrize("dtype", [None, torch.bfloat16], ids=str)
def test_a_copied_prefix_is_the_other_rows_and_nothing_else_changes(dtype: torch.dtype | None) -> None:
    store, slots = KVCache(3, 2, 64, dtype), torch.arange(20).expand(3, -1)
    store.reserve(20)
    view = store.view(Pass(slots, slots, None, slice(0, 3), 20, 0))
    for layer, (keys, values) in enumerate(torch.randn(2, 2, 3, 2, 20, 4, generator=torch.Generator().manual_seed(0))):
        view.update(keys, values, layer)
    before = [buffer.clone() for buffer in (*store.keys, *store.values) if buffer is not None]
    store.copy(2, 0, 13)
    after = [buffer for buffer in (*store.keys, *store.values) if buffer is not None]
    for old, new in zip(before, after, strict=True):
        assert torch.equal(new[0, :, :13], old[2, :, :13])
        assert torch.equal(new[0, :, 13:], old[0, :, 13:])
        assert torch.equal(new[1:], old[1:])


def ragged(tokens: int, temperature: float = 0.0, lengths: tuple[int, ...] = (5, 11, 3)) -> list[Request]:
    samplings = [Sampling(temperature, seed=row) for row in range(len(lengths))]
    return [Request(prompt(n, n), tokens + 3 * row, sampling=samplings[row]) for row, n in enumerate(lengths)]


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
    """2 buffers x layers x rows x (capacity + scratch + the trash) x kv_heads x head_dim x 4 bytes; less for short texts."""
    runner, requests = ModelRunner(llama()), ragged(90)
    capacity = max(len(request.prompt) + request.max_new_tokens for request in requests)
    decoder = start(method, runner, requests)
    scratch = method.nodes if isinstance(method, Trees) else 4 + 3 * 2 + 9 if isinstance(method, Swift) else 0
    config: Any = runner.config
    token = 2 * decoder.session.store.layers * config.num_key_value_heads * config.head_dim * 4
    sizes = []
    while decoder.busy:
        decoder.step()
        sizes.append(decoder.session.store.bytes())
    assert 0 < sizes[0] <= len(requests) * (64 + scratch + 1) * token, "a text that ends early never pays for its limit"
    assert sizes[0] < max(sizes) <= len(requests) * (capacity + scratch + 1) * token


class Largest(TorchDispatchMode):
    """The largest number of entries of an operator's result in memory of its own: views of arguments do not count."""

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


@pytest.mark.parametrize("method", slow_except((METHODS[0], METHODS[2], METHODS[-1]), METHODS), ids=lambda method: method.name)
def test_no_step_copies_a_cache(method: Method) -> None:
    runner, request = ModelRunner(llama(hidden=256)), Request(prompt(300), 12)
    decoder = start(peeking(method, runner, [request]), runner, [request])
    decoder.step()

    def addresses() -> list[int]:
        store = decoder.session.store
        return [buffer.data_ptr() for buffer in (*store.keys, *store.values) if buffer is not None]

    before = addresses()
    with Largest() as largest:
        while decoder.busy:
            decoder.step()
    assert 0 < largest.entries < 2 * 300 * 64, largest.operator
    assert addresses() == before


def a_drafts_store_is_right() -> None:
    test_the_store_holds_what_a_fresh_forward_gives_after_every_commit(METHODS[2], (4, 17, 9), 0.0)


@planted.found_by(
    (planted.one_draft_too_many, a_drafts_store_is_right), (planted.rejected_drafts_kept, a_drafts_store_is_right)
)
def test_planted_bugs_are_found(plant: Any, proof: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    planted.assert_found(plant, proof, monkeypatch)
