"""Attention for many cached keys and few queries, which replaces transformers' sdpa while skipstone runs layers.

With grouped key/value heads and a mask, transformers' sdpa copies every cached key and value once per query head and pass. Here
the queries of a group become more rows of one head, so that nothing is copied. The mask has that layout.

On a GPU torch's kernel for float32 with a mask takes up to eleven times as long as two products and a softmax
(docs/lab/performance.md). So a compiled graph uses the latter.
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

NAME = "skipstone"  # of `attend` in transformers' AttentionInterface


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
    if attention_mask is None:  # transformers' own call, so that plain decoding rounds alike
        causal, grouped = width > 1, groups > 1
        output = F.scaled_dot_product_attention(query, key, value, is_causal=causal, scale=scaling, enable_gqa=grouped)
    else:
        packed = query.reshape(rows, key.shape[1], groups * width, size)
        if is_faster_unfused(query):
            output = unfused(packed, key, value, attention_mask, scaling)
        else:
            output = F.scaled_dot_product_attention(packed, key, value, attn_mask=attention_mask, scale=scaling)
        output = output.reshape(rows, heads, width, value.shape[3])
    return output.transpose(1, 2).contiguous(), None


def unfused(query: Tensor, key: Tensor, value: Tensor, mask: Tensor, scaling: float | None) -> Tensor:
    """Attention by two products and a softmax, float32. query: [b, heads, n, d]. key, value: [b, heads, extent, d]. mask:
    [b, 1, n, extent], bool (True attends) or added. Returns [b, heads, n, d]."""
    scores = query @ key.transpose(2, 3) * (query.shape[3] ** -0.5 if scaling is None else scaling)  # [b, heads, n, extent]
    scores = scores.masked_fill(~mask, -torch.inf) if mask.dtype == torch.bool else scores + mask
    return scores.softmax(-1) @ value


def is_faster_unfused(query: Tensor) -> bool:
    """Whether `unfused` is faster: in a graph compiled for a GPU, in float32."""
    return query.is_cuda and query.dtype == torch.float32 and torch.compiler.is_compiling()
