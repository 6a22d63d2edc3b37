"""FSDP2: weights, gradients and optimiser states cut over the processes of a run, and checkpoints that any number of them can
read.

`accelerate launch --use_fsdp --fsdp_version 2` asks for it. Every layer is a group, gathered when it runs. The root's
group is embeddings, final norm and LM head: they are gathered once a pass and stay until its gradients are there, because every
exit reads the norm and the head, in the forward pass and once more when its logits are computed again. accelerate would cut
them into groups of their own, whose gathering follows one call of the norm and one of the head.
"""

import os
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from accelerate import Accelerator
from accelerate.utils import DistributedType, FullyShardedDataParallelPlugin
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.distributed.checkpoint import state_dict as states
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.filesystem import FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save as save_shards
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from skipstone.models.decoder_model import DecoderModel

SHARDS = "shards"  # folder in a checkpoint: weights and optimiser states as torch.distributed.checkpoint writes them
WHOLE_OPTIMIZER = "optimizer.pt"  # file in a checkpoint of whole weights: transformers' name for the optimiser's states
_FLAT = states.StateDictOptions(flatten_optimizer_state_dict=True)


def wanted() -> bool:
    """Whether the launch asked for FSDP."""
    return os.environ.get("ACCELERATE_USE_FSDP", "false").lower() == "true"


def disable() -> None:
    """Let what is trained be copied to every process in a launch that asked for FSDP: exit heads are small."""
    os.environ["ACCELERATE_USE_FSDP"] = "false"


def enable_on_cpu(accelerator: Accelerator) -> None:
    """Let accelerate know that processes on the CPU are sharded, too: it leaves its FSDP plugin out there (1.15)."""
    state: Any = accelerator.state
    if state.distributed_type == DistributedType.MULTI_CPU:
        state.fsdp_plugin = FullyShardedDataParallelPlugin()
        state.distributed_type = DistributedType.FSDP


def check(model: nn.Module, accelerator: Accelerator, muon: bool) -> None:
    """ValueError for what cannot be cut. muon: whether Muon is to train the layers' matrices."""
    plugin: Any = accelerator.state.fsdp_plugin
    config: Any = getattr(model, "config", None)
    if plugin.fsdp_version != 2:
        raise ValueError("FSDP 1 is not supported: launch with --fsdp_version 2")
    if getattr(config, "quantization_config", None) is not None:
        raise ValueError(
            "the model is quantised: FSDP cuts trained weights in floating point, so start from the unquantised one"
        )
    if hasattr(model, "get_base_model"):
        raise ValueError("adapters (model.lora) are not trained under FSDP: launch without --use_fsdp, which copies the model")
    if muon:
        raise ValueError("Muon orthogonalises whole matrices, which FSDP cuts: leave muon_learning_rate out, for AdamW")
    if plugin.activation_checkpointing:
        raise ValueError(
            "fsdp_activation_checkpointing would run layers again without the recipe's dropped rows: set "
            "training.activation_checkpointing: true instead"
        )
    if accelerator.mixed_precision == "fp16":
        raise ValueError("fp16 is not supported under FSDP: set training.bf16: true instead")


def shard(model: Any, accelerator: Accelerator) -> None:
    """Cut a model in place, before its optimiser is made. With bf16 weights are gathered in bfloat16, and gradients are summed
    in float32."""
    plugin: Any = accelerator.state.fsdp_plugin
    half = accelerator.mixed_precision == "bf16"
    policy = MixedPrecisionPolicy(torch.bfloat16, torch.float32) if half else MixedPrecisionPolicy()
    given: dict[str, Any] = {"mp_policy": policy, "offload_policy": plugin.cpu_offload}
    for layer in DecoderModel(model).layers:
        fully_shard(layer, reshard_after_forward=plugin.reshard_after_forward, **given)
    fully_shard(model, **given)


def is_sharded(model: Any) -> bool:
    """Whether `shard` has cut a model."""
    return isinstance(model, FSDPModule)


@contextmanager
def gathered(model: Any) -> Iterator[None]:
    """After the block, the root's group is cut again: a forward without a backward leaves it whole."""
    try:
        yield
    finally:
        if is_sharded(model):
            model.reshard()


