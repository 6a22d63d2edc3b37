"""The weights of a transformers model as the native engine reads them: what each family's layer is made of, in panels."""

import ctypes
import mmap
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from skipstone.models.engines.native.structs import Layer, Matrix, Model
from skipstone.models.facts import Facts

TYPES = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}
"""Numbers of the dtypes that weights may be stored in."""
QUANTIZED = {"int8": 3, "int4": 4}
"""Numbers of the types that weights may be quantised to."""
HEADS = {"int8": "int8", "int4": "int8"}
"""What the LM head is quantised to, whose errors go straight into the logits."""
CHUNK = 32 << 20
"""Bytes that are asked of the system at once, for many matrices."""
ACTIVATIONS = {"silu": 0, "swish": 0, "gelu_pytorch_tanh": 1, "gelu_new": 1}
"""Names that transformers gives to the activations of an MLP, and the native engine's numbers for them."""


@dataclass(frozen=True)
class Recipe:
    """What a family's layer has beyond a Llama's: names of its norms, and flags.

    before_attention, after_attention, before_mlp, after_mlp: the layer's norms, None where it has none. norm_offset: what the
    stored weight of a norm is short of (Gemma stores w - 1). query_norm: None, "head" (each head for itself) or "whole" (all
    heads of a token at once). fused: q, k, v are one matrix, and so are gate and up.
    """

    before_attention: str | None = "input_layernorm"
    after_attention: str | None = None
    before_mlp: str | None = "post_attention_layernorm"
    after_mlp: str | None = None
    norm_offset: float = 0.0
    query_norm: str | None = None
    fused: bool = False


_LLAMA = Recipe()
_FOUR_NORMS = Recipe(
    after_attention="post_attention_layernorm",
    before_mlp="pre_feedforward_layernorm",
    after_mlp="post_feedforward_layernorm",
    norm_offset=1.0,
)
RECIPES: dict[str, Recipe] = {
    "llama": _LLAMA,
    "mistral": _LLAMA,
    "qwen2": _LLAMA,
    "qwen3": Recipe(query_norm="head"),
    "smollm3": _LLAMA,
    "granite": _LLAMA,
    "olmo2": Recipe(
        before_attention=None,
        after_attention="post_attention_layernorm",
        before_mlp=None,
        after_mlp="post_feedforward_layernorm",
        query_norm="whole",
    ),
    "phi3": Recipe(fused=True),
    "gemma": Recipe(norm_offset=1.0),
    "gemma2": _FOUR_NORMS,
    "gemma3_text": replace(_FOUR_NORMS, query_norm="head"),
}
"""The families that the native engine knows, by transformers' model type."""


def activation(config: Any) -> str:
    """transformers' name of a model's activation; Gemma has its own field for it."""
    return getattr(config, "hidden_activation", None) or config.hidden_act


