"""The chunked losses never hold all logits. tests/train/layerskip/test_objective.py compares them with the formulas."""

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from skipstone.train.data.rows import IGNORED
from skipstone.train.layerskip.objective import cross_entropy, divergence

N, WIDTH, VOCAB = 23, 6, 11


class Head(nn.Module):
    """A norm, a sharp matrix and a soft cap; remembers how many positions it was given."""

    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(0)
        self.norm, self.dropout = nn.LayerNorm(WIDTH, dtype=torch.float64), nn.Dropout(dropout)
        self.weight = nn.Parameter(3 * torch.randn(VOCAB, WIDTH, generator=generator, dtype=torch.float64))
        self.given: list[int] = []

    def forward(self, hidden: Tensor) -> Tensor:
        self.given.append(len(hidden))
        return 8 * (self.dropout(self.norm(hidden)) @ self.weight.T / 8).tanh()


def case() -> tuple[Head, Tensor, Tensor, Tensor]:
    """(head, hidden [N, d], last [N, d], targets [N] of which some are ignored)."""
    generator = torch.Generator().manual_seed(1)
    hidden, last = torch.randn(2, N, WIDTH, generator=generator, dtype=torch.float64)
    targets = torch.randint(VOCAB, (N,), generator=generator)
    targets[[0, 8, 9, 22]] = IGNORED
    return Head(), hidden.requires_grad_(), last.requires_grad_(), targets


def gradients(loss: Tensor, head: Head, *inputs: Tensor) -> list[Tensor]:
    return list(torch.autograd.grad(loss, [*inputs, *head.parameters()]))


@pytest.mark.parametrize("kind", ["cross-entropy", "divergence"])
def test_only_one_chunk_of_logits_exists_at_once_and_none_is_kept_for_the_gradient(kind: str) -> None:
    head, hidden, last, targets = case()
    kept: list[torch.Size] = []

    def keep(tensor: Tensor) -> Tensor:
        kept.append(tensor.shape)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        loss = (
            cross_entropy(head, hidden, targets, 7) if kind == "cross-entropy" else divergence(head, hidden, last, targets, 7)
        )
    assert [shape for shape in kept if shape[-1:] == (VOCAB,)] == [], "logits were kept"
    heads = 1 if kind == "cross-entropy" else 2
    assert sorted(head.given) == sorted(heads * [7, 7, 7, 2])
    loss.backward()
    assert sorted(head.given) == sorted(2 * heads * [7, 7, 7, 2]), "once for the loss, once more for its gradient"


def test_without_anything_to_predict_the_loss_is_zero_and_has_a_gradient() -> None:
    head, hidden, last, targets = case()
    for loss in (
        cross_entropy(head, hidden, torch.full_like(targets, IGNORED), 5),
        divergence(head, hidden, last, torch.full_like(targets, IGNORED), 5),
        cross_entropy(head, hidden[:0], targets[:0], 5),
    ):
        assert loss.item() == 0
        assert all(gradient.abs().max() == 0 for gradient in gradients(loss, head, hidden))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_logits_of_low_precision_are_summed_up_in_float32(dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(0)
    weight = torch.randn(64, WIDTH, generator=generator).to(dtype)
    hidden, last = torch.randn(2, 300, WIDTH, generator=generator).to(dtype)
    targets = torch.randint(64, (300,), generator=generator)
    logits, teacher = (hidden @ weight.T).double(), (last @ weight.T).double()

    def head(states: Tensor) -> Tensor:
        return states @ weight.T

    for loss, expected in (
        (cross_entropy(head, hidden, targets, 100), F.cross_entropy(logits, targets, reduction="sum")),
        (
            divergence(head, hidden, last, targets, 100),
            F.kl_div(logits.log_softmax(-1), teacher.log_softmax(-1), log_target=True, reduction="sum"),
        ),
    ):
        assert loss.dtype == torch.float32
        assert loss.item() == pytest.approx(expected.item(), rel=1e-5)


def test_a_head_with_dropout_is_differentiated_with_the_draws_of_its_loss() -> None:
    head, hidden, _, targets = case()
    head.dropout.p = 0.5
    torch.manual_seed(3)
    loss = cross_entropy(head, hidden, targets, 7)
    torch.manual_seed(3)
    parts = zip(hidden.split(7), targets.split(7), strict=True)
    reference = torch.stack([F.cross_entropy(head(x), y, ignore_index=IGNORED, reduction="sum") for x, y in parts]).sum()
    torch.testing.assert_close(loss, reference)
    torch.testing.assert_close(gradients(loss, head, hidden), gradients(reference, head, hidden))
