"""A decoder on mapped weight files. Only the native engine runs it: its layers have no forward.

The modules and parameters have transformers' names. Nothing here imports transformers, which takes seconds.
"""

import re
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from skipstone.models.families import Family, InputStep, RotarySource
from skipstone.models.gguf.weights import GgufWeights
from skipstone.models.layer_variants import ACTIVATIONS
from skipstone.models.mapped_config import SLIDING, MappedConfig, UnmappableError
from skipstone.models.mapped_files import read_bytes
from skipstone.models.packed_weight import PackedWeight
from skipstone.models.weight_files import DTYPES, FilePlace, WeightFiles

QKV_BIASES = ("qwen2",)
"""Model types whose queries, keys and values always have biases, and whose other matrices never have."""
FURTHER_TENSORS = re.compile(r"(^|\.)rotary_emb\.inv_freq$|^rope_(freqs|factors_short|factors_long)\.weight$")
"""Tensors that are no weights: rotary frequencies of older checkpoints, and GGUF's divisors, which the config has as well."""


class Part(nn.Module):
    """A decoder, a layer or a sublayer: has its parts and numbers as attributes."""


class Mlp(Part):
    """A gated MLP: gate, up and down, or one matrix for gate and up, and down."""

    def forward(self, hidden: Tensor) -> Tensor:
        """[..., d] -> [..., d], with three matrices."""
        own: Any = self
        return own.down_proj(own.act_fn(own.gate_proj(hidden)) * own.up_proj(hidden))


class Activation(nn.Module):
    """An MLP's activation. number: in the C ABI."""

    def __init__(self, name: str) -> None:
        super().__init__()
        self.number = ACTIVATIONS[name]

    def forward(self, gate: Tensor) -> Tensor:
        return F.gelu(gate, approximate="tanh") if self.number else F.silu(gate)


class Linear(nn.Linear):
    """A linear layer of given weights. torch's own constructor draws random ones."""

    def __init__(self, weight: nn.Parameter, bias: nn.Parameter | None = None) -> None:
        nn.Module.__init__(self)
        self.out_features, self.in_features = weight.shape
        self.weight = weight
        self.register_parameter("bias", bias)


class Embedding(nn.Embedding):
    """An embedding of given weights."""

    def __init__(self, weight: nn.Parameter) -> None:
        nn.Module.__init__(self)
        self.num_embeddings, self.embedding_dim = weight.shape
        self.weight = weight

    def forward(self, input: Tensor) -> Tensor:
        return F.embedding(input, self.weight)


class Norm(nn.Module):
    """An RMS norm's weight and epsilon. offset: added to the weight."""

    def __init__(self, weight: nn.Parameter, epsilon: float, offset: float) -> None:
        super().__init__()
        self.weight, self.variance_epsilon, self.offset = weight, epsilon, offset

    def forward(self, hidden: Tensor) -> Tensor:
        """[..., d] -> [..., d], computed in float32."""
        wide = hidden.float()
        normed = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + self.variance_epsilon)
        return (self.weight + self.offset) * normed.to(hidden.dtype)


class RotaryPhases(nn.Module):
    """cos and sin of positions, by layer type if these differ (Gemma 3). The arithmetic is transformers', operation by
    operation, so that the phases have the same bits."""

    def __init__(self, config: MappedConfig) -> None:
        super().__init__()
        self._scales = {kind: parameters.get("attention_factor", 1.0) for kind, parameters in config.rotary_kinds.items()}
        for kind, parameters in config.rotary_kinds.items():
            frequencies = inverse_frequencies(parameters, config.head_dim)
            self.register_buffer(f"{kind}_inv_freq" if kind else "inv_freq", frequencies, persistent=False)

    def forward(self, like: Tensor, positions: Tensor, kind: str = "") -> tuple[Tensor, Tensor]:
        """cos and sin [..., n, size] in the dtype of `like`. positions: [..., n] int64."""
        frequencies: Any = getattr(self, f"{kind}_inv_freq" if kind else "inv_freq")
        phases = positions[..., None].float() * frequencies.to(like.device)
        phases = torch.cat((phases, phases), dim=-1)
        cos, sin = phases.cos() * self._scales[kind], phases.sin() * self._scales[kind]
        return cos.to(like.dtype), sin.to(like.dtype)


