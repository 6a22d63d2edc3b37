"""What a run will take on each GPU, in bytes and in time, before it starts: from the recipe and the model's config alone.

Bytes follow from what FSDP2 and the early-exit loss keep (sharding.py, objective.py); time is 6 N D operations and those of the
exits at a share of the GPU's peak. Workspaces of kernels, fragments and communication are not counted.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from transformers import AutoConfig, PreTrainedConfig

from skipstone.engines.loading import load_tokenizer
from skipstone.train import beside
from skipstone.train.layerskip.arguments import LayerSkipArguments, TrainingRecipe, read
from skipstone.train.layerskip.run import config_from
from skipstone.train.layerskip.schedules import LayerSkipRecipe
from skipstone.train.layerskip.shapes import FLOAT, HALF, SHAPES, ModelShape, meta_model, shape_of

PEAK_TFLOPS = 989.0  # an H100 SXM's peak in bfloat16 without sparsity, 10^12 operations a second (NVIDIA's data sheet)
MFU = 0.4  # share of the peak that training reaches: 38 to 43 % in table 4 of arXiv 2407.21783, on such GPUs
COPIES_OF_LOGITS = 3  # in float32, of one chunk: their logarithms, the gradient of these and their own
SAMPLES = 200  # steps of a run that means are taken over
STATES = {"adamw": 2, "sgd": 0}
"""Float32 numbers a parameter that an optimiser keeps, by the beginning of transformers' name of it."""
MUON_STATES = 1  # of a matrix inside the layers, with Muon


@dataclass(frozen=True)
class GpuBytes:
    """On each GPU at the fullest moment of a step. gathered: weights that are whole for a while, and their gradients."""

    parameters: int
    gradients: int
    optimizer: int
    gathered: int
    activations: int
    logits: int
    teacher: int

    @property
    def total(self) -> int:
        """All together."""
        return sum(vars(self).values())


@dataclass(frozen=True)
class MemoryEstimate:
    """kept, checkpointed: without and with activation checkpointing. checkpoints: whether the recipe asks for the latter.
    all_logits: bytes of all exits' float32 logits if they existed together. tokens: of a pass of one GPU. exits, most_exits:
    that a step trains, in the mean and at most. seconds: a step, without and with checkpointing. loading: bytes of host memory
    that each process takes first."""

    shape: ModelShape
    gpus: int
    kept: GpuBytes
    checkpointed: GpuBytes
    checkpoints: bool
    all_logits: int
    tokens: int
    step_tokens: int
    steps: int
    exits: float
    most_exits: int
    seconds: tuple[float, float]
    loading: int


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
    plan = LayerSkipRecipe(settings.dropout, settings.exits)
    plan.check(shape.layers, settings.max_steps)
    run = _RunNumbers(shape, settings, plan, gpus, recipe.data.length, _teacher(recipe, base))
    return run.estimate(mfu * peak_tflops * 1e12)


def _config(recipe: TrainingRecipe, base: Path) -> tuple[PreTrainedConfig, int | None]:
    """Of the model that a recipe begins with, and how many of its layers it takes."""
    start = recipe.model
    if start.recipe is not None:
        before = read(base / start.recipe)
        config, layers = _config(before, base)
        return config, start.layers or layers
    if start.pretrained is not None:
        return AutoConfig.from_pretrained(beside(start.pretrained, base)).get_text_config(decoder=True), start.layers
    source = recipe.tokenizer
    tokens = source.vocab_size or (len(load_tokenizer(beside(source.pretrained, base))) if source.pretrained else None)
    given = start.config or {}
    if tokens is None and "vocab_size" not in given:
        raise ValueError("a model from scratch needs tokenizer.pretrained or tokenizer.vocab_size")
    return config_from(given, tokens or given["vocab_size"], {}), None


def _teacher(recipe: TrainingRecipe, base: Path) -> ModelShape | None:
    if recipe.teacher is None:
        return None
    return shape_of(meta_model(AutoConfig.from_pretrained(beside(recipe.teacher, base)).get_text_config(decoder=True)))


