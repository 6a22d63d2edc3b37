"""Every private name of transformers, torch and Python that src uses exists. Its use is tested where src uses it."""

import ast
from _thread import RLock
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers import AutoModelForCausalLM, GenerationConfig, LlamaConfig, LlamaForCausalLM
from transformers.generation.logits_process import PrefixConstrainedLogitsProcessor

SOURCE = Path(__file__).parents[2] / "src" / "skipstone"
PRIVATE: list[tuple[Any, set[str]]] = [
    (torch, {"_C", "_disable_dynamo"}),
    (torch._C, {"_disabled_torch_function_impl", "_len_torch_function_stack"}),
    (torch.nn.Module(), {"_buffers", "_modules", "_parameters", "_forward_hooks", "_forward_pre_hooks"}),
    (torch.zeros(1), {"_version", "_make_wrapper_subclass"}),
    (torch.zeros(1).untyped_storage(), {"_cdata"}),
    (torch.ops.aten.mul_.Tensor, {"_schema"}),
    (LlamaForCausalLM, {"_get_logits_processor", "_is_stateful", "_from_config"}),
    (GenerationConfig(), {"_get_default_generation_params", "_from_model_config"}),
    (PrefixConstrainedLogitsProcessor(lambda *_: [1], 1), {"_prefix_allowed_tokens_fn"}),
    (LlamaConfig(), {"_attn_implementation"}),
    (AutoModelForCausalLM, {"_model_mapping"}),
    (transformers.Trainer, {"_load_from_checkpoint"}),
    (RLock(), {"_is_owned", "_at_fork_reinit"}),
]
SET_LATER = {"_pad_token_tensor", "_eos_token_tensor", "_hf_hook"}
"""By `model.generate`, and by accelerate where it places a module."""


REPLACED = {"_attn_implementation", "_buffers", "_load_from_checkpoint", "_modules"}
"""Defined by src in the place of transformers' or torch's own."""


def foreign_names() -> set[str]:
    """Private names that src looks up on any object: by attribute, getattr or attrgetter, in a dictionary. Not its own."""
    used, own = set[str](), set[str]()
    for node in (node for path in SOURCE.rglob("*.py") for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))):
        match node:
            case ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name) | ast.ClassDef(name=name):
                own.add(name)
            case ast.Name(id=name, ctx=ast.Store()) | ast.Attribute(value=ast.Name(id="self"), attr=name, ctx=ast.Store()):
                own.add(name)
            case ast.Attribute(value=ast.Name(id="os"), attr="_exit"):
                pass  # documented, for all its underscore
            case ast.Attribute(attr=name) | ast.Subscript(slice=ast.Constant(value=str(name))):
                used.add(name)
            case ast.Call(func=ast.Name(id="attrgetter"), args=[ast.Constant(value=str(name))]):
                used.add(name)
            case ast.Call(func=ast.Name(id="getattr" | "hasattr" | "setattr"), args=[_, ast.Constant(value=str(name)), *_]):
                used.add(name)
            case _:
                pass
    return {name for name in used - (own - REPLACED) if name.startswith("_") and not name.startswith("__")}


def test_this_file_names_every_private_name_that_src_uses_and_they_exist() -> None:
    assert foreign_names() == SET_LATER.union(*(names for _, names in PRIVATE))
    assert not [name for owner, names in PRIVATE for name in names if not hasattr(owner, name)]
    overridden = ("training_step", "set_initial_training_values", "_get_output_dir", "_save_checkpoint")
    assert all(hasattr(transformers.Trainer, name) for name in overridden), "by LayerSkipTrainer"


def test_the_version_is_one_that_the_package_asks_for() -> None:
    major, minor = map(int, transformers.__version__.split(".")[:2])
    assert (5, 20) <= (major, minor) < (6, 0)
