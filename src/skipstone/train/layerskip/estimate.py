"""Estimates the memory and time of a run on each GPU before it starts, from the recipe and the model's config alone.

Bytes follow from what FSDP2 and the early-exit loss keep (sharding.py, objective.py); time is 6 N D operations and those of the
exits at a share of the GPU's peak. Workspaces of kernels, fragments and communication are not counted.
"""

import copy
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM, LlamaConfig, PreTrainedConfig

from skipstone.engines.loading import load_tokenizer
from skipstone.models.derivation import find_layers
from skipstone.train import resolve_model
from skipstone.train.layerskip.arguments import LayerSkipArguments, TrainingRecipe, read
from skipstone.train.layerskip.run import config_from, shorten_config
from skipstone.train.layerskip.schedules import PRESETS, LayerSkipRecipe

FLOAT, HALF = 4, 2  # bytes of a number in float32, and in bfloat16
SIDE_NUMBERS = 2  # float32 numbers a token that a layer's two norms keep: 1 / the root of the mean square, each
PEAK_TFLOPS = 989.0  # an H100 SXM's peak in bfloat16 without sparsity, 10^12 operations a second (NVIDIA's data sheet)
MFU = 0.4  # share of the peak that training reaches: 38 to 43 % in table 4 of arXiv 2407.21783, on such GPUs
COPIES_OF_LOGITS = 3  # in float32, of one chunk: their logarithms, the gradient of these and their own
SAMPLES = 200  # steps of a run that means are taken over
STATES = {"adamw": 2, "sgd": 0}
"""Float32 numbers a parameter that an optimiser keeps, by the beginning of transformers' name of it."""
MUON_STATES = 1  # of a matrix inside the layers, with Muon
COLUMNS = ("plain", "checkpointed")
"""Without and with activation checkpointing."""


def _llama(hidden: int, mlp: int, **sizes: Any) -> LlamaConfig:
    """Llama 3 has 8 heads of keys and values in every size."""
    shared: dict[str, Any] = {"num_key_value_heads": 8, "vocab_size": 128256, "max_position_embeddings": 131072}
    return LlamaConfig(hidden_size=hidden, intermediate_size=mlp, **sizes, **shared)


SHAPES: dict[str, LlamaConfig] = {
    "1B": _llama(2048, 8192, num_hidden_layers=16, num_attention_heads=32, tie_word_embeddings=True),
    "8B": _llama(4096, 14336, num_hidden_layers=32, num_attention_heads=32),
    "70B": _llama(8192, 28672, num_hidden_layers=80, num_attention_heads=64),
}
"""Shapes of Llama 3.2 1B, and of Llama 3.1 8B and 70B: the config.json of meta-llama/Llama-3.2-1B, Llama-3.1-8B and -70B.
Table 3 of "The Llama 3 Herd of Models" (arXiv 2407.21783) has the last two."""


@dataclass(frozen=True)
class ModelShape:
    """Sizes of a model. layer: parameters of its largest layer; in_layers: of all layers; rest: of embeddings, final norm and
    LM head, tied ones once. mlp: inner size of a feed-forward block. queries, keys: their sizes over all heads."""

    layers: int
    layer: int
    in_layers: int
    rest: int
    hidden: int
    mlp: int
    heads: int
    queries: int
    keys: int
    vocabulary: int

    @property
    def parameters(self) -> int:
        """All of them."""
        return self.in_layers + self.rest

    def activations(self, half: bool, autocast: bool) -> int:
        """Bytes a token that a layer of Llama's kind keeps for its gradient. half: it computes in bfloat16; autocast: from
        weights in float32, so that the residual stream stays in float32.

        Two norms (input, normalised input, output), attention (queries, keys, values, output, logarithms of the sums), a gated
        feed-forward block (gate, its activation, up, their product). Attention weights are not kept.
        """
        width = HALF if half else FLOAT
        streams = (FLOAT, FLOAT if autocast or not half else HALF, width)
        norms = 2 * sum(streams) * self.hidden + SIDE_NUMBERS * FLOAT
        attention = width * 2 * (self.queries + self.keys) + FLOAT * self.heads
        return norms + attention + width * 4 * self.mlp

    def stream(self, half: bool, autocast: bool) -> int:
        """Bytes a token of a hidden state between layers."""
        return (HALF if half and not autocast else FLOAT) * self.hidden


