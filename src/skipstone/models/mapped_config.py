"""The config of a checkpoint, completed as transformers completes it, without importing transformers.

It knows the model types that the native engine runs. tests/models/test_mapped_model.py compares every field with transformers'.
"""

from collections.abc import Mapping
from typing import Any

from skipstone.models.layer_variants import ACTIVATIONS, LAYER_VARIANTS

_SIZES = ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads")
_COMMON: dict[str, Any] = {
    **dict(zip(_SIZES, (32000, 4096, 11008, 32, 32, None), strict=True)),
    **{"hidden_act": "silu", "max_position_embeddings": 2048, "rms_norm_eps": 1e-6, "tie_word_embeddings": False},
    **{"pad_token_id": None, "bos_token_id": 1, "eos_token_id": 2, "rope_parameters": None, "attention_bias": False},
}
_QWEN: dict[str, Any] = {
    **{"vocab_size": 151936, "intermediate_size": 22016, "num_key_value_heads": 32, "max_position_embeddings": 32768},
    **{"use_sliding_window": False, "sliding_window": 4096, "max_window_layers": 28, "layer_types": None},
    **{"bos_token_id": None, "eos_token_id": None},
}
_GEMMA: dict[str, Any] = {
    **{"head_dim": 256, "max_position_embeddings": 8192, "pad_token_id": 0, "eos_token_id": 1, "bos_token_id": 2},
    **{"tie_word_embeddings": True, "vocab_size": 256000},
}
_GEMMA2: dict[str, Any] = _GEMMA | {
    **{"hidden_size": 2304, "intermediate_size": 9216, "num_hidden_layers": 26, "num_attention_heads": 8},
    **{"num_key_value_heads": 4, "hidden_activation": "gelu_pytorch_tanh", "query_pre_attn_scalar": 256},
    **{"sliding_window": 4096, "layer_types": None, "final_logit_softcapping": 30.0, "attn_logit_softcapping": 50.0},
}
DEFAULTS: dict[str, dict[str, Any]] = {
    "llama": {"mlp_bias": False, "head_dim": None},
    "mistral": {
        **{"intermediate_size": 14336, "num_key_value_heads": 8, "max_position_embeddings": 131072, "sliding_window": 4096},
        "head_dim": None,
    },
    "qwen2": _QWEN,
    "qwen3": _QWEN | {"head_dim": 128},
    "smollm3": {
        **{"vocab_size": 128256, "hidden_size": 2048, "num_hidden_layers": 36, "num_attention_heads": 16},
        **{"num_key_value_heads": 4, "max_position_embeddings": 32768, "pad_token_id": 128004, "bos_token_id": 128000},
        **{"eos_token_id": 128001, "use_sliding_window": False, "sliding_window": None, "no_rope_layers": None},
        **{"no_rope_layer_interval": 4, "layer_types": None, "tie_word_embeddings": True, "mlp_bias": False},
    },
    "granite": {
        **{"mlp_bias": False, "embedding_multiplier": 1.0, "logits_scaling": 1.0, "residual_multiplier": 1.0},
        "attention_multiplier": 1.0,
    },
    "olmo2": {"vocab_size": 50304, "pad_token_id": 1, "bos_token_id": None, "eos_token_id": 50279, "rms_norm_eps": 1e-5},
    "phi3": {
        **{"vocab_size": 32064, "hidden_size": 3072, "intermediate_size": 8192, "max_position_embeddings": 4096},
        **{"original_max_position_embeddings": 4096, "rms_norm_eps": 1e-5, "eos_token_id": 32000, "pad_token_id": 32000},
        "sliding_window": None,
    },
    "gemma": _GEMMA
    | {
        **{"hidden_size": 3072, "intermediate_size": 24576, "num_hidden_layers": 28, "num_attention_heads": 16},
        **{"num_key_value_heads": 16, "hidden_act": "gelu_pytorch_tanh"},
    },
    "gemma2": _GEMMA2,
    "gemma3_text": _GEMMA2
    | {
        **{"vocab_size": 262208, "max_position_embeddings": 131072, "final_logit_softcapping": None},
        "attn_logit_softcapping": None,
    },
}
"""transformers' defaults by model type, over those of _COMMON."""
THETAS = {"smollm3": 2000000.0}
"""Bases of the rotary phases, where it is not 10000."""
ROPE_KEYS = {
    "default": frozenset({"rope_type", "rope_theta"}),
    "linear": frozenset({"rope_type", "rope_theta", "factor"}),
    "llama3": frozenset(
        {"rope_type", "rope_theta", "factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"}
    ),
    "longrope": frozenset(  # without defaults: of GGUF files
        {"rope_type", "rope_theta", "short_factor", "long_factor", "original_max_position_embeddings", "attention_factor"}
    ),
}
"""Supported kinds of rotary phases, and their parameters. Older configs write "type" for "rope_type"."""
HAVE_WINDOWS = ("mistral", "qwen2", "qwen3", "smollm3", "phi3", "gemma2", "gemma3_text")
"""Model types with layers that attend to a window."""
ALWAYS_NAME_KEY_HEADS = ("mistral", "gemma", "gemma2", "gemma3_text")
"""Model types without a default for `num_key_value_heads`: null."""
FULL, SLIDING = "full_attention", "sliding_attention"