def local(parameter: Tensor) -> Tensor:
    """What this process holds of a parameter."""
    return parameter.to_local() if isinstance(parameter, DTensor) else parameter


def whole_weights(model: nn.Module) -> dict[str, Any]:
    """Weights by name, gathered on the host of the first process; {} on the others. Every process must call it."""
    return states.get_model_state_dict(model, options=states.StateDictOptions(full_state_dict=True, cpu_offload=True))


def save(folder: Path, model: nn.Module, optimizer: Optimizer) -> None:
    """Write weights and optimiser states, every process its own part. Every process must call it. OSError in all of them where
    one cannot write."""
    weights, optimised = states.get_state_dict(model, optimizer, options=_FLAT)
    try:
        save_shards({"weights": weights, "optimizer": optimised}, storage_writer=FileSystemWriter(folder))
    except CheckpointException as error:  # no Exception: it would pass by every handler
        process, (reason, _) = next(iter(error.failures.items()))
        raise OSError(f"process {process}: {reason}") from error


def _read(wanted: dict[str, Any], reader: FileSystemReader, planner: DefaultLoadPlanner | None = None) -> None:
    """Fill tensors in place with what was saved under their names; one process may do it alone."""
    alone = not dist.is_initialized()
    with warnings.catch_warnings():
        if alone:
            warnings.filterwarnings("ignore", "torch.distributed is disabled")
        load(wanted, storage_reader=reader, planner=planner, no_dist=alone)


def load_weights(checkpoint: Path, model: nn.Module) -> None:
    """Weights of a checkpoint into a model, whether either of them is whole or cut, by whatever number of processes."""
    shards = checkpoint / SHARDS
    if shards.is_dir():
        weights: dict[str, Any] = {"weights": states.get_model_state_dict(model)}
        _read(weights, FileSystemReader(shards))
        states.set_model_state_dict(model, weights["weights"])
        return
    whole: dict[str, Any] = {
        name: value for file in sorted(checkpoint.glob("model*.safetensors")) for name, value in load_file(file).items()
    }
    options = states.StateDictOptions(full_state_dict=True, strict=False)  # tied weights are saved once
    states.set_model_state_dict(model, whole, options=options)


def load_optimizer(checkpoint: Path, model: nn.Module, optimizer: Optimizer) -> None:
    """Optimiser states of a checkpoint, as `load_weights` does. Parameters that had none when it was written have none."""
    shards = checkpoint / SHARDS
    if shards.is_dir():
        reader = FileSystemReader(shards)
        found: dict[str, Any] = {"optimizer": states.get_optimizer_state_dict(model, optimizer, options=_FLAT)}
        _read(found, reader, DefaultLoadPlanner(allow_partial_load=True))
        states.set_optimizer_state_dict(model, optimizer, found["optimizer"], options=_FLAT)
        keys = {key.rpartition(".")[0] for key in reader.read_metadata().state_dict_metadata}
        known = {name for name, _ in model.named_parameters() if f"optimizer.state.{name}" in keys}
    else:
        known = _load_whole_optimizer(checkpoint / WHOLE_OPTIMIZER, model, optimizer)
    for name, parameter in model.named_parameters():
        if name not in known:
            optimizer.state.pop(parameter, None)


def _load_whole_optimizer(file: Path, model: nn.Module, optimizer: Optimizer) -> set[str]:
    """States that one process wrote, by number of parameter; cut as the model is. Returns the names that have some."""
    saved = torch.load(file, weights_only=True, map_location="cpu")
    name_of = {parameter: name for name, parameter in model.named_parameters()}
    names = [name_of[parameter] for group in optimizer.param_groups for parameter in group["params"]]
    whole = {
        "state": {names[number]: state for number, state in saved["state"].items()},
        "param_groups": [{**group, "params": [names[number] for number in group["params"]]} for group in saved["param_groups"]],
    }
    options = states.StateDictOptions(full_state_dict=True, strict=False)
    states.set_optimizer_state_dict(model, optimizer, whole, options=options)
    return set(whole["state"])