class _RunNumbers:
    """A run's numbers on the way to its estimate."""

    def __init__(
        self,
        shape: ModelShape,
        settings: LayerSkipArguments,
        plan: LayerSkipRecipe,
        gpus: int,
        length: int,
        teacher: ModelShape | None,
    ) -> None:
        self.shape, self.settings, self.plan, self.gpus, self.teacher = shape, settings, plan, gpus, teacher
        self.half, self.sharded = bool(settings.bf16 or settings.fp16), gpus > 1
        self.autocast = self.half and not self.sharded
        self.tokens = settings.per_device_train_batch_size * length
        self.step_tokens = self.tokens * settings.gradient_accumulation_steps * gpus
        self.exits, self.most_exits = self._exits()

    def estimate(self, speed: float) -> MemoryEstimate:
        """speed: operations a second of one GPU."""
        work = self._operations(False), self._operations(True)
        each = tuple(operations * self.step_tokens / (self.gpus * speed) for operations in work)
        checkpoints = bool(getattr(self.settings, "activation_checkpointing", False))
        return MemoryEstimate(
            shape=self.shape,
            gpus=self.gpus,
            kept=self._bytes(False),
            checkpointed=self._bytes(True),
            checkpoints=checkpoints,
            all_logits=self.tokens * self.shape.vocabulary * FLOAT * self.most_exits,
            tokens=self.tokens,
            step_tokens=self.step_tokens,
            steps=self.settings.max_steps,
            exits=self.exits,
            most_exits=self.most_exits,
            seconds=(each[0], each[1]),
            loading=FLOAT * (self.shape.parameters + (self.teacher.parameters if self.teacher else 0)),
        )

    def _bytes(self, checkpointing: bool) -> GpuBytes:
        shape, width = self.shape, HALF if self.half else FLOAT
        share = -(-shape.parameters // self.gpus)  # parameters on each GPU
        gathered = 0
        if self.sharded:  # the root's group and its gradients, two layers (one comes while the other runs) and one's gradients
            gathered = width * (2 * shape.rest + 3 * shape.layer) + FLOAT * shape.layer  # gradients are summed in float32
        elif self.half:
            gathered = HALF * shape.parameters  # autocast's copies
        layer = shape.activations(self.half, self.autocast)
        between = shape.stream(self.half, self.autocast)
        depth = between * shape.layers + layer if checkpointing else layer * shape.layers
        chunk = min(self.settings.loss_chunk, self.tokens)
        copies = COPIES_OF_LOGITS + (self.plan.exits.kl_weight is not None or self.teacher is not None)
        return GpuBytes(
            parameters=FLOAT * share,
            gradients=FLOAT * share,
            optimizer=FLOAT * self._states() // self.gpus,
            gathered=gathered,
            activations=self.tokens * (depth + between * self.most_exits),
            logits=chunk * shape.vocabulary * FLOAT * copies,
            teacher=FLOAT * self.teacher.parameters if self.teacher else 0,
        )

    def _states(self) -> int:
        """Numbers that the optimiser keeps."""
        shape, name = self.shape, str(getattr(self.settings.optim, "value", self.settings.optim))
        if self.settings.muon_learning_rate is not None:
            if self.sharded:
                raise ValueError("Muon orthogonalises whole matrices, which FSDP cuts: leave muon_learning_rate out, for AdamW")
            return MUON_STATES * shape.in_layers + STATES["adamw"] * shape.rest
        kind = next((kind for kind in STATES if name.startswith(kind) and "bit" not in name), None)
        if kind is None:
            raise ValueError(
                f"the estimate does not know what the optimiser {name} keeps: it knows {', '.join(STATES)} and Muon"
            )
        return STATES[kind] * shape.parameters

    def _sampled(self) -> Iterable[int]:
        """Steps that stand for the run: a whole rotation, or some from its beginning to its end."""
        steps = self.settings.max_steps
        if self.plan.exits.curriculum == "gradual" or self.plan.dropout.curriculum == "exponential":
            return range(0, steps, -(-steps // SAMPLES))
        return range(min(steps, self.plan.exits.dilation or max(1, self.shape.layers - 1)))

    def _exits(self) -> tuple[float, int]:
        """How many exits a step trains: in the mean, and at most."""
        exits, layers, steps = self.plan.exits, self.shape.layers, self.settings.max_steps
        if exits.kl_weight is None:
            counts = [sum(weight > 0 for weight in exits.weights(step, layers, steps)) for step in self._sampled()]
        else:
            counts = [sum(exits.active(step, layers, steps)) for step in self._sampled()]
        return sum(counts) / len(counts), max(counts)

    def _operations(self, checkpointing: bool) -> float:
        """Floating-point operations a token: 2 a parameter forward, 4 backward, 2 once more with checkpointing, for the layers
        that are kept; a head has 8 at every exit, since its logits are computed twice. Attention's products are left out."""
        shape, steps = self.shape, list(self._sampled())
        rates = [sum(self.plan.dropout.rates(step, shape.layers, self.settings.max_steps)) / shape.layers for step in steps]
        kept = 1 - sum(rates) / len(rates)
        head = shape.hidden * shape.vocabulary
        total = (8 if checkpointing else 6) * shape.in_layers * kept + 8 * head * self.exits
        if self.plan.exits.kl_weight is not None:
            total += 4 * head * (self.exits - 1)  # what they are to say
        if self.teacher is not None:
            total += 2 * self.teacher.in_layers + 4 * self.teacher.hidden * self.teacher.vocabulary * self.exits
        return total


def told(found: MemoryEstimate) -> list[str]:
    """An estimate for people, a line a fact."""
    shape, bytes_of = found.shape, {False: found.kept, True: found.checkpointed}
    lines = [
        f"{shape.parameters:,} parameters, {shape.in_layers:,} of them in {shape.layers} layers; {found.gpus} GPUs, "
        f"{found.tokens:,} tokens a pass and GPU, {found.step_tokens:,} a step",
        f"{'GB on each GPU':<36}{'plain':>10}{'activation checkpointing':>28}",
    ]
    for name, label in _LABELS.items():
        one, other = (getattr(each, name) / 1e9 for each in bytes_of.values())
        lines.append(f"{label:<36}{one:>10.2f}{other:>28.2f}")
    a_step = [f"{seconds:.2f}" for seconds in found.seconds]
    lines += [
        f"{'seconds a step':<36}{a_step[0]:>10}{a_step[1]:>28}",
        f"{f'hours for {found.steps:,} steps':<36}{_hours(found, 0):>10}{_hours(found, 1):>28}",
        f"the recipe asks for the {'second' if found.checkpoints else 'first'} column (training.activation_checkpointing)",
        f"a step trains {found.exits:.1f} exits in the mean, {found.most_exits} at most; their logits in float32 would take "
        f"{found.all_logits / 1e9:.2f} GB together, and exist for loss_chunk positions of one exit at a time",
        f"every process loads the whole model first: {found.loading / 1e9:.2f} GB of host memory each",
        "formulas, not measured on a GPU: without workspaces of kernels, fragments, communication and attention's products",
    ]
    return lines


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


def _hours(found: MemoryEstimate, column: int) -> str:
    return f"{found.seconds[column] * found.steps / 3600:.2f}"


def as_json(found: MemoryEstimate) -> dict[str, Any]:
    """An estimate for programs."""
    apart = ("shape", "kept", "checkpointed", "seconds")
    whole = {name: value for name, value in vars(found).items() if name not in apart}
    columns = {"plain": found.kept, "checkpointed": found.checkpointed}
    memory = {name: {**vars(each), "total": each.total} for name, each in columns.items()}
    seconds = {"plain": found.seconds[0], "checkpointed": found.seconds[1]}
    return {"kind": "skipstone-train-estimate", **whole, "shape": vars(found.shape), "bytes": memory, "seconds_a_step": seconds}