def inverse_frequencies(parameters: dict[str, Any], head_dim: int) -> Tensor:
    """[size / 2] float32 (Su et al., arXiv 2104.09864, section 3.2.2; "llama3": Llama 3.1's interpolation of long waves;
    "longrope": Ding et al., arXiv 2402.13753)."""
    size = int(head_dim * parameters.get("partial_rotary_factor", 1.0))
    exponents = torch.arange(0, size, 2, dtype=torch.float32, device="cpu") / size
    frequencies = 1.0 / (parameters["rope_theta"] ** exponents)
    if parameters["rope_type"] == "linear":
        return frequencies / parameters["factor"]
    if parameters["rope_type"] == "longrope":  # transformers' operations; requests end where long texts begin
        divisors = torch.tensor(parameters["short_factor"], dtype=torch.float32, device="cpu")
        return 1.0 / (divisors * parameters["rope_theta"] ** exponents)
    if parameters["rope_type"] != "llama3":
        return frequencies
    factor, low, high = (parameters[name] for name in ("factor", "low_freq_factor", "high_freq_factor"))
    length = parameters["original_max_position_embeddings"]
    waves = 2 * torch.pi / frequencies
    scaled = torch.where(waves > length / low, frequencies / factor, frequencies)
    smooth = (length / waves - low) / (high - low)
    between = ~(waves < length / high) * ~(waves > length / low)
    return torch.where(between, (1 - smooth) * scaled / factor + smooth * scaled, scaled)


def family_of(config: Any, kinds: list[str]) -> Family:
    """The family of a model type that the native engine runs. kinds: layer type of every layer."""
    depth, kind = len(kinds), config.model_type
    by_type = kind == "gemma3_text"
    softcap = getattr(config, "final_logit_softcapping", None)
    logits: Any = ("softcap", "final_logit_softcapping") if softcap else ("", "")
    return Family(
        entering=(InputStep("embed_tokens", "tokens"),),
        input_scale="embedding_multiplier" if kind == "granite" else None,
        logits=("divide", "logits_scaling") if kind == "granite" else logits,
        rotary=tuple(RotarySource("rotary_emb", one if by_type else "") for one in kinds),
        returns=((2, 0),) * depth,
        reaches=tuple("sliding" if one == SLIDING else "full" for one in kinds),
    )


class OverwrittenCheckpointError(OSError):
    """A mapped checkpoint has other values than when it was loaded."""


