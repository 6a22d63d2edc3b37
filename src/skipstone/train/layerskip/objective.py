"""LayerSkip's objective: while it is installed, the model's forward drops rows layer by layer and returns the early-exit loss
(arXiv 2404.16710, section 4.1.2).

The forward is replaced on the instance, so wrappers (DDP, FSDP, autocast, PEFT) see one forward that contains the whole loss.
The loss is computed one exit and one chunk of positions at a time: the logits of all exits never exist together.
"""

import functools
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.checkpoint import checkpoint
from transformers import PreTrainedModel
from transformers.modeling_outputs import CausalLMOutput

from skipstone.engines.eager.patches import is_plain
from skipstone.models.decoder_model import DecoderModel
from skipstone.train.data.rows import IGNORED, shifted
from skipstone.train.layerskip.dropout import BatchLayout, forwards_replaced, kept_elsewhere, kept_rows, layers_recorded
from skipstone.train.layerskip.schedules import LayerSkipRecipe

CHUNK = 4096  # positions whose logits exist at once

Head = Callable[[Tensor], Tensor]
"""g(.): states [N, d] -> logits [N, V], final norm and what the family does to logits included."""
Parts = tuple[Tensor, dict[str, Tensor]]  # a loss, and its parts for the log


class LayerSkipObjective:
    """LayerSkip's loss for one model. Set `step` and `micro` before every forward: the optimiser step, and the number of the
    forward pass in the run (they differ under gradient accumulation). `elsewhere`: for a run that resumes with another layout
    of rows: the layout it started with, the present one, and the number of this process.

    steps: T of the whole run. seed: of the layer dropout. chunk: positions whose logits exist at once. teacher: a frozen model
    of the same vocabulary whose distribution replaces the labels (distillation). shortlist: [S] int64, the tokens over which
    the teacher's distribution, or the last layer's with `kl_weight`, is learnt; None for all. ValueError for a model or a run
    that the recipe does not cover.
    """

    def __init__(
        self,
        model: PreTrainedModel | DecoderModel,
        recipe: LayerSkipRecipe,
        steps: int,
        seed: int,
        chunk: int = CHUNK,
        teacher: Any = None,
        shortlist: Tensor | None = None,
    ) -> None:
        self.modules = model if isinstance(model, DecoderModel) else DecoderModel(model)
        self.recipe, self.steps, self.seed, self.chunk = recipe, steps, seed, chunk
        self.teacher = None if teacher is None else DecoderModel(teacher)
        self.shortlist = shortlist
        self.layers = len(self.modules.layers)
        recipe.check(self.layers, steps)
        if shortlist is not None and teacher is None and recipe.exits.kl_weight is None:
            raise ValueError("a shortlist has no effect on a loss against labels: give a teacher, or kl_weight")
        config = self.modules.model.config
        if getattr(config, "output_router_logits", False):
            raise ValueError("LayerSkip's loss carries no router loss: set output_router_logits=False in the model's config")
        if rate := getattr(config, "layerdrop", 0):
            raise ValueError(f"the model drops layers by itself (layerdrop={rate}): set layerdrop=0 in the model's config")
        if recipe.dropout.p_max and self.modules.family.shares:
            kind = config.model_type
            raise ValueError(f"layers of this {kind} model read keys and values of other layers: drop no rows (p_max=0)")
        self.step = self.micro = 0
        self.elsewhere: tuple[BatchLayout, BatchLayout, int] | None = None
        self.parts: dict[str, Tensor] = {}

    def installed(self) -> AbstractContextManager[None]:
        """Let the model's forward return LayerSkip's loss, in training mode and with labels, until the block ends."""
        return forwards_replaced([self.modules.model], self._switch)

    def _switch(self, _: int, plain: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(plain)  # keeps the model's own signature
        def forward(*args: Any, **kwargs: Any) -> Any:
            if kwargs.get("labels") is None or not self.modules.model.training:
                return plain(*args, **kwargs)
            return CausalLMOutput(loss=self.loss(*args, **kwargs))

        return forward

    def loss(
        self,
        input_ids: Tensor,
        attention_mask: Tensor | None = None,
        *,
        labels: Tensor,
        num_items_in_batch: Tensor | int | None = None,
        **kwargs: Any,
    ) -> Tensor:
        """J(X, Y, t), eq. 5: a mean over `num_items_in_batch` predicted tokens, those of this batch by default; 0 where there
        are none. input_ids, attention_mask, labels: [B, T]; labels are IGNORED where nothing is predicted."""
        inputs = {**kwargs, "input_ids": input_ids, "attention_mask": attention_mask, "use_cache": False}
        rates = self.recipe.dropout.rates(self.step, self.layers, self.steps)
        kept, joining = self._kept(input_ids.shape[0], rates)
        active = self.recipe.exits.active(self.step, self.layers, self.steps)
        with layers_recorded(self.modules.layers, active, kept, joining) as states:
            self.modules.decoder(**inputs)
        targets = shifted(labels).flatten()  # [B * T]
        predicted = (targets != IGNORED).nonzero().squeeze(1)  # [N], positions that predict something
        targets = targets[predicted]  # [N]
        taught = None  # [N, d'] input of the teacher's LM head
        if self.teacher is not None:
            with torch.no_grad():
                taught = self.teacher.decoder(**inputs).last_hidden_state.flatten(0, 1)[predicted]
        folded = self.modules.family.folded
        flat = {layer: folded(state).flatten(0, 1)[predicted] for layer, state in states.items()}  # [N, d] each
        combine = self._towards_labels if self.recipe.exits.kl_weight is None else self._towards_last
        total, parts = combine(flat, targets, taught)
        count = max(1, len(targets)) if num_items_in_batch is None else num_items_in_batch
        self.parts = {name: part.detach() / count for name, part in parts.items()}
        return total / count

    def _kept(self, rows: int, rates: list[float]) -> tuple[list[list[int]], list[bool] | None]:
        """The rows of a forward pass that every layer keeps, and the layers that need gradients without rows here."""

        def draw(count: int, number: int) -> list[list[int]]:
            kept = kept_rows(count, rates, self.seed, number)
            if self.recipe.dropout.by_layer == "constant":
                kept[0] = kept[0] or [0]  # `layers_recorded` wants a row of the first layer
            return kept

        if self.elsewhere is None:
            return draw(rows, self.micro), None
        started, now, process = self.elsewhere
        return kept_elsewhere(started, now, process, self.step, self.micro - self.step * now.passes, draw, rows)

    def _towards_labels(self, states: dict[int, Tensor], targets: Tensor, taught: Tensor | None) -> Parts:
        """The paper's loss: sum of e~(t, l) CE over the active exits, summed over tokens."""
        weights = self.recipe.exits.weights(self.step, self.layers, self.steps)
        losses = {layer: self._loss_of(states[layer], targets, taught) for layer in states if weights[layer]}
        last = self.layers - 1
        total = torch.stack([weights[layer] * loss for layer, loss in losses.items()]).sum()
        return total, {"loss_last_layer": losses[last]} if last in losses else {}

    def _towards_last(self, states: dict[int, Tensor], targets: Tensor, taught: Tensor | None) -> Parts:
        """Ours: the loss of the last layer + kl_weight x the mean divergence of the active exits from it, summed."""
        last = states.pop(self.layers - 1)
        total = self._loss_of(last, targets, taught)
        apart = [divergence(self._logits, state, last, targets, self.chunk) for state in states.values()]
        if not apart:
            return total, {"loss_last_layer": total}
        mean = torch.stack(apart).mean()
        return total + (self.recipe.exits.kl_weight or 0.0) * mean, {"loss_last_layer": total, "divergence": mean}

    def _loss_of(self, hidden: Tensor, targets: Tensor, taught: Tensor | None) -> Tensor:
        """The loss of states [N, d], summed over tokens: cross-entropy, or divergence from the teacher if there is one."""
        if self.teacher is None or taught is None:
            return cross_entropy(self.modules.logits, hidden, targets, self.chunk)
        return divergence(self._logits, hidden, taught, targets, self.chunk, over(self.teacher, self.shortlist))

    def _logits(self, hidden: Tensor) -> Tensor:
        """g(.) over the shortlist, for a comparison of distributions: [N, d] -> [N, S]."""
        return over(self.modules, self.shortlist)(self.modules.normed(hidden))


def over(modules: DecoderModel, shortlist: Tensor | None) -> Head:
    """The LM head over some token ids alone, [S] int64; None for all: states after the final norm [N, d'] -> logits [N, S]."""
    if shortlist is None:
        return modules.project
    head, kept = modules.head, shortlist
    if not is_plain(head):
        return lambda normed: modules.project(normed)[..., kept]

    def project(normed: Tensor) -> Tensor:
        bias = None if head.bias is None else head.bias[kept]
        return modules.family.scored(F.linear(normed, head.weight[kept], bias), modules.config)

    return project


def cross_entropy(head: Head, hidden: Tensor, targets: Tensor, chunk: int = CHUNK) -> Tensor:
    """Sum of CE(g(hidden), targets) over the targets that are not IGNORED, float32 or wider. hidden: [N, d]. targets: [N]."""

    def loss(states: Tensor, wanted: Tensor) -> Tensor:
        return F.cross_entropy(_logits(head, states), wanted, ignore_index=IGNORED, reduction="sum")

    return _summed(loss, chunk, hidden, targets)


def divergence(
    head: Head, hidden: Tensor, last: Tensor, targets: Tensor, chunk: int = CHUNK, teacher: Head | None = None
) -> Tensor:
    """Sum of KL(g(last) || g(hidden)) over targets that are not IGNORED, float32 or wider. last: [N, d'], the teacher's states,
    without gradient. teacher: g(.) of the teacher if it is another model."""

    def loss(states: Tensor, top: Tensor, wanted: Tensor) -> Tensor:
        with torch.no_grad():
            taught = _logits(teacher or head, top).log_softmax(-1)
        each = F.kl_div(_logits(head, states).log_softmax(-1), taught, reduction="none", log_target=True).sum(-1)
        return (each * (wanted != IGNORED)).sum()

    return _summed(loss, chunk, hidden, last, targets)


def _summed(loss: Callable[..., Tensor], chunk: int, *tensors: Tensor) -> Tensor:
    """Sum a loss over chunks of positions. Logits are computed again for the gradient, with the same random draws (a LoRA
    adapter of the head may have dropout)."""
    parts = zip(*(tensor.split(chunk) for tensor in tensors), strict=True)
    return torch.stack([checkpoint(loss, *part, use_reentrant=False) for part in parts]).sum()


def _logits(head: Head, hidden: Tensor) -> Tensor:
    logits = head(hidden)
    return logits.to(torch.promote_types(logits.dtype, torch.float32))
