"""Muon for the matrices of the layers, AdamW for everything else, as one optimiser.

Muon (Jordan et al., 2024; torch.optim.Muon) orthogonalises the momentum of a matrix. It is meant for hidden weights:
embeddings, heads, norms and biases stay with AdamW, and so do stacked experts (three dimensions), which torch's does not take.
"""

from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from skipstone.models.modules import DecoderModules


class Together(Optimizer):
    """Optimisers over disjoint parameters that step as one. Their groups are this optimiser's groups, so that a scheduler
    drives all of them."""

    def __init__(self, *parts: Optimizer) -> None:
        groups = [group for part in parts for group in part.param_groups]
        super().__init__([{"params": group["params"]} for group in groups], {})
        self.parts = parts
        self._share()

    def _share(self) -> None:
        self.param_groups = [group for part in self.parts for group in part.param_groups]

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        if closure is not None:
            raise ValueError("step takes no closure: compute the loss and its gradients first")
        for part in self.parts:
            part.step()

    def zero_grad(self, set_to_none: bool = True) -> None:
        for part in self.parts:
            part.zero_grad(set_to_none)

    def state_dict(self) -> dict[str, Any]:
        return {"parts": [part.state_dict() for part in self.parts]}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """ValueError for the state of another set of optimisers."""
        if len(state_dict.get("parts", ())) != len(self.parts):
            raise ValueError(
                "the saved optimiser state is not that of Muon with AdamW: was the run started with another optimiser?"
            )
        for part, state in zip(self.parts, state_dict["parts"], strict=True):
            part.load_state_dict(state)
        self._share()


def muon_with_adamw(
    model: nn.Module, muon_rate: float, rate: float, betas: tuple[float, float], decay: float, epsilon: float = 1e-8
) -> Together:
    """muon_rate: learning rate of the layers' matrices, on Muon's own scale (.02). rate, betas, epsilon: AdamW's, for the rest.
    decay: weight decay of both; vectors have none. ValueError where torch is too old to have Muon, or nothing is for Muon."""
    if not hasattr(torch.optim, "Muon"):
        raise ValueError(f"muon_learning_rate needs torch.optim.Muon, which torch {torch.__version__} does not have (2.9 does)")
    inside = {id(p) for layer in DecoderModules(model).layers for p in layer.parameters()}
    trained = [p for p in model.parameters() if p.requires_grad]
    matrices = [p for p in trained if id(p) in inside and p.ndim == 2]
    if not matrices:
        raise ValueError("muon_learning_rate is set, but no matrix inside the layers is trained: leave it out")
    muon = torch.optim.Muon(matrices, lr=muon_rate, weight_decay=decay)
    taken = {id(p) for p in matrices}
    rest = [p for p in trained if id(p) not in taken]
    groups = [
        {"params": [p for p in rest if p.ndim > 1], "weight_decay": decay},
        {"params": [p for p in rest if p.ndim <= 1], "weight_decay": 0.0},
    ]
    groups = [group for group in groups if group["params"]]  # none where only adapters of the layers are trained
    return Together(muon, torch.optim.AdamW(groups, lr=rate, betas=betas, eps=epsilon)) if groups else Together(muon)
