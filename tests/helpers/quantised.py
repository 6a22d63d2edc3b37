"""Tiny models, quantised in code by every back end that is tested here; a test skips itself where the package is missing."""

import functools
import json
import tempfile
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM, PreTrainedModel

from tests.helpers.machine import sharpened, small

GROUP = 32  # inputs that share a scale


def plain() -> PreTrainedModel:
    """The model that is quantised: early exits are right often, and wrong often enough."""
    torch.manual_seed(0)
    return sharpened(LlamaForCausalLM(small(LlamaConfig, vocab=97, hidden=64, layers=4)), 2, head=6.0, later=0.2)


def _folder() -> Path:
    return Path(tempfile.mkdtemp(prefix="quantised-"))


def loaded(config: Any, dtype: torch.dtype = torch.float32) -> PreTrainedModel:
    """By transformers, which quantises while it loads."""
    with tempfile.TemporaryDirectory() as folder:
        plain().save_pretrained(folder)
        return AutoModelForCausalLM.from_pretrained(folder, quantization_config=config, dtype=dtype).eval()


def bitsandbytes(dtype: torch.dtype = torch.float32, **fields: Any) -> PreTrainedModel:
    pytest.importorskip("bitsandbytes")
    return loaded(transformers.BitsAndBytesConfig(**fields), dtype)


def torchao(make: Callable[[Any], Any]) -> PreTrainedModel:
    return loaded(transformers.TorchAoConfig(make(pytest.importorskip("torchao.quantization"))))


def quanto(weights: str) -> PreTrainedModel:
    pytest.importorskip("optimum.quanto")
    return loaded(transformers.QuantoConfig(weights=weights))


def hqq(bits: int) -> PreTrainedModel:
    """By hqq itself: transformers 5.23 has lost its own way."""
    base, core = pytest.importorskip("hqq.models.hf.base"), pytest.importorskip("hqq.core.quantize")
    model = plain()
    asked = core.BaseQuantizeConfig(nbits=bits, group_size=GROUP)
    base.AutoHQQHFModel.quantize_model(model, quant_config=asked, compute_dtype=torch.float32, device="cpu")
    return model


def compressed_checkpoint(bits: int, form: str, activations: bool = False) -> Path:
    package, tools = pytest.importorskip("compressed_tensors.quantization"), pytest.importorskip("compressed_tensors")
    from compressed_tensors.quantization.utils import calculate_qparams

    wide = {"strategy": "group", "group_size": GROUP} if form == "pack-quantized" else {"strategy": "channel"}
    weights = package.QuantizationArgs(num_bits=bits, symmetric=True, **wide)
    inputs = package.QuantizationArgs(num_bits=8, strategy="token", dynamic=True, symmetric=True) if activations else None
    scheme = package.QuantizationScheme(targets=["Linear"], weights=weights, input_activations=inputs, format=form)
    config = package.QuantizationConfig(
        config_groups={"group_0": scheme}, ignore=["lm_head"], format=form, quantization_status="frozen"
    )
    model = plain()
    package.apply_quantization_config(model, config)
    for module in model.modules():
        if hasattr(module, "quantization_scheme"):
            groups = module.weight.data.view(module.weight.shape[0], -1, wide.get("group_size") or module.weight.shape[1])
            scale, zero = calculate_qparams(groups.amin(-1), groups.amax(-1), weights)
            module.weight_scale.data = scale.float().view(module.weight_scale.shape)
            if hasattr(module, "weight_zero_point"):
                module.weight_zero_point.data = zero.view(module.weight_zero_point.shape)
    compressor = tools.compressors.ModelCompressor(quantization_config=config)
    compressor.compress_model(model)
    folder = _folder()
    model.save_pretrained(folder, state_dict=model.state_dict())
    compressor.update_config(folder)
    return folder


def compressed(bits: int, form: str, activations: bool = False) -> PreTrainedModel:
    folder = compressed_checkpoint(bits, form, activations)
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()


