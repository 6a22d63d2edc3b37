"""The early-exit loss (arXiv 2404.16710, section 4.1.2): one exit at a time, a chunk of positions at a time, so that the logits
of all exits and positions never exist together."""

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from skipstone.train.labels import IGNORED

CHUNK = 4096  # positions whose logits exist at once

Head = Callable[[Tensor], Tensor]
"""g(.): states [N, d] -> logits [N, V], final norm and what the family does to logits included."""


def cross_entropy(head: Head, hidden: Tensor, targets: Tensor, chunk: int = CHUNK) -> Tensor:
    """Sum of CE(g(hidden), targets) over the targets that are not IGNORED, float32 or wider. hidden: [N, d]. targets: [N]."""
    parts = zip(hidden.split(chunk), targets.split(chunk), strict=True)
    return torch.stack([_recomputed(_cross_entropy, head, states, own) for states, own in parts]).sum()


def divergence(
    head: Head, hidden: Tensor, last: Tensor, targets: Tensor, chunk: int = CHUNK, teacher: Head | None = None
) -> Tensor:
    """Sum of KL(g(last) || g(hidden)) where targets are not IGNORED, float32 or wider. last, [N, d'], the teacher's, gets no
    gradient; teacher: its g(.), where it is another model."""
    own = head if teacher is None else teacher
    parts = zip(hidden.split(chunk), last.split(chunk), targets.split(chunk), strict=True)
    return torch.stack([_recomputed(_divergence, head, states, own, top, wanted) for states, top, wanted in parts]).sum()


def _recomputed(function: Callable[..., Tensor], *args: object) -> Tensor:
    """Run a chunk without keeping its logits: they are computed again for the gradient, with the same draws (a LoRA adapter of
    the head may have dropout)."""
    result = checkpoint(function, *args, use_reentrant=False)
    assert isinstance(result, Tensor)
    return result


def _logits(head: Head, hidden: Tensor) -> Tensor:
    logits = head(hidden)
    return logits.to(torch.promote_types(logits.dtype, torch.float32))


def _cross_entropy(head: Head, hidden: Tensor, targets: Tensor) -> Tensor:
    return F.cross_entropy(_logits(head, hidden), targets, ignore_index=IGNORED, reduction="sum")


def _divergence(head: Head, hidden: Tensor, own: Head, last: Tensor, targets: Tensor) -> Tensor:
    with torch.no_grad():
        teacher = _logits(own, last).log_softmax(-1)
    student = _logits(head, hidden).log_softmax(-1)
    each = F.kl_div(student, teacher, reduction="none", log_target=True).sum(-1)
    return (each * (targets != IGNORED)).sum()
