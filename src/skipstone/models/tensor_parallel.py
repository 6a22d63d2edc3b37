"""The processes that compute one model together (tensor parallelism), and what they have to agree on.

Every process decodes for itself: the same tokens follow from the same logits, which a sharded LM head gathers on all of them.
What follows from a clock would not be the same, and processes that run different passes wait for one another forever. So a
method reads its clock here and nowhere else.
"""

import time
from typing import Any

import torch
from torch.distributed.tensor import DTensor

MESH = "tp"  # what transformers calls the dimension of a device mesh that tensor parallelism shards over


class TensorParallelGroup:
    """The processes of one model. size: how many there are; 1 for a model that one process computes. mesh: their device mesh,
    None for one process."""

    def __init__(self, mesh: Any = None) -> None:
        self.mesh = mesh
        self.size: int = 1 if mesh is None else mesh.size()

    @classmethod
    def of(cls, model: Any) -> "TensorParallelGroup":
        """The processes that the weights of a model are sharded over."""
        return cls(next((one.device_mesh for one in model.parameters() if isinstance(one, DTensor)), None))

    @property
    def writes(self) -> bool:
        """Whether this process is the one that writes what all would write."""
        return self.mesh is None or self.mesh.get_local_rank() == 0

    def now(self) -> float:
        """This process's clock in seconds. Only what `since` makes of it may decide anything."""
        return time.perf_counter()

    def since(self, began: float) -> float:
        """Seconds since `now` said `began`, the same in all processes."""
        return self.agreed(time.perf_counter() - began)

    def agreed(self, value: float) -> float:
        """The first process's value. All processes must ask at the same place."""
        return float(self._told(value, torch.float64))

    def agreed_whole(self, value: int) -> int:
        """As `agreed`, of a whole number of up to 63 bits."""
        return int(self._told(value, torch.int64))

    def _told(self, value: float, dtype: torch.dtype) -> float:
        if self.size == 1:
            return value
        told = torch.tensor([value], dtype=dtype, device=self.mesh.device_type)
        torch.distributed.broadcast(told, group=self.mesh.get_group(), group_src=0)
        return told.item()


def cannot_share(config: Any, size: int) -> str | None:
    """Why so many processes cannot share a model, in one sentence; None where they can.

    Heads have to be divided only where transformers' plan shards the projections by heads: of fused ones it gathers the output.
    """
    plan = getattr(config, "base_model_tp_plan", None) or {}
    if not plan:
        return f"transformers has no plan for tensor parallelism of {config.model_type} models, found {size} processes"
    if reason := _sharded_wrongly(config):
        return f"{reason}: load it whole"
    heads = config.num_attention_heads
    key_heads = getattr(config, "num_key_value_heads", None) or heads
    by_heads = any(name.endswith(("q_proj", "k_proj", "query_key_value")) and how == "colwise" for name, how in plan.items())
    if not by_heads or (heads % size == 0 and key_heads % size == 0):
        return None
    return (
        f"tensor parallelism over {size} processes needs numbers of heads that {size} divides, found {heads} attention heads "
        f"and {key_heads} key/value heads: start as many processes as divide both"
    )


def _sharded_wrongly(config: Any) -> str | None:
    """Why transformers' plan for a model is known not to compute what the whole model computes; None where it is not.

    Verification cannot see it: what a runner forward is compared with is the sharded forward of transformers.
    """
    if config.model_type == "cohere" and getattr(config, "use_qk_norm", False):
        return "transformers does not shard the norms of queries and keys that this cohere model has (use_qk_norm)"
    if config.model_type == "gemma3n_text" and any(config.activation_sparsity_pattern):
        return (
            "transformers cuts the activations of this gemma3n_text model off at a mean over all of them "
            "(activation_sparsity_pattern), of which a process that shares the model has a part only"
        )
    if config.model_type == "doge":
        return "transformers shards the heads of doge models, but not the dynamic masks that every head has of its own"
    return None
