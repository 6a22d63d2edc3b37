"""Models that a package has quantised write with skipstone what they write without it, or are refused by name."""

import copy
import functools
import json
import re
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

import skipstone
from skipstone.engines.loading import load_model
from skipstone.engines.model_runner import ModelRunner
from skipstone.engines.native import library
from skipstone.lab.check.check import TieDetector
from skipstone.models import quantised_checkpoints
from skipstone.models.fingerprint import fingerprint
from tests.helpers import families, quantised
from tests.helpers.conformance import ROWS
from tests.helpers.machine import llama, prompt
from tests.helpers.pairwise import round_robin, slow_except

NEW = 20  # tokens of a text
LENGTH = 9  # tokens of a prompt
BY_NAME = slow_except([name for name in quantised.NAMES if not name.startswith("compressed")], quantised.NAMES)
METHODS = ["autoregressive", "layerskip", "layerskip, some tokens", "self_speculative", "swift", "speculative"]


def method_of(name: str) -> Any:
    return replace(ROWS[name], second=lambda _: quantised.plain()).method("llama", 3, "standard")


@functools.cache
def expected(name: str) -> list[int]:
    ids = prompt(LENGTH, seed=1)[None]
    return quantised.build(name).generate(ids, max_new_tokens=NEW, do_sample=False)[0, LENGTH:].tolist()


ROUND_INPUTS = ("bitsandbytes 8 bit", "torchao int8 inputs", "compressed-tensors int8 inputs")
"""Their codes of the inputs make a large difference of a small one: texts part where the best tokens are close."""


def assert_same(name: str, found: Any) -> None:
    """The text is the quantised model's, or parts from it in a tie, where the kernel rounds its inputs."""
    assert len(found) == 1
    parted = TieDetector(quantised.cached(name)).compare(prompt(LENGTH, seed=1), expected(name), found[0])
    assert parted is None or (parted.tie and name in ROUND_INPUTS), str(parted)


@round_robin(name=BY_NAME, method=METHODS)
def test_greedy_text_is_that_of_the_quantised_model(name: str, method: str) -> None:
    """The kernels run for the first time in skipstone, where they have to unpack what they pack."""
    model = quantised.cached(name)
    output = skipstone.generate(model, prompt(LENGTH, seed=1)[None], method_of(method), max_new_tokens=NEW, do_sample=False)
    assert quantised_checkpoints.kernels(model), "it is not quantised"
    assert_same(name, output.new_tokens)
    assert output.engine == "eager"
    assert (output.stats.drafted > 0) == (method != "autoregressive")


@pytest.mark.skipif(library.missing() is not None, reason="no native engine")
@pytest.mark.parametrize("name", BY_NAME)
def test_the_native_engine_says_why_and_the_fingerprint_is_of_the_quantised_weights(name: str) -> None:
    model = quantised.build(name)
    (kernel,) = quantised_checkpoints.kernels(model)
    words = f"is quantised ({kernel}), and the native engine reads plain weights only"
    assert words in str(ModelRunner(model).engine_reason)
    for options in ({"engine": "native"}, {"quantize": "int8"}):
        with pytest.raises(ValueError, match="reads plain weights only"):
            ModelRunner(model, **options)
    known = fingerprint(model)
    model.generate(prompt(LENGTH)[None], max_new_tokens=2)
    assert fingerprint(copy.copy(model)) == known
    assert known != fingerprint(quantised.plain())


class Odd(torch.Tensor):
    """A weight of a kernel that nobody has heard of."""


Odd.__module__ = "torchao.new"


class GgufLinear(nn.Linear):
    """Named as transformers' own."""


def with_odd_weight(model: Any, place: str) -> Any:
    module = model.get_submodule(place)
    module.weight = nn.Parameter(module.weight.data.as_subclass(Odd), requires_grad=False)
    return model


def test_kernels_that_are_not_tested_and_quantised_heads_and_embeddings_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ValueError, match=r"quantised \(torchao\), its layers are torchao Odd, expected torchao Int8Tensor"):
        ModelRunner(with_odd_weight(families.build("llama"), "model.layers.1.mlp.up_proj"))
    known = quantised_checkpoints.METHODS["torchao"]
    odd = quantised_checkpoints.Quantisation(known.package, ("torchao Odd",))
    monkeypatch.setitem(quantised_checkpoints.METHODS, "torchao", odd)
    for place, part in (("lm_head", "LM head"), ("model.embed_tokens", "embedding")):
        with pytest.raises(ValueError, match=rf"the model's {part} is quantised \(torchao Odd\), expected a plain one"):
            ModelRunner(with_odd_weight(llama(), place))


def test_gguf_blocks_that_stay_packed_are_refused_and_unpacked_ones_are_not() -> None:
    model: Any = llama()
    model.hf_quantizer, model.config.quantization_config = object(), SimpleNamespace(quant_method="gguf")
    ModelRunner(model)
    model.model.layers[0].mlp.up_proj = GgufLinear(32, 64, bias=False)
    with pytest.raises(ValueError, match=r"quantised \(gguf\) and keeps its weights packed.*dequantize=True"):
        ModelRunner(model)


def checkpoint(folder: Path, method: str) -> Path:
    """A folder that says of itself that it is quantised."""
    config = llama(layers=1).config.to_dict()
    settings = {"quant_method": method, "load_in_8bit": True}
    (folder / "config.json").write_text(json.dumps({**config, "quantization_config": settings}))
    return folder


REFUSED = {
    "vptq": "quantised (vptq), expected one of bitsandbytes, torchao",
    "hqq": "quantised (hqq), which transformers cannot load: load the unquantised model and quantise it by hqq's",
}


def test_checkpoints_that_cannot_be_decoded_or_lack_a_package_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for method, words in REFUSED.items():
        with pytest.raises(ValueError, match=re.escape(words)):
            load_model(checkpoint(tmp_path, method))
    for method, known in quantised_checkpoints.METHODS.items():
        if known.unloadable is None:
            monkeypatch.setitem(sys.modules, known.package, None)
            with pytest.raises(ImportError) as caught:
                load_model(checkpoint(tmp_path, method))
            assert type(caught.value) is ImportError, "the command line prints only these in one sentence"
            assert str(caught.value) == f"the checkpoint is quantised ({method}), which needs {known.package}: {known.install}"


def saved(name: str) -> Path:
    """Written before it has run: bitsandbytes saves 4 bit weights as its kernels have repacked them, and reads them as if they
    had not."""
    folder = quantised._folder()
    quantised.build(name).save_pretrained(folder)
    return folder


CHECKPOINTS: dict[str, Callable[[], Path]] = {
    "compressed-tensors int4": lambda: quantised.compressed_checkpoint(4, "pack-quantized"),
    "gptq": lambda: pytest.importorskip("gptqmodel") and quantised.four_bit_checkpoint("gptq"),
    **{name: functools.partial(saved, name) for name in ("bitsandbytes 8 bit", "bitsandbytes nf4", "torchao int8")},
}


@pytest.mark.parametrize("name", CHECKPOINTS)
def test_a_quantised_checkpoint_is_loaded_and_decoded(name: str) -> None:
    model = load_model(CHECKPOINTS[name]())
    output = skipstone.generate(
        model, prompt(LENGTH, seed=1)[None], method_of("layerskip"), max_new_tokens=NEW, do_sample=False
    )
    assert quantised_checkpoints.kernels(model), "it is not quantised"
    assert_same(name, output.new_tokens)
