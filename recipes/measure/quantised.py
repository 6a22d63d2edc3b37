"""Which quantised kernels round a row differently next to other rows, and how that changes the logits of a text.

    python recipes/measure/quantised.py [MODEL] [--dtype float32] [--tokens 64]

Every installed back end quantises the model, through transformers or hqq. The model reads a text token by token and in wider
passes. Prints a table in Markdown: the number of layers with other sums, the largest difference and its share of the layer's
largest sum, the largest difference of stored keys and values as a share of a layer's largest entry, and the largest difference
of the logits after the text, next to the largest logit.
"""

import argparse
import importlib.util
import logging
import warnings
from collections.abc import Callable
from typing import Any

import torch
import transformers
from transformers import AutoModelForCausalLM

from skipstone.assets import NANO
from skipstone.engines.loading import load_model, load_tokenizer
from skipstone.engines.model_runner import ModelRunner
from skipstone.lab.check.batch_invariance import compare_kernels, kv_spread, logits_spread

TEXT = "Once upon a time there was a little girl who lived in a house near the woods with her mother and a small grey cat. "
GROUP = 32  # inputs with one scale, for back ends that need it


def torchao(make: Callable[[Any], Any]) -> Any:
    """transformers' config for a config of torchao."""
    return transformers.TorchAoConfig(make(importlib.import_module("torchao.quantization")))


def four_bits(package: Any) -> Any:
    """torchao's integers of 4 bits, weights only."""
    integers: Any = torch
    return package.IntxWeightOnlyConfig(weight_dtype=integers.int4, granularity=package.PerGroup(GROUP))


CONFIGS: dict[str, tuple[str, Callable[[], Any]]] = {
    "bitsandbytes 8 bit": ("bitsandbytes", lambda: transformers.BitsAndBytesConfig(load_in_8bit=True)),
    "bitsandbytes 8 bit, threshold 0": (
        "bitsandbytes",
        lambda: transformers.BitsAndBytesConfig(load_in_8bit=True, llm_int8_threshold=0.0),
    ),
    "bitsandbytes 4 bit (nf4)": (
        "bitsandbytes",
        lambda: transformers.BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type="nf4"),
    ),
    "torchao int8, weights only": ("torchao", lambda: torchao(lambda package: package.Int8WeightOnlyConfig())),
    "torchao int8, inputs too": ("torchao", lambda: torchao(lambda package: package.Int8DynamicActivationInt8WeightConfig())),
    "torchao int4, weights only": ("torchao", lambda: torchao(four_bits)),
    "quanto int8": ("optimum.quanto", lambda: transformers.QuantoConfig(weights="int8")),
}


def is_installed(package: str) -> bool:
    """Whether a package is installed."""
    return importlib.util.find_spec(package.partition(".")[0]) is not None


def load_with_hqq(name: str, dtype: torch.dtype) -> Any:
    """A model that hqq quantises to 4 bits in place."""
    base, core = importlib.import_module("hqq.models.hf.base"), importlib.import_module("hqq.core.quantize")
    model = load_model(name, dtype=dtype)
    config = core.BaseQuantizeConfig(nbits=4, group_size=GROUP)
    base.AutoHQQHFModel.quantize_model(model, quant_config=config, compute_dtype=dtype, device="cpu")
    return model


def table_row(title: str, model: Any, text: torch.Tensor) -> str:
    """A line of the table."""
    runner = ModelRunner(model)
    comparisons = compare_kernels(runner, text)
    sums = "; ".join(
        f"{name} | {one.different} of {one.layers} | {one.largest:.1e} ({one.share:.0e})" for name, one in comparisons.items()
    )
    with torch.inference_mode():
        logits = model(text[None]).logits[0, -1]
    difference = logits_spread(runner, text, torch.arange(len(logits)))
    stored = kv_spread(runner, text)
    return f"| {title} | {sums} | {stored:.0e} | {difference:.1e} of {float(logits.abs().max()):.3g} |"


def main() -> None:
    """Parse and run."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", nargs="?", default=str(NANO))
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32")
    parser.add_argument("--tokens", type=int, default=64)
    args = parser.parse_args()
    warnings.simplefilter("ignore")
    logging.disable(logging.WARNING)
    dtype = getattr(torch, args.dtype)
    ids = torch.tensor(load_tokenizer(args.model)(TEXT * args.tokens)["input_ids"][: args.tokens])
    print("| back end | kernel | layers with other sums | largest difference (share) | keys and values | logits |")
    print("| --- | --- | --- | --- | --- | --- |")
    for title, (package, config) in CONFIGS.items():
        if is_installed(package):
            model = AutoModelForCausalLM.from_pretrained(args.model, quantization_config=config(), dtype=dtype).eval()
            print(table_row(title, model, ids), flush=True)
    if is_installed("hqq"):
        print(table_row("hqq 4 bit", load_with_hqq(args.model, dtype), ids), flush=True)


if __name__ == "__main__":
    main()