class UnmappableError(Exception):
    """Why a checkpoint must be loaded through transformers, as the end of a sentence about it."""


class MappedConfig:
    """The fields of a config as attributes, as transformers' config of the model type has them.

    norm_offset: added to the stored weights of norms, as in `LayerVariant`; GGUF files store their sums.
    """

    sub_configs: Mapping[str, Any] = {}
    name_or_path = ""

    def __init__(self, values: Mapping[str, Any]) -> None:
        """values: of config.json. UnmappableError for another model type, or a field that is not supported here."""
        kind = values.get("model_type")
        if kind not in DEFAULTS:
            raise UnmappableError(f"has the type {kind!r}, which the native engine does not run")
        if reason := _unsupported_field(kind, values):
            raise UnmappableError(reason)
        self._values = dict(values)
        self.__dict__ |= {**_COMMON, **DEFAULTS[kind], "norm_offset": LAYER_VARIANTS[kind].norm_offset, **values}
        if self.num_key_value_heads is None:
            self.num_key_value_heads = self.num_attention_heads
        sizes = map(self.__dict__.get, (*_SIZES, "max_position_embeddings"))
        if any(type(size) is not int or size < 1 for size in sizes):
            raise UnmappableError("has sizes that are no positive numbers")
        if self.num_attention_heads % self.num_key_value_heads or self.hidden_size % self.num_attention_heads:
            raise UnmappableError("has sizes that do not fit each other")
        if getattr(self, "head_dim", None) is None:
            self.head_dim = self.hidden_size // self.num_attention_heads
        if not self.head_dim > 0 or not self.rms_norm_eps > 0:
            raise UnmappableError("has a head_dim or an rms_norm_eps that is not positive")
        if self.activation not in ACTIVATIONS:
            raise UnmappableError(f"has the activation {self.activation!r}")
        self._complete_layer_types()
        self._expect_usable_layer_types()
        self._complete_rotary_phases()

    def __getattr__(self, name: str) -> Any:
        raise AttributeError(f"a {type(self).__name__} of type {vars(self).get('model_type')} has no {name}")

    @property
    def activation(self) -> str:
        """The name of the MLPs' activation."""
        return self.hidden_activation if "hidden_activation" in vars(self) else self.hidden_act

    @property
    def variant(self) -> Any:
        """The type's `LayerVariant`."""
        return LAYER_VARIANTS[self.model_type]

    def get_text_config(self, decoder: bool = True) -> "MappedConfig":
        """This config, which has no others inside."""
        return self

    def to_dict(self) -> dict[str, Any]:
        """The values of config.json."""
        return dict(self._values)

    def _complete_layer_types(self) -> None:
        kind, layers = self.model_type, range(self.num_hidden_layers)
        if kind in ("qwen2", "qwen3") and not self.use_sliding_window:
            self.sliding_window = None
        if kind == "smollm3" and self.no_rope_layers is None:
            self.no_rope_layers = [int((layer + 1) % self.no_rope_layer_interval != 0) for layer in layers]
        if "layer_types" not in vars(self) or self.layer_types is not None:
            return
        if kind == "smollm3":
            slides = self.use_sliding_window and self.sliding_window is not None
            sliding = [bool(slides and not rotates) for rotates in self.no_rope_layers[: len(layers)]]
        elif kind in ("gemma2", "gemma3_text"):
            period = 2 if kind == "gemma2" else self._values.get("sliding_window_pattern", 6)
            sliding = [(layer + 1) % period != 0 for layer in layers]
        else:
            sliding = [self.sliding_window is not None and layer >= self.max_window_layers for layer in layers]
        self.layer_types = [SLIDING if one else FULL for one in sliding]

    @property
    def kinds_of_layers(self) -> list[str]:
        """The layer type of every layer, also for model types whose layers are all alike."""
        if getattr(self, "layer_types", None) is not None:
            return self.layer_types[: self.num_hidden_layers]
        return [SLIDING if getattr(self, "sliding_window", None) is not None else FULL] * self.num_hidden_layers

    def _expect_usable_layer_types(self) -> None:
        kinds = set(self.kinds_of_layers)
        if len(self.kinds_of_layers) != self.num_hidden_layers:
            raise UnmappableError("has fewer layer types than layers")
        if not kinds <= {FULL, SLIDING} or (SLIDING in kinds and not self.sliding_window):
            raise UnmappableError("has layers of other types, or windows without a size")
        if SLIDING in kinds and self.model_type not in HAVE_WINDOWS:
            raise UnmappableError("has windows that its model type does not have")

    def _complete_rotary_phases(self) -> None:
        """Set `rope_parameters` in transformers' present form. UnmappableError for an unsupported kind."""
        scaling, given = self._values.get("rope_scaling"), self._values.get("rope_parameters")
        if self.model_type == "gemma3_text":
            given = given or {}
            bases = self._values.get("rope_theta", 1000000.0), self._values.get("rope_local_base_freq", 10000.0)
            full = {"rope_type": "default", **(given.get(FULL) or {}), **(scaling or {})}
            self.rope_parameters = {FULL: full, SLIDING: {"rope_type": "default", **(given.get(SLIDING) or {})}}
            for kind, base in zip((FULL, SLIDING), bases, strict=True):
                self.rope_parameters[kind].setdefault("rope_theta", base)
        else:
            self.rope_parameters = dict(scaling or given or {})
            base = self._values.get("rope_theta", THETAS.get(self.model_type, 10000.0))
            self.rope_parameters.setdefault("rope_theta", base)
            factor = self._values.get("partial_rotary_factor", 1.0 if self.model_type == "phi3" else None)
            if factor is not None:
                self.rope_parameters.setdefault("partial_rotary_factor", factor)
        for parameters in self.rotary_kinds.values():
            kind = parameters.setdefault("rope_type", parameters.get("type", "default"))
            if kind == "llama3":
                parameters.setdefault("original_max_position_embeddings", self.max_position_embeddings)
            if kind not in ROPE_KEYS or not ROPE_KEYS[kind] <= parameters.keys():
                raise UnmappableError(f"has rotary phases of the kind {kind!r}, or lacks their parameters")
            if self.model_type != "phi3" and parameters.get("partial_rotary_factor", 1.0) != 1.0:
                raise UnmappableError("has partial rotary phases, which its model type does not have")

    @property
    def rotary_kinds(self) -> dict[str, dict[str, Any]]:
        """The parameters of the rotary phases by layer type; by "" if all layers have the same."""
        return self.rope_parameters if self.model_type == "gemma3_text" else {"": self.rope_parameters}


def _unsupported_field(kind: str, values: Mapping[str, Any]) -> str | None:
    """Why a config must be read by transformers, or None."""
    if values.get("quantization_config") is not None:
        return "is quantised"
    if values.get("use_bidirectional_attention") or values.get("per_layer_config"):
        return "has layers that attend or are built in a way of their own"
    if values.get("num_key_value_heads", 1) is None and kind in ALWAYS_NAME_KEY_HEADS:
        return "has no number of key and value heads"
    if values.get("layer_types") is not None and "layer_types" not in DEFAULTS[kind]:
        return "has layer types that its model type does not have"
    return None