class MappedModel(nn.Module):
    """A causal language model without transformers. UnmappableError if the files have other tensors than the config says.

    config: `MappedConfig`. generation_config: its generation defaults. files: the mapped checkpoint. places: where the files
    have a matrix, which nobody changes. caches_panels: quantised panels may be read from the disk's cache, and written there.
    report_packed: an engine calls it with the number of weights in each matrix that it has packed. has_forward: the eager
    engine can run it, too. shared_panels: another model's panels of weights that are this one's, too, by the weights' ids.
    Weights keep the types of the files. widens_to: the dtype that the engine widens them to, the model's; None if it computes
    every type as it is stored.
    """

    name_or_path = ""
    has_forward = False
    shared_panels: Mapping[int, Any] = {}
    report_packed: Callable[[int], None] | None = None

    def __init__(
        self, config: MappedConfig, files: WeightFiles | GgufWeights, generation_config: Any, dtype: torch.dtype | None = None
    ) -> None:
        """dtype: of the model; None for the config's, else that of the files. A GGUF file's is float32."""
        super().__init__()
        self.config, self.files, self.generation_config, self.caches_panels = config, files, generation_config, True
        self.places: dict[Tensor, FilePlace] = {}
        self._dtype = torch.float32 if isinstance(files, GgufWeights) else dtype or _stored_dtype(config, files)
        self.widens_to = None if isinstance(files, GgufWeights) else self._dtype
        self._unread = set(files.names)
        self._build(config)
        if left := [name for name in self._unread if not FURTHER_TENSORS.search(name)]:
            raise UnmappableError(f"has tensors that are not in its config, such as {left[0]}")
        self.eval()

    def _build(self, config: MappedConfig) -> None:
        """Make the decoder and the LM head of the files' tensors."""
        self.model = self._decoder(config)
        self.lm_head = Linear(self.model.embed_tokens.weight)
        if not config.tie_word_embeddings:
            self.lm_head = self._linear("lm_head", config.vocab_size, config.hidden_size)
        elif "lm_head.weight" in self.files and not self.files.are_equal("lm_head.weight", "model.embed_tokens.weight"):
            raise UnmappableError("has a tied LM head of other values")
        self._unread.discard("lm_head.weight")

    @property
    def family(self) -> Family:
        """What surrounds its layers."""
        return family_of(self.config, self.config.kinds_of_layers)

    def expect_unwritten_files(self) -> None:
        """OverwrittenCheckpointError if the checkpoint was overwritten while it was mapped: embeddings and later copies are
        read from it."""
        if not self.files.are_unwritten():
            name = self.config.name_or_path
            raise OverwrittenCheckpointError(f"the checkpoint {name} was overwritten while it was in use: load it again")

    def stored_values(self) -> Iterator[tuple[str, Any]]:
        """Names and values of all weights. What is read here leaves the memory again."""
        stored = self.files.mapped()
        return ((name, stored[name]) for name, _ in self.named_parameters())

    @property
    def dtype(self) -> torch.dtype:
        """Of the weights."""
        return self._dtype

    @property
    def device(self) -> torch.device:
        """The CPU."""
        return torch.device("cpu")

    def get_decoder(self) -> Any:
        """The module that owns the layers."""
        return self.model

    def get_input_embeddings(self) -> nn.Embedding:
        """The input embedding."""
        return self.model.embed_tokens

    def get_output_embeddings(self) -> Linear:
        """The LM head."""
        return self.lm_head

    def can_generate(self) -> bool:
        """Yes, as transformers' causal language models."""
        return True

    def _weight(self, name: str, shape: tuple[int, ...]) -> nn.Parameter:
        if name not in self.files:
            raise UnmappableError(f"lacks {name}")
        stored = self.files[name]
        if stored.shape != shape:
            raise UnmappableError(f"has {name} of shape {list(stored.shape)}, expected {list(shape)}")
        if self._dtype not in (stored.dtype, torch.float32):
            raise UnmappableError(f"has {name} in {stored.dtype}, expected {self._dtype}")
        self._unread.discard(name)
        place = self.files.file_place(name)
        if len(shape) == 1 and place is not None:
            stored, place = torch.frombuffer(read_bytes(*place, stored.nbytes), dtype=stored.dtype), None
        weight: Any = stored if isinstance(stored, PackedWeight) else nn.Parameter(stored, requires_grad=False)
        if place is not None:
            self.places[weight] = place
        return weight

    def _linear(self, name: str, outputs: int, inputs: int, bias: bool = False) -> Linear:
        weight = self._weight(f"{name}.weight", (outputs, inputs))
        return Linear(weight, self._weight(f"{name}.bias", (outputs,)) if bias else None)

    def _norm(self, name: str, size: int) -> Norm:
        return Norm(self._weight(f"{name}.weight", (size,)), self.config.rms_norm_eps, self.config.norm_offset)

    def _decoder(self, config: MappedConfig) -> Any:
        decoder: Any = Part()
        weight = self._weight("model.embed_tokens.weight", (config.vocab_size, config.hidden_size))
        decoder.embed_tokens = Embedding(weight)
        if config.variant.scales_embeddings:
            scale = torch.tensor(config.hidden_size**0.5, dtype=self._dtype, device="cpu")  # rounded, as in transformers
            decoder.embed_tokens.register_buffer("embed_scale", scale, persistent=False)
        decoder.layers = nn.ModuleList(self._layer(f"model.layers.{index}", index) for index in range(config.num_hidden_layers))
        decoder.norm = self._norm("model.norm", config.hidden_size)
        decoder.rotary_emb = RotaryPhases(config)
        if config.model_type == "granite":
            decoder.embedding_multiplier = config.embedding_multiplier
        return decoder

    def _layer(self, name: str, index: int) -> nn.Module:
        layer: Any = Part()
        layer.self_attn, layer.mlp = self._attention(f"{name}.self_attn", index), self._mlp(f"{name}.mlp")
        for norm in self.config.variant.norms.values():
            setattr(layer, norm, self._norm(f"{name}.{norm}", self.config.hidden_size))
        if self.config.model_type == "granite":
            layer.residual_multiplier = self.config.residual_multiplier
        return layer

    def _attention(self, name: str, index: int, parts: int = 1) -> nn.Module:
        """parts: number of states that queries, keys and values are made of."""
        config, attention = self.config, Part()
        width, size = config.hidden_size, config.head_dim
        inputs = parts * width
        queries, keys = config.num_attention_heads * size, config.num_key_value_heads * size
        has_bias = bool(config.attention_bias) and config.model_type not in ("mistral", "qwen2", "phi3")
        for part, outputs in (("q_proj", queries), ("k_proj", keys), ("v_proj", keys)):
            if not config.variant.fused:
                bias = has_bias or config.model_type in QKV_BIASES
                setattr(attention, part, self._linear(f"{name}.{part}", outputs, inputs, bias))
        if config.variant.fused:
            attention.qkv_proj = self._linear(f"{name}.qkv_proj", queries + 2 * keys, inputs)
        attention.o_proj = self._linear(f"{name}.o_proj", width, queries, has_bias)
        if config.variant.query_norm:
            whole = config.variant.query_norm == "whole"
            attention.q_norm = self._norm(f"{name}.q_norm", queries if whole else size)
            attention.k_norm = self._norm(f"{name}.k_norm", keys if whole else size)
        numbers: Any = attention
        numbers.head_dim, numbers.scaling = size, _score_scale(config)
        if config.model_type in ("gemma2", "gemma3_text"):
            numbers.attn_logit_softcapping = config.attn_logit_softcapping
        if config.model_type == "smollm3":
            numbers.use_rope = config.no_rope_layers[index]
        return attention

    def _mlp(self, name: str) -> nn.Module:
        config, mlp = self.config, Mlp()
        width, inner, bias = config.hidden_size, config.intermediate_size, bool(getattr(config, "mlp_bias", False))
        if config.variant.fused:
            mlp.gate_up_proj = self._linear(f"{name}.gate_up_proj", 2 * inner, width)
        else:
            mlp.gate_proj = self._linear(f"{name}.gate_proj", inner, width, bias)
            mlp.up_proj = self._linear(f"{name}.up_proj", inner, width, bias)
        mlp.down_proj = self._linear(f"{name}.down_proj", width, inner, bias)
        setattr(mlp, config.variant.activation, Activation(config.activation))
        return mlp


def _score_scale(config: MappedConfig) -> float:
    """Of the attention's scores."""
    if config.model_type == "granite":
        return config.attention_multiplier
    return float(getattr(config, "query_pre_attn_scalar", config.head_dim)) ** -0.5


def _stored_dtype(config: MappedConfig, files: WeightFiles) -> torch.dtype:
    """The dtype that transformers' "auto" takes: the config's, else that of the first floating-point tensor."""
    named = getattr(config, "dtype", None) or getattr(config, "torch_dtype", None)
    if named is not None:
        dtype = getattr(torch, str(named).removeprefix("torch."), None)
        if dtype is None or dtype not in DTYPES.values():
            raise UnmappableError(f"has the dtype {named!r}")
        return dtype
    return next((files[name].dtype for name in files.names if name in files), torch.float32)