def _words(codes: Tensor, order: tuple[int, ...] = tuple(range(8))) -> Tensor:
    """Eight codes of 4 bits along the last axis to one int32, the first in `order` lowest."""
    eight = codes.long().unflatten(-1, (-1, 8))[..., list(order)]
    return (eight << (4 * torch.arange(8))).sum(-1).to(torch.int32)


def _four_bits(weight: Tensor, method: str) -> dict[str, Tensor]:
    """A weight [out, in] in 4 bits, as the checkpoints of AutoGPTQ and AutoAWQ have it."""
    groups = weight.unflatten(-1, (-1, GROUP))
    scales = groups.abs().amax(-1) / 7
    codes = ((groups / scales[..., None]).round().clamp(-8, 7).flatten(1) + 8).t()  # [in, out]
    zeros, shared = torch.full((codes.shape[0] // GROUP, codes.shape[1]), 8), {"scales": scales.t().half().contiguous()}
    if method == "awq":
        order = (0, 2, 4, 6, 1, 3, 5, 7)
        return {**shared, "qweight": _words(codes, order), "qzeros": _words(zeros, order)}
    index = (torch.arange(len(codes)) // GROUP).int()
    return {**shared, "qweight": _words(codes.t()).t().contiguous(), "qzeros": _words(zeros - 1), "g_idx": index}


def four_bit_checkpoint(method: str) -> Path:
    """A GPTQ or AWQ checkpoint, its codes simply the nearest ones."""
    folder, model = _folder(), plain()
    model.save_pretrained(folder)
    kept: dict[str, Tensor] = {}
    for name, weight in load_file(folder / "model.safetensors").items():
        if name.endswith("proj.weight"):
            kept |= {name.removesuffix("weight") + part: one for part, one in _four_bits(weight, method).items()}
        else:
            kept[name] = weight
    save_file(kept, folder / "model.safetensors", {"format": "pt"})
    settings = {"quant_method": method, "bits": 4, "group_size": GROUP}
    own: dict[str, Any] = {"zero_point": True, "version": "gemm"}
    if method == "gptq":
        own = {"desc_act": False, "sym": True, "checkpoint_format": "gptq"}
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "quantization_config": {**settings, **own}}))
    return folder


def four_bits(method: str) -> PreTrainedModel:
    pytest.importorskip("gptqmodel")
    return AutoModelForCausalLM.from_pretrained(four_bit_checkpoint(method), dtype=torch.float32).eval()


_BUILDERS: dict[str, Callable[[], PreTrainedModel]] = {
    "bitsandbytes 8 bit": lambda: bitsandbytes(load_in_8bit=True),
    "bitsandbytes fp4": lambda: bitsandbytes(load_in_4bit=True),
    "bitsandbytes nf4": lambda: bitsandbytes(
        torch.bfloat16, load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_use_double_quant=True
    ),
    "torchao int8": lambda: torchao(lambda package: package.Int8WeightOnlyConfig()),
    "torchao int8 inputs": lambda: torchao(lambda package: package.Int8DynamicActivationInt8WeightConfig()),
    "torchao int4": lambda: torchao(
        lambda package: package.IntxWeightOnlyConfig(weight_dtype=torch.int4, granularity=package.PerGroup(GROUP))
    ),
    "hqq 8 bit": lambda: hqq(8),
    "hqq 4 bit": lambda: hqq(4),
    "quanto int8": lambda: quanto("int8"),
    "compressed-tensors int8": lambda: compressed(8, "int-quantized"),
    "compressed-tensors int8 inputs": lambda: compressed(8, "int-quantized", activations=True),
    "compressed-tensors int4": lambda: compressed(4, "pack-quantized"),
    "gptq": lambda: four_bits("gptq"),
    "awq": lambda: four_bits("awq"),
}
NAMES = tuple(_BUILDERS)


@functools.cache
def cached(name: str) -> PreTrainedModel:
    """A quantised model that others have too. It is skipped where its package is missing."""
    return build(name)


def build(name: str) -> PreTrainedModel:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # what the packages say of themselves
        return _BUILDERS[name]()
