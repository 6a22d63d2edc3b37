"""The processes that compute one model together (tensor parallelism), and the values that they must agree on.

Every process decodes by itself: equal logits, which a sharded LM head gathers on all of them, give equal tokens. Clocks differ
between processes, and processes that run different passes wait for one another forever. So methods read their clock only here.
"""

import sys
import time
from typing import Any

import torch
from torch import Tensor

MESH = "tp"  # transformers' name of the mesh dimension of tensor parallelism


def is_sharded(tensor: Tensor) -> bool:
    """Whether a tensor is a shard. torch's module for shards takes long to import, and without it there are none."""
    module = sys.modules.get("torch.distributed.tensor")
    return module is not None and isinstance(tensor, module.DTensor)


class TensorParallelGroup:
    """The processes of one model. size: number of processes. mesh: their device mesh, None for one process."""

    def __init__(self, mesh: Any = None) -> None:
        self.mesh = mesh
        self.size: int = 1 if mesh is None else mesh.size()

    @classmethod
    def of(cls, model: Any) -> "TensorParallelGroup":
        """The processes over which a model's weights are sharded."""
        return cls(next((one.device_mesh for one in model.parameters() if is_sharded(one)), None))

    @property
    def writes(self) -> bool:
        """Whether this process writes the files for all of them."""
        return self.mesh is None or self.mesh.get_local_rank() == 0

    def now(self) -> float:
        """This process's clock in seconds. Decisions may only use the result of `since`."""
        return time.perf_counter()

    def since(self, began: float) -> float:
        """Seconds since `began`, a result of `now`; equal in all processes."""
        return self.agreed(time.perf_counter() - began)

    def agreed(self, value: float) -> float:
        """The first process's value. All processes must call this at the same place."""
        return float(self._broadcast(value, torch.float64))

    def agreed_whole(self, value: int) -> int:
        """As `agreed`, for an integer of up to 63 bits."""
        return int(self._broadcast(value, torch.int64))

    def _broadcast(self, value: float, dtype: torch.dtype) -> float:
        if self.size == 1:
            return value
        shared = torch.tensor([value], dtype=dtype, device=self.mesh.device_type)
        torch.distributed.broadcast(shared, group=self.mesh.get_group(), group_src=0)
        return shared.item()


def cannot_share(config: Any, size: int) -> str | None:
    """The reason why `size` processes cannot share a model, as one sentence; None if they can.

    The number of heads must be divisible only if transformers' plan shards the projections by heads. It gathers the outputs of
    fused ones.
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
    """Why transformers' sharded model is known to compute something else than the whole model, or None.

    The verification cannot find it, since it compares with the sharded forward.
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
