"""Offline evaluation of drafters: replays committed tokens through a part of the target (teacher forcing)."""

from collections.abc import Sequence

import torch
from torch import Tensor

from skipstone.engines.host_transfer import on_device
from skipstone.engines.kv_cache import KVCache
from skipstone.engines.model_runner import ModelRunner
from skipstone.models.passes import Pass, SkipSet, Tree


def replay_hidden_states(
    store: KVCache, row: int, tokens: Sequence[int], model: ModelRunner, layers: int, skip: SkipSet | None
) -> Tensor:
    """Hidden states [1, n, d] after the last n committed tokens of a row in the cache (SWIFT, Eq. 3).

    One pass of the first `layers` layers of a model, without the sublayers in `skip`. It reads the target's keys and values
    before these tokens, and writes its own after all committed slots."""
    end, width, device = store.length[row], len(tokens), model.device
    store.reserve(end + width)
    positions = torch.arange(end - width, end, device=device, dtype=torch.int64)[None]  # [1, n]
    below = torch.ones((1, width, width), dtype=torch.bool, device=device).tril()
    tree = Tree(on_device([end], device), below, positions, seen=on_device([end - width], device))
    at = Pass(positions, positions + width, None, slice(row, row + 1), end + width, end, tree)
    hidden = model.embed(on_device([list(tokens)], device), positions)
    return model.run(hidden, at, store, range(layers), skip)
