"""Models that skipstone does not decode exactly are refused before any forward pass, by what was found and why."""

import functools
import re
from collections.abc import Callable, Iterable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import transformers
from torch import nn
from transformers import AutoConfig, AutoModel, AutoModelForCausalLM, AutoModelForSeq2SeqLM, LlamaConfig, LlamaForCausalLM

import skipstone
from skipstone.engines.model_runner import ModelRunner
from skipstone.models import known_types, recognition
from skipstone.models.decoder_model import DecoderModel
from tests.helpers import families, support
from tests.helpers.wrapped import WRAPPERS

SMALL: dict[str, Any] = {
    "vocab_size": 97,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "num_hidden_layers": 4,
    "head_dim": 8,
    "max_position_embeddings": 128,
    "pad_token_id": 0,
    "bos_token_id": None,
    "eos_token_id": None,
}


def made(kind: str, auto: Any = AutoModelForCausalLM, **fields: Any) -> Callable[[], Any]:
    """A builder of a tiny model of any family."""
    return lambda: auto.from_config(AutoConfig.for_model(kind, **fields)).eval()


def config_of(name: str, **fields: Any) -> Callable[[], Any]:
    """A builder of a supported type with other fields in its config."""
    return lambda: families.build(name, **fields)


def setting(path: str, value: Any) -> Callable[[Any], None]:
    """Sets an attribute, `config.` in front for one of the config."""

    def change(model: Any) -> None:
        *owner, name = path.split(".")
        setattr(getattr(model, owner[0]) if owner else model, name, value)

    return change