def meta_model(config: PreTrainedConfig, layers: int | None = None) -> Any:
    """A model without weights. layers: only its first ones."""
    if layers is not None:
        config = copy.deepcopy(config)
        shorten_config(config, layers)
    with torch.device("meta"):
        return AutoModelForCausalLM.from_config(config, dtype=torch.float32)


def shape_of(model: Any) -> ModelShape:
    """The sizes of a model, which may be on the meta device. ValueError for experts and for configs without the usual sizes."""
    config = model.config.get_text_config(decoder=True)
    if any(getattr(config, name, None) for name in ("num_experts", "num_local_experts", "n_routed_experts")):
        raise ValueError(f"the estimate does not cover mixtures of experts, which this {config.model_type} model is")
    try:
        heads, hidden, mlp = config.num_attention_heads, config.hidden_size, config.intermediate_size
        layers = find_layers(model, config)[2]
    except AttributeError as error:
        raise ValueError(f"the estimate does not know the sizes of this {config.model_type} model: {error}") from error
    size = getattr(config, "head_dim", None) or hidden // heads
    each = [sum(parameter.numel() for parameter in layer.parameters()) for layer in layers]
    total = sum(parameter.numel() for parameter in model.parameters())
    keys = size * (getattr(config, "num_key_value_heads", None) or heads)
    sizes = (hidden, mlp, heads, size * heads, keys, config.vocab_size)
    return ModelShape(len(each), max(each), sum(each), total - sum(each), *sizes)


