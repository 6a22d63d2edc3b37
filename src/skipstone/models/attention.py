"""Attention for many cached keys and few queries, in the place of transformers' sdpa while skipstone runs the layers.

With grouped key/value heads and a mask, transformers' sdpa copies every cached key and value once per query head and pass.
Here the queries of a group are laid out as more rows of one head instead, so nothing is copied; the mask comes in that layout.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch.nn.functional as F
from torch import Tensor, nn
from transformers.masking_utils import AttentionMaskInterface, sdpa_mask
from transformers.modeling_utils import AttentionInterface

NAME = "skipstone"


def attend(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """softmax(q k^T * scaling + mask) v.

    query: [b, heads, n, d]. key, value: [b, kv_heads, extent, d]. attention_mask: [b, 1, groups * n, extent], row g * n + i for
    query i of group member g; None for one query that sees everything, or for a causal pass from the first token on.
    Returns ([b, n, heads, d], None).
    """
    assert kwargs.get("softcap") is None, "soft-capped attention needs the eager implementation"
    rows, heads, width, size = query.shape
    groups = heads // key.shape[1]
    if attention_mask is not None and attention_mask.shape[2] != groups * width:  # transformers' own, from another thread
        attention_mask = attention_mask.repeat(1, 1, groups, 1)
    if attention_mask is None:  # the very call that transformers makes, so that plain decoding rounds alike
        causal, grouped = width > 1, groups > 1
        output = F.scaled_dot_product_attention(query, key, value, is_causal=causal, scale=scaling, enable_gqa=grouped)
    elif groups == 1:
        output = F.scaled_dot_product_attention(query, key, value, attn_mask=attention_mask, scale=scaling)
    else:
        packed = query.reshape(rows, key.shape[1], groups * width, size)
        output = F.scaled_dot_product_attention(packed, key, value, attn_mask=attention_mask, scale=scaling)
        output = output.reshape(rows, heads, width, value.shape[3])
    return output.transpose(1, 2), None


def implementation(config: Any) -> str:
    """The attention a model was loaded with, also while another thread runs it with `attend`."""
    name = config._attn_implementation
    return "sdpa" if name == NAME else name


_lock = threading.Lock()
_users: dict[int, tuple[int, str]] = {}  # id of a config -> (passes under way, the name to put back)


@contextmanager
def in_use(config: Any) -> Iterator[None]:
    """Let the layers that look at `config` use `attend`. Threads may overlap: the last one to leave puts the name back."""
    settings, key = config.__dict__, id(config)
    with _lock:
        count, previous = _users.get(key, (0, settings["_attn_implementation_internal"]))
        _users[key] = count + 1, previous
        settings["_attn_implementation_internal"] = NAME
    try:
        yield
    finally:
        with _lock:
            count, previous = _users.pop(key)
            if count > 1:
                _users[key] = count - 1, previous
            else:
                settings["_attn_implementation_internal"] = previous


# The mask function is never asked while skipstone runs the layers; without one transformers would silently drop masks should
# anybody else see the name.
AttentionInterface.register(NAME, attend)
AttentionMaskInterface.register(NAME, sdpa_mask)