class OwnLlama(LlamaForCausalLM):
    """As from a repository with remote code."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return super().forward(*args, **kwargs)


class Shell(SimpleNamespace):
    """What the checks look at of a model that is too large to be built here."""

    def __hash__(self) -> int:  # type: ignore[override]
        return id(self)


def half_on_meta(model: Any) -> None:
    model.model.layers[3].to("meta")


def in_integers(model: Any) -> None:
    projection = model.model.layers[0].mlp.down_proj
    projection.weight = nn.Parameter(projection.weight.data.to(torch.int8), requires_grad=False)


def sharded(model: Any) -> None:
    class DTensor(torch.Tensor):
        pass

    projection = model.model.layers[0].mlp.down_proj
    projection.weight = nn.Parameter(projection.weight.data.as_subclass(DTensor))


def quantised(model: Any) -> None:
    model.hf_quantizer = object()
    model.config.quantization_config = SimpleNamespace(quant_method="quark")


# what: (builder, words of the message)
REFUSED: dict[str, tuple[Callable[[], Any], tuple[str, ...]]] = {
    "T5": (made("t5", AutoModelForSeq2SeqLM, d_model=32, d_kv=8, d_ff=64, num_layers=1, num_heads=4, vocab_size=97),
           ("t5", "encoder-decoder")),
    "Jamba": (made("jamba", **SMALL), ("jamba", "recurrent state")),
    "Mamba": (made("mamba", hidden_size=32, num_hidden_layers=1, vocab_size=97, state_size=4), ("mamba", "recurrent state")),
    "Falcon with alibi": (config_of("falcon", alibi=True), ("falcon", "alibi")),
    "a type that has no cache": (made("openai-gpt", n_embd=32, n_layer=1, n_head=4, vocab_size=97),
                                 ("openai-gpt", "has no KV cache in transformers")),
    "GPT-2 with cross-attention": (config_of("gpt2", add_cross_attention=True), ("gpt2", "cross-attention")),
    "Gemma seen both ways": (config_of("gemma", use_bidirectional_attention=True), ("gemma", "bidirectional")),
    "a window that the masks of Llama ignore": (config_of("llama", sliding_window=8),
                                                ("llama", "contradicts itself", "sliding_window=8")),
    "layer types that the masks of Mistral ignore": (
        config_of("mistral", layer_types=["full_attention", "sliding_attention"] * 2),
        ("mistral", "contradicts itself", "layer_types")),
    "sliding layers without a window": (
        config_of("qwen2", use_sliding_window=False, layer_types=["sliding_attention"] * 4), ("qwen2", "sliding_window=None")),
    "heads that do not divide": (
        lambda: LlamaForCausalLM(LlamaConfig(**{**SMALL, "num_key_value_heads": 3})).eval(),
        ("num_attention_heads", "multiple of num_key_value_heads, found 4 and 3")),
    "a model without a head": (made("llama", AutoModel, **SMALL), ("LlamaModel", "no LM head", "AutoModelForCausalLM")),
    "a forward of the user's own": (lambda: OwnLlama(LlamaConfig(**SMALL)).eval(),
                                    ("OwnLlama", "test_refusals", "trust_remote_code")),
}  # fmt: skip
# states that a model may come into, also after it was decoded with: (change, words of the message)
LATER: dict[str, tuple[Callable[[Any], Any], tuple[str, ...]]] = {
    "training mode": (lambda model: model.train(), ("training mode", "model.eval()")),
    "flash attention": (setting("config._attn_implementation", "flash_attention_2"),
                        ("flash_attention_2", 'load with attn_implementation="sdpa"')),
    "a quantiser of transformers": (quantised, ("quantised (quark)", "expected one of bitsandbytes, torchao")),
    "integer weights": (in_integers, ("quantised", "torch.int8")),
    "sharded weights": (sharded, ("DTensor", "plain tensors")),
    "a device map over two devices": (setting("hf_device_map", {"model.layers.0": 0, "lm_head": "cpu"}),
                                      ("spread over 0, cpu", "one device")),
    "weights on the meta device": (lambda model: model.to("meta"), ("meta device", "one device")),
    "offloaded weights": (half_on_meta, ("meta device", "offloaded")),
}  # fmt: skip


TRACED = ("a window that the masks of Llama ignore", "layer types that the masks of Mistral ignore")
"""What only a forward shows."""


def assert_refused(words: Iterable[str], *attempts: Callable[[], Any]) -> None:
    for attempt in attempts:
        with pytest.raises(ValueError) as error:
            attempt()
        assert not [word for word in words if word not in str(error.value)], str(error.value)


@pytest.mark.parametrize("case", [*REFUSED, *LATER])
def test_a_model_that_cannot_be_decoded_exactly_is_refused_by_name(case: str) -> None:
    if case in REFUSED:
        builder, words = REFUSED[case]
        model = builder()
    else:
        model, (change, words) = families.build("llama"), LATER[case]
        change(model)
    ids = torch.tensor([[1, 2, 3]])
    with support.forwards(model) as count:
        assert_refused(words, lambda: ModelRunner(model))
    assert count == [0] or case in TRACED
    if case in LATER:  # and once it was decoded with
        model = families.build("llama")
        skipstone.generate(model, ids, "autoregressive", max_new_tokens=2)
        LATER[case][0](model)
        generate = functools.partial(skipstone.generate, model, ids, "autoregressive", max_new_tokens=2)
        assert_refused(words, lambda: ModelRunner(model), generate)
    if case in ("Mamba", "a type that has no cache", "training mode", "flash attention"):
        for call in (skipstone.generate, skipstone.stream):
            assert_refused(words, lambda call=call: call(model, ids, "autoregressive", max_new_tokens=2))
        assert_refused(words, lambda: skipstone.enable(model, "autoregressive"))


def test_every_causal_language_model_of_transformers_is_either_tested_or_refused_by_name() -> None:
    """A new release of transformers shows up here: its new types belong into TESTED, with a row in tests/helpers/families.py,
    or into REFUSED."""
    mappings = transformers.models.auto.modeling_auto
    types = {kind: {kind, transformers.CONFIG_MAPPING[kind].model_type} for kind in mappings.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES}
    unknown = [kind for kind, names in types.items() if not names & (known_types.TESTED | {*known_types.REFUSED})]
    assert not unknown, "types that nobody has looked at"
    assert not known_types.TESTED & {*known_types.REFUSED}
    wrappers = {*mappings.MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES}
    gone = (known_types.TESTED | {*known_types.REFUSED}) - set().union(*types.values(), wrappers)
    assert not gone, "types that transformers does not have"
    assert len(known_types.TESTED) >= 85
    assert families.TYPES | {*WRAPPERS} >= known_types.TESTED
    around = known_types.TESTED_AROUND_TEXT
    assert {*WRAPPERS} - known_types.TESTED == around <= wrappers - {*types, *known_types.REFUSED}


@pytest.mark.parametrize("kind", ["mamba", "bert", "bart", "deepseek_v32", "modernbert-decoder", "longcat_flash", "xlnet"])
def test_a_type_is_refused_by_its_name_before_anything_is_run(kind: str) -> None:
    config = transformers.CONFIG_MAPPING[kind]()
    shell: Any = Shell(config=config, training=False, parameters=list, modules=list, _is_stateful=False)
    with pytest.raises(ValueError, match=re.escape(f"{kind} {known_types.REFUSED[kind]}")):
        ModelRunner(shell)


@pytest.mark.usefixtures("untested")
def test_a_type_that_nobody_has_tested_is_not_trusted_with_a_window_under_another_name() -> None:
    ModelRunner(families.build("llama", vocab=89))
    with pytest.raises(ValueError, match="local_attention=256 in its config, which nobody has looked at"):
        ModelRunner(families.build("llama", vocab=83, local_attention=256))


@pytest.mark.usefixtures("untested")
def test_a_family_is_not_remembered_for_what_computes_otherwise() -> None:
    plain = families.build("llama", vocab=79)
    key = recognition.recognise(plain).key
    assert recognition.recognise(families.build("llama", vocab=79, seed=5)).key == key
    assert recognition.recognise(families.build("llama", vocab=79).bfloat16()).key != key
    plain.model.layers[1].mlp = nn.Sequential(plain.model.layers[1].mlp)
    assert recognition.recognise(plain).key != key


@pytest.mark.usefixtures("untested")
def test_weights_that_were_trained_since_are_verified_against_what_they_give_now() -> None:
    model = families.build("llama", vocab=73)
    DecoderModel(model)  # what training asks for
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(1.5)
    assert not recognition.recognise(model).is_verified
    ModelRunner(model)
    assert recognition.recognise(model).is_verified


def test_a_soft_cap_is_found_where_logits_are_too_small_to_show_it() -> None:
    model = families.build("gemma2", vocab=71)
    with torch.no_grad():
        model.get_output_embeddings().weight.mul_(1e-3)
    assert ModelRunner(model).family.logits == ("softcap", "final_logit_softcapping")
