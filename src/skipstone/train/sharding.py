"""FSDP2: shards weights, gradients and optimiser states over processes; any number of processes reads the checkpoints.

`accelerate launch --use_fsdp --fsdp_version 2` turns it on. Every layer is a group, gathered when it runs. The root group holds
embeddings, final norm and LM head. It stays gathered from the forward pass to the gradients, because every exit reads norm and
head, in both passes. accelerate would make groups of their own of them, which are gathered for one call each.
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


def is_requested() -> bool:
    """Whether the launch asks for FSDP."""
    return os.environ.get("ACCELERATE_USE_FSDP", "false").lower() == "true"


def disable() -> None:
    """Train a copy in every process although the launch asks for FSDP: exit heads are small."""
    os.environ["ACCELERATE_USE_FSDP"] = "false"


def enable_on_cpu(accelerator: Accelerator) -> None:
    """Turn FSDP on for processes on the CPU, where accelerate 1.15 leaves its plugin out."""
    state: Any = accelerator.state
    if state.distributed_type == DistributedType.MULTI_CPU:
        state.fsdp_plugin = FullyShardedDataParallelPlugin()
        state.distributed_type = DistributedType.FSDP


def check(model: nn.Module, accelerator: Accelerator, muon: bool) -> None:
    """ValueError for a model or settings that FSDP cannot shard. muon: whether Muon trains the layers' matrices."""
    plugin: Any = accelerator.state.fsdp_plugin
    config: Any = getattr(model, "config", None)
    refused = {
        "FSDP 1 is not supported: launch with --fsdp_version 2": plugin.fsdp_version != 2,
        "the model is quantised: FSDP cuts trained weights in floating point, so start from the unquantised one": (
            getattr(config, "quantization_config", None) is not None
        ),
        "adapters (model.lora) are not trained under FSDP: launch without --use_fsdp, which copies the model": (
            hasattr(model, "get_base_model")
        ),
        "Muon orthogonalises whole matrices, which FSDP cuts: leave muon_learning_rate out, for AdamW": muon,
        "fsdp_activation_checkpointing would run layers again without the recipe's dropped rows: set "
        "training.activation_checkpointing: true instead": plugin.activation_checkpointing,
        "fp16 is not supported under FSDP: set training.bf16: true instead": accelerator.mixed_precision == "fp16",
    }
    for reason, applies in refused.items():
        if applies:
            raise ValueError(reason)


def shard(model: Any, accelerator: Accelerator) -> None:
    """Shard a model in place, before its optimiser is made. With bf16, weights are gathered in bfloat16 and gradients summed in
    float32."""
    plugin: Any = accelerator.state.fsdp_plugin
    half = accelerator.mixed_precision == "bf16"
    policy = MixedPrecisionPolicy(torch.bfloat16, torch.float32) if half else MixedPrecisionPolicy()
    given: dict[str, Any] = {"mp_policy": policy, "offload_policy": plugin.cpu_offload}
    for layer in DecoderModel(model).layers:
        fully_shard(layer, reshard_after_forward=plugin.reshard_after_forward, **given)
    fully_shard(model, **given)


def is_sharded(model: Any) -> bool:
    """Whether `shard` was called on a model."""
    return isinstance(model, FSDPModule)


@contextmanager
def gathered(model: Any) -> Iterator[None]:
    """Shard the root group again after the block: a forward without a backward leaves it gathered."""
    try:
        yield
    finally:
        if is_sharded(model):
            model.reshard()


def local(parameter: Tensor) -> Tensor:
    """This process's part of a parameter."""
    return parameter.to_local() if isinstance(parameter, DTensor) else parameter


def whole_weights(model: nn.Module) -> dict[str, Any]:
    """Weights by name, gathered on the host of the first process; {} on the others. Every process must call it."""
    return states.get_model_state_dict(model, options=states.StateDictOptions(full_state_dict=True, cpu_offload=True))


def save(folder: Path, model: nn.Module, optimizer: Optimizer) -> None:
    """Write weights and optimiser states, every process its own part. Every process must call it. OSError in all of them if one
    cannot write."""
    weights, optimised = states.get_state_dict(model, optimizer, options=_FLAT)
    try:
        save_shards({"weights": weights, "optimizer": optimised}, storage_writer=FileSystemWriter(folder))
    except CheckpointException as error:  # no Exception: it would pass by every handler
        process, (reason, _) = next(iter(error.failures.items()))
        raise OSError(f"process {process}: {reason}") from error


def _read(tensors: dict[str, Any], reader: FileSystemReader, planner: DefaultLoadPlanner | None = None) -> None:
    """Fill tensors in place with the values saved under their names. A single process may do it, too."""
    alone = not dist.is_initialized()
    with warnings.catch_warnings():
        if alone:
            warnings.filterwarnings("ignore", "torch.distributed is disabled")
        load(tensors, storage_reader=reader, planner=planner, no_dist=alone)


def load_weights(checkpoint: Path, model: nn.Module) -> None:
    """Load a checkpoint's weights into a model; either may be whole or sharded, over any number of processes."""
    shards = checkpoint / SHARDS
    if shards.is_dir():
        weights: dict[str, Any] = {"weights": states.get_model_state_dict(model)}
        _read(weights, FileSystemReader(shards))
        states.set_model_state_dict(model, weights["weights"])
        return
    whole: dict[str, Any] = {}
    for file in checkpoint.glob("model*.safetensors"):
        whole |= load_file(file)
    options = states.StateDictOptions(full_state_dict=True, strict=False)  # tied weights are saved once
    states.set_model_state_dict(model, whole, options=options)


def load_optimizer(checkpoint: Path, model: nn.Module, optimizer: Optimizer) -> None:
    """Load a checkpoint's optimiser states, as `load_weights` does. Parameters without saved states get none."""
    shards = checkpoint / SHARDS
    if shards.is_dir():
        reader = FileSystemReader(shards)
        tensors: dict[str, Any] = {"optimizer": states.get_optimizer_state_dict(model, optimizer, options=_FLAT)}
        _read(tensors, reader, DefaultLoadPlanner(allow_partial_load=True))
        states.set_optimizer_state_dict(model, optimizer, tensors["optimizer"], options=_FLAT)
        keys = {key.rpartition(".")[0] for key in reader.read_metadata().state_dict_metadata}
        known = {name for name, _ in model.named_parameters() if f"optimizer.state.{name}" in keys}
    else:
        known = _load_whole_optimizer(checkpoint / WHOLE_OPTIMIZER, model, optimizer)
    for name, parameter in model.named_parameters():
        if name not in known:
            optimizer.state.pop(parameter, None)


def _load_whole_optimizer(file: Path, model: nn.Module, optimizer: Optimizer) -> set[str]:
    """Load states that one process wrote by number of parameter, sharded as the model is. Returns the parameters' names."""
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