class MemoryEstimate:
    """What a run takes.

    settings: of the run. length: tokens of a row. teacher: shape of the teacher, None without one. speed: operations a
    second of one GPU.

    bytes: column -> what each GPU holds at the fullest moment of a step; "gathered" are weights that are whole for a while,
    and their gradients. seconds_a_step: column -> seconds. checkpoints: whether the recipe asks for activation checkpointing.
    all_logits: bytes of all exits' float32 logits if they existed together. tokens: of a pass of one GPU. exits, most_exits:
    exits that a step trains, in the mean and at most. loading: bytes of host memory that each process takes first.
    preset_rows: rows of a step of the paper's run, None without one."""

    preset_rows: int | None = None

    def __init__(
        self, shape: ModelShape, settings: LayerSkipArguments, gpus: int, length: int, teacher: ModelShape | None, speed: float
    ) -> None:
        self.shape, self.gpus, self._settings, self._teacher = shape, gpus, settings, teacher
        self._plan = LayerSkipRecipe(settings.dropout, settings.exits)
        self._plan.check(shape.layers, settings.max_steps)
        self._half, self._sharded = bool(settings.bf16 or settings.fp16), gpus > 1
        self._autocast = self._half and not self._sharded
        self.checkpoints = bool(getattr(settings, "activation_checkpointing", False))
        self.length, self.tokens, self.steps = length, settings.per_device_train_batch_size * length, settings.max_steps
        self.step_tokens = self.tokens * settings.gradient_accumulation_steps * gpus
        exits, run = self._plan.exits, (shape.layers, self.steps)
        chosen = exits.weights if exits.kl_weight is None else exits.active
        counts = [sum(value > 0 for value in chosen(step, *run)) for step in self._sampled()]
        self.exits, self.most_exits = fmean(counts), max(counts)
        self._kept = 1 - fmean(rate for step in self._sampled() for rate in self._plan.dropout.rates(step, *run))
        self.all_logits = self.tokens * shape.vocabulary * FLOAT * self.most_exits
        self.loading = FLOAT * (shape.parameters + (teacher.parameters if teacher else 0))
        self.bytes = {name: self._bytes(name == "checkpointed") for name in COLUMNS}
        tokens_a_gpu = self.step_tokens / gpus
        self.seconds_a_step = {name: self._operations(name == "checkpointed") * tokens_a_gpu / speed for name in COLUMNS}

    def to_json(self) -> dict[str, Any]:
        """The estimate for programs."""
        public = {name: value for name, value in vars(self).items() if not name.startswith("_")}
        return {"kind": "skipstone-train-estimate", **public, "shape": vars(self.shape)}

    def _bytes(self, checkpointing: bool) -> dict[str, int]:
        shape, width = self.shape, HALF if self._half else FLOAT
        share = FLOAT * -(-shape.parameters // self.gpus)  # of the parameters on each GPU
        gathered = 0
        if self._sharded:  # the root's group and its gradients, two layers (one comes while the other runs) and one's gradients
            gathered = width * (2 * shape.rest + 3 * shape.layer) + FLOAT * shape.layer  # gradients are summed in float32
        elif self._half:
            gathered = HALF * shape.parameters  # autocast's copies
        layer, between = shape.activations(self._half, self._autocast), shape.stream(self._half, self._autocast)
        depth = between * shape.layers + layer if checkpointing else layer * shape.layers
        copies = COPIES_OF_LOGITS + (self._plan.exits.kl_weight is not None or self._teacher is not None)
        parts = {
            "parameters": share,
            "gradients": share,
            "optimizer": FLOAT * self._states() // self.gpus,
            "gathered": gathered,
            "activations": self.tokens * (depth + between * self.most_exits),
            "logits": min(self._settings.loss_chunk, self.tokens) * shape.vocabulary * FLOAT * copies,
            "teacher": FLOAT * self._teacher.parameters if self._teacher else 0,
        }
        return {**parts, "total": sum(parts.values())}

    def _states(self) -> int:
        """Numbers that the optimiser keeps."""
        shape, name = self.shape, str(getattr(self._settings.optim, "value", self._settings.optim))
        if self._settings.muon_learning_rate is not None:
            if self._sharded:
                raise ValueError("Muon orthogonalises whole matrices, which FSDP cuts: leave muon_learning_rate out, for AdamW")
            return MUON_STATES * shape.in_layers + STATES["adamw"] * shape.rest
        if (kind := name.partition("_")[0]) in STATES and "bit" not in name:
            return STATES[kind] * shape.parameters
        raise ValueError(f"the estimate does not know what the optimiser {name} keeps: it knows {', '.join(STATES)} and Muon")

    def _sampled(self) -> Iterable[int]:
        """Steps that stand for the run: a whole rotation, or some from its beginning to its end."""
        steps = self._settings.max_steps
        if self._plan.exits.curriculum == "gradual" or self._plan.dropout.curriculum == "exponential":
            return range(0, steps, -(-steps // SAMPLES))
        return range(min(steps, self._plan.exits.dilation or max(1, self.shape.layers - 1)))

    def _operations(self, checkpointing: bool) -> float:
        """Floating-point operations a token: 2 a parameter forward, 4 backward, 2 once more with checkpointing, for the layers
        that are kept; a head has 8 at every exit, since its logits are computed twice. Attention's products are left out."""
        shape = self.shape
        head = shape.hidden * shape.vocabulary
        total = (8 if checkpointing else 6) * shape.in_layers * self._kept + 8 * head * self.exits
        if self._plan.exits.kl_weight is not None:
            total += 4 * head * (self.exits - 1)  # what they are to say
        if self._teacher is not None:
            total += 2 * self._teacher.in_layers + 4 * self._teacher.hidden * self._teacher.vocabulary * self.exits
        return total


def estimate(
    recipe: TrainingRecipe,
    base: Path,
    settings: LayerSkipArguments,
    gpus: int = 1,
    size: str | None = None,
    mfu: float = MFU,
    peak_tflops: float = PEAK_TFLOPS,
) -> MemoryEstimate:
    """Of a recipe that stands in `base`, on GPUs that share the model (FSDP2) where there are several. size: one of `SHAPES`,
    in the place of the recipe's model. Nothing is started, loaded or written.

    ValueError for a recipe that does not fit the model, and for models and optimisers that the formulas do not cover.
    """
    if gpus < 1 or not 0 < mfu <= 1 or peak_tflops <= 0:
        raise ValueError(f"expected 1 GPU or more, an MFU in (0, 1] and a positive peak, found {gpus}, {mfu} and {peak_tflops}")
    if size is not None and size not in SHAPES:
        raise ValueError(f"unknown shape {size!r}: expected one of {', '.join(SHAPES)}")
    config, layers = (SHAPES[size], None) if size else _config(recipe, base)
    if getattr(config, "quantization_config", None) is not None:
        raise ValueError("the model is quantised: weights are trained in floating point, start from the unquantised model")
    if recipe.model.lora is not None:
        raise ValueError("the estimate does not cover adapters (model.lora), whose parameters depend on where they are")
    shape = shape_of(meta_model(config, layers))
    teacher = None if recipe.teacher is None else shape_of(meta_model(_text_config(recipe.teacher, base)))
    found = MemoryEstimate(shape, settings, gpus, recipe.data.length, teacher, mfu * peak_tflops * 1e12)
    found.preset_rows = None if recipe.preset is None else PRESETS[recipe.preset].derived_batch_size
    return found


def _text_config(name: str, base: Path) -> PreTrainedConfig:
    return AutoConfig.from_pretrained(resolve_model(name, base)).get_text_config(decoder=True)


def _config(recipe: TrainingRecipe, base: Path) -> tuple[PreTrainedConfig, int | None]:
    """Of the model that a recipe begins with, and how many of its layers it takes."""
    start = recipe.model
    if start.recipe is not None:
        config, layers = _config(read(base / start.recipe), base)
        return config, start.layers or layers
    if start.pretrained is not None:
        return _text_config(start.pretrained, base), start.layers
    source, given = recipe.tokenizer, start.config or {}
    tokens = source.vocab_size or given.get("vocab_size")
    if source.pretrained is not None:
        tokens = len(load_tokenizer(resolve_model(source.pretrained, base)))
    if tokens is None:
        raise ValueError("a model from scratch needs tokenizer.pretrained or tokenizer.vocab_size")
    return config_from(given, tokens, {}), None


def format_estimate(found: MemoryEstimate) -> list[str]:
    """An estimate for people, a line a fact."""
    shape = found.shape
    hours = [seconds * found.steps / 3600 for seconds in found.seconds_a_step.values()]
    rows = [(label, *(found.bytes[column][name] / 1e9 for column in COLUMNS)) for name, label in _LABELS.items()]
    rows_per_step = found.step_tokens // found.length
    batch = f"a step has {rows_per_step} rows, {found.preset_rows} in the paper (derived: those of table 8 times its GPUs)"
    rows += [("seconds a step", *found.seconds_a_step.values()), (f"hours for {found.steps:,} steps", *hours)]
    return [
        f"{shape.parameters:,} parameters, {shape.in_layers:,} of them in {shape.layers} layers; {found.gpus} GPUs, "
        f"{found.tokens:,} tokens a pass and GPU, {found.step_tokens:,} a step",
        f"{'GB on each GPU':<36}{'plain':>10}{'activation checkpointing':>28}",
        *(f"{label:<36}{plain:>10.2f}{checkpointed:>28.2f}" for label, plain, checkpointed in rows),
        f"the recipe asks for the {'second' if found.checkpoints else 'first'} column (training.activation_checkpointing)",
        f"a step trains {found.exits:.1f} exits in the mean, {found.most_exits} at most; their logits in float32 would take "
        f"{found.all_logits / 1e9:.2f} GB together, and exist for loss_chunk positions of one exit at a time",
        *([] if found.preset_rows is None else [batch]),
        f"every process loads the whole model first: {found.loading / 1e9:.2f} GB of host memory each",
        "formulas, not measured on a GPU: without workspaces of kernels, fragments, communication and attention's products",
    ]


_LABELS = {
    "parameters": "parameters (float32)",
    "gradients": "gradients",
    "optimizer": "optimiser states",
    "gathered": "gathered or cast weights",
    "activations": "activations",
    "logits": "logits of a chunk",
    "teacher": "teacher",
    "total": "together",
}