class Chunks:
    """Memory for panels, zeros at first, in huge pages where the system has them. What the CPU fetches ahead ends with its
    page, and a page of 2 MB ends seldom. It lives as long as its tensors."""

    def __init__(self) -> None:
        self._free = torch.empty(0, dtype=torch.uint8)

    def take(self, size: int) -> Tensor:
        """[size] uint8, at a multiple of 64 bytes."""
        wanted = -(-size // 64) * 64
        if wanted > len(self._free):
            pages = mmap.mmap(-1, max(wanted, CHUNK), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
            with suppress(OSError):  # a kernel without huge pages
                pages.madvise(mmap.MADV_HUGEPAGE)
            self._free = torch.frombuffer(pages, dtype=torch.uint8)
        taken, self._free = self._free[:size], self._free[wanted:]
        return taken


class Weights:
    """A model's weights in panels. They live as long as this object.

    model: the struct that the C ABI takes. bytes: of the panels. rotary_kinds: layer types that have a rotary table of their
    own, in the order of their numbers. quantize: "int8" or "int4" for all matrices, None for the dtype that they are stored in.
    """

    def __init__(self, library: Any, model: Any, facts: Facts, quantize: str | None = None) -> None:
        self._library, self._kept, self.bytes, self._quantize = library, [], 0, quantize
        self._chunks = Chunks()
        config, family = model.config, facts.family
        self._recipe = RECIPES[config.model_type]
        self.rotary_kinds = sorted(set(facts.kinds)) if family.rotary_by_kind else [""]
        first = facts.layers[0]
        attention, epsilon = getattr(first, family.attention), config.rms_norm_eps
        head_size = attention.head_dim
        kv_heads = config.num_key_value_heads
        layers = (Layer * len(facts.layers))(*[self._layer(facts, index, config) for index in range(len(facts.layers))])
        self._kept.append(layers)
        embedding = model.get_input_embeddings()
        rows = embedding.weight.detach().contiguous()
        from_head = quantize is not None and embedding.weight is facts.head.weight  # what is tied has one set of values
        if not from_head:
            self._kept.append(rows)
        norm = getattr(facts.decoder, family.norm)
        self.model = Model(
            hidden=rows.shape[1],
            heads=config.num_attention_heads,
            kv_heads=kv_heads,
            head_size=head_size,
            intermediate=config.intermediate_size,
            depth=len(facts.layers),
            vocabulary=facts.head.weight.shape[0],
            embeddings=rows.shape[0],
            layers=ctypes.addressof(layers),
            head=self._packed(facts.head.weight.detach(), facts.head.bias, quantize and HEADS[quantize]),
            embedding=None if from_head else rows.data_ptr(),
            embedding_type=TYPES[rows.dtype],
            norm=self._norm(norm),
            epsilon=epsilon,
            embedding_scale=float(getattr(embedding, "embed_scale", 1.0)),
            embedding_multiplier=float(getattr(config, family.input_scale)) if family.input_scale else 1.0,
            logits_divisor=float(getattr(config, "logits_scaling", 1.0)),
            logits_softcap=float(getattr(config, "final_logit_softcapping", None) or 0.0),
        )

    def _layer(self, facts: Facts, index: int, config: Any) -> Layer:
        layer, recipe = facts.layers[index], self._recipe
        attention, mlp = getattr(layer, facts.family.attention), layer.mlp
        sizes = [config.num_attention_heads, config.num_key_value_heads, config.num_key_value_heads]
        if recipe.fused:
            q, k, v = self._split(attention.qkv_proj, [count * attention.head_dim for count in sizes])
            gate, up = self._split(mlp.gate_up_proj, [config.intermediate_size] * 2)
        else:
            q, k, v = (self._linear(getattr(attention, name)) for name in ("q_proj", "k_proj", "v_proj"))
            gate, up = self._linear(mlp.gate_proj), self._linear(mlp.up_proj)
        rotates = bool(getattr(attention, "use_rope", True))
        kind = facts.kinds[index] if facts.family.rotary_by_kind else ""
        norms = (recipe.before_attention, recipe.after_attention, recipe.before_mlp, recipe.after_mlp)
        before, after, before_mlp, after_mlp = (None if name is None else self._norm(getattr(layer, name)) for name in norms)
        return Layer(
            q=q,
            k=k,
            v=v,
            o=self._linear(attention.o_proj),
            gate=gate,
            up=up,
            down=self._linear(mlp.down_proj),
            norm_before_attention=before,
            norm_after_attention=after,
            norm_before_mlp=before_mlp,
            norm_after_mlp=after_mlp,
            norm_q=self._norm(attention.q_norm) if recipe.query_norm else None,
            norm_k=self._norm(attention.k_norm) if recipe.query_norm else None,
            norm_whole=recipe.query_norm == "whole",
            window=facts.windows[index] or 0,
            rotary=self.rotary_kinds.index(kind) if rotates else -1,
            activation=ACTIVATIONS[activation(config)],
            scale=float(attention.scaling),
            softcap=float(getattr(attention, "attn_logit_softcapping", None) or 0.0),
            residual=float(getattr(config, "residual_multiplier", 1.0)),
        )

    def _linear(self, module: Any) -> Matrix:
        return self._packed(module.weight.detach(), module.bias, self._quantize)

    def _split(self, module: Any, sizes: list[int]) -> list[Matrix]:
        biases = [None] * len(sizes) if module.bias is None else module.bias.detach().split(sizes)
        return [
            self._packed(part, bias, self._quantize)
            for part, bias in zip(module.weight.detach().split(sizes), biases, strict=True)
        ]

    def _packed(self, weight: Tensor, bias: Tensor | None, quantize: str | None) -> Matrix:
        """A matrix in panels, quantised or as it is stored. ValueError for weights that cannot be quantised."""
        outputs, inputs = weight.shape
        stored, source = TYPES[weight.dtype], weight if weight.stride(1) == 1 else weight.contiguous()
        kind = stored if quantize is None else QUANTIZED[quantize]
        size = self._library.sk_packed_bytes(kind, outputs, inputs)
        panels = self._chunks.take(size)
        shape = (source.data_ptr(), source.stride(0), outputs, inputs, panels.data_ptr())
        if quantize is None:
            self._library.sk_pack(kind, *shape)
        elif self._library.sk_quantize(kind, stored, *shape):
            raise ValueError(f"quantize={quantize!r} needs finite weights, none of them beyond the range of float16 times 127")
        self._kept.append(panels)
        self.bytes += size
        return Matrix(panels.data_ptr(), None if bias is None else self._floats(bias), outputs, inputs, kind)

    def _norm(self, module: Any) -> int:
        return self._floats(module.weight.detach().float() + self._recipe.norm_offset)

    def _floats(self, values: Tensor) -> int:
        """The address of a float32 copy."""
        held = values.detach().float().clone().contiguous()
        self._kept.append(held)
        return held.data_ptr()


def unsupported(model: Any, facts: Facts) -> str | None:
    """What the native engine cannot do of a model, in one sentence; None where it can do all."""
    kind = model.config.model_type
    if facts.device.type != "cpu":
        return f"the model is on {facts.device}, and the native engine runs on the CPU"
    if kind not in RECIPES:
        return f"the native engine does not know the family {kind} (it knows {', '.join(RECIPES)})"
    if activation(model.config) not in ACTIVATIONS:
        return f"the native engine does not know the activation {activation(model.config)}"
    for name, module in model.named_modules():
        if reason := _odd(module):
            return f"{name or type(model).__name__} {reason}"
    return None


def _odd(module: Any) -> str | None:
    """Why a module cannot be taken over by its weights alone."""
    for weight in module._parameters.values():
        if weight is not None and weight.dtype not in TYPES:
            return f"is stored in {weight.dtype}; the native engine reads float32, bfloat16 and float16"
    place = type(module).__module__
    if not place.startswith(("torch.nn.", "transformers.")):
        return f"is a {type(module).__name__} of {place}, and the native engine knows torch's and transformers' modules only"
    return None
