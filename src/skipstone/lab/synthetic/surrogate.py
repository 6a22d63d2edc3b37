"""Synthetic models and their benchmark: random weights of a given shape; a part agrees with the whole at a given rate.

The part is the first E layers, or all sublayers outside a uniform skip set. Such models show how much of an expected speed-up
the engine delivers on this machine, without a trained model. No result is about a language model, and every output says so.

Construction: a Llama with weights of spread GAIN / sqrt(fan-in), so that attention is sharp enough for the next token to depend
on the context and greedy text does not loop at once. The head's logits have a spread of SHARPNESS (about four nats of entropy).
The output projections of all sublayers outside the part are multiplied by one factor, found by bisection. At 0 these sublayers
are the identity and the part always agrees with the model; at 1 it hardly ever does.

The two largest of 128,000 such logits lie closer together than a language model's. In bfloat16, passes over one row and over
several then often choose differently. So with `sure`, a share of the vocabulary gets a successor that is nearly certain: the
embeddings are as large as the output of half of the layers, and the successor's row of the (untied) head has a part along the
embedding (SURENESS). The share of such tokens in a text may be another one.
"""

import json
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import DynamicCache, LlamaConfig, LlamaForCausalLM

from skipstone.engines.choose_engine import EngineOptions, attach
from skipstone.hf import api
from skipstone.lab.bench.plan import BenchPlan, resolved
from skipstone.lab.bench.prompts import BenchModel, TaskRun
from skipstone.lab.bench.report.report import describe_calibration
from skipstone.lab.bench.run import Say, enter, measure_task
from skipstone.lab.bench.run_file import RunFile
from skipstone.lab.tasks.data_sets import DatasetLocation, Task
from skipstone.lab.tasks.dialogue import PromptBuilder, TaskConversation
from skipstone.lab.timing import machine
from skipstone.lab.timing.statistics import LOOPING, IntervalEstimate, rate, repeated_share
from skipstone.methods.drafting.layer_sets import LayerSetSpace
from skipstone.models.device_map import usable_device
from skipstone.models.generation_config import OWN_FIELD
from skipstone.models.passes import SkipSet

GAIN = 2.0  # spread of the weights, times the square root of the fan-in
SHARPNESS = 3.0  # spread of the logits
MAX_BISECTIONS = 12
MIN_FACTOR = 1e-7  # the bisection, by ratio, is between it and 1
TOLERANCE = 0.003  # allowed difference from the target agreement while calibrating
FINAL_TOLERANCE = 0.05  # allowed difference between the target and the interval of the final agreement
BATCH = 8  # contexts whose distributions exist at once
OPENING = 4  # random tokens at the beginning of a sampled context
LAYER_SPREAD = 6.0  # spread of a layer's output at this GAIN, measured at 8B shape
SURENESS = 32.0  # logit of a sure successor if the last hidden state were the embedding alone
HEAD_ROWS = 16_384  # rows of the head changed at once
CONTEXTS = 128  # sampled texts of a measurement while calibrating
TOKEN_BY_TOKEN = 2  # contexts that are also decoded token by token
HEAD_DIM = 64  # of shapes given by layers and hidden size
_ROPE = {"rope_type": "default", "rope_theta": 500_000.0}
_LLAMA_3 = {"rope_parameters": _ROPE, "head_dim": 128, "num_key_value_heads": 8, "max_position_embeddings": 8192}
_LLAMA_2 = {"max_position_embeddings": 4096}


def _llama(*shape: int, **more: Any) -> dict[str, Any]:
    """A Llama's config. shape: vocabulary, hidden and intermediate size, layers, heads."""
    keys = ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads")
    return {**dict(zip(keys, shape, strict=True)), **more}


NAMED: dict[str, dict[str, Any]] = {  # shapes of real models
    "llama-3.2-1b": _llama(128_256, 2048, 8192, 16, 32, **_LLAMA_3 | {"head_dim": 64, "tie_word_embeddings": True}),
    "llama-3.2-3b": _llama(128_256, 3072, 8192, 28, 24, **_LLAMA_3, tie_word_embeddings=True),
    "llama-3-8b": _llama(128_256, 4096, 14_336, 32, 32, **_LLAMA_3),
    "llama-2-7b": _llama(32_000, 4096, 11_008, 32, 32, **_LLAMA_2),
    "llama-2-13b": _llama(32_000, 5120, 13_824, 40, 40, **_LLAMA_2),
}


@dataclass(frozen=True)
class SurrogateShape:
    """The shape of a synthetic model and its target agreement."""

    name: str  # the user's
    config: dict[str, Any]  # of a Llama
    exit_layer: int | None = None  # E, if the part is layers[:E]
    agreement: float | None = None
    """Target probability that the part's argmax is the model's, per token of contexts sampled at T = 1. None calibrates nothing
    and allows plain decoding only."""
    skip_ratio: float | None = None  # of a uniform skip set, instead of an exit layer
    sure: float = 0.0  # share of the tokens with a nearly certain successor, as in most of a real text

    def __post_init__(self) -> None:
        depth = self.config["num_hidden_layers"]
        if self.exit_layer is not None and self.skip_ratio is not None:
            raise ValueError("give either --exit-layer or --skip-ratio")
        if (self.exit_layer is None and self.skip_ratio is None) != (self.agreement is None):
            raise ValueError("--agreement goes with --exit-layer or --skip-ratio: what is to agree, and how often")
        if self.exit_layer is not None and not 1 <= self.exit_layer < depth:
            raise ValueError(f"--exit-layer must lie between 1 and {depth - 1} for {depth} layers, found {self.exit_layer}")
        if self.skip_ratio is not None and not 0 < LayerSetSpace(depth).count(self.skip_ratio) < LayerSetSpace(depth).size:
            raise ValueError(f"--skip-ratio must leave out some of the sublayers and not all, found {self.skip_ratio}")
        if self.agreement is not None and not 0.0 < self.agreement < 1.0:
            raise ValueError(f"--agreement must lie between 0 and 1, found {self.agreement}")
        if not 0.0 <= self.sure < 1.0:
            raise ValueError(f"--sure must lie in [0, 1), found {self.sure}")
        if self.sure and self.agreement is None:
            raise ValueError("--sure goes with --agreement: without one nothing is sampled from the surrogate")

    @property
    def rest(self) -> SkipSet:
        """The sublayers outside the part that agrees."""
        depth = self.config["num_hidden_layers"]
        if self.skip_ratio is not None:
            space = LayerSetSpace(depth)
            return space.to_skip_set(space.uniform(space.count(self.skip_ratio)))
        deeper = frozenset(range(self.exit_layer or depth, depth))
        return SkipSet(deeper, deeper)

    @property
    def part(self) -> str:
        """The part that agrees, in words."""
        return f"layers[:{self.exit_layer}]" if self.exit_layer is not None else f"all but a share of {self.skip_ratio}"

    @property
    def method(self) -> dict[str, Any]:
        """The method that drafts with that part."""
        if self.exit_layer is not None:
            return {"method": "layerskip", "exit_layer": self.exit_layer}
        return {"method": "swift", "skip_ratio": self.skip_ratio}


def parse(text: str, exit_layer: int | None = None, agreement: float | None = None, *more: Any) -> SurrogateShape:
    """A shape from a text. ValueError names the wrong or missing key.

    text: a known name, with `,layers=16` for fewer layers; a config.json of a Llama; or `layers=24,hidden=192[,vocab=4096]`.
    more: skip_ratio and sure, as in `SurrogateShape`.
    """
    config = _read_config(Path(text)) if text.endswith(".json") else _config_of_sizes(text)
    return SurrogateShape(text, config, exit_layer, agreement, *more)


def _config_of_sizes(text: str) -> dict[str, Any]:
    """The config of a known name, of layers=24,hidden=192,vocab=4096, or of a name with layers=24."""
    name, *parts = text.split(",") if text.partition(",")[0] in NAMED else ("", *text.split(","))
    given = {key.strip(): value.strip() for key, _, value in (part.partition("=") for part in parts)}
    if not given.keys() <= ({"layers"} if name else {"layers", "hidden", "vocab"}):
        kinds = f"{', '.join(NAMED)}, a config.json, or layers=24,hidden=192[,vocab=4096]"
        raise ValueError(f"a surrogate is one of {kinds}; found {text!r}")
    if wrong := [key for key, value in given.items() if not value.isdecimal() or int(value) < 1]:
        raise ValueError(f"{wrong[0]} must be a whole number of at least 1, found {given[wrong[0]]!r}")
    sizes = {"vocab": 4096, **{key: int(value) for key, value in given.items()}}
    if name:
        return NAMED[name] | ({"num_hidden_layers": sizes["layers"]} if given else {})
    if missing := [key for key in ("layers", "hidden") if key not in sizes]:
        raise ValueError(f"the surrogate lacks {missing[0]}, for example {missing[0]}=24")
    hidden = sizes["hidden"]
    if hidden % HEAD_DIM:
        raise ValueError(f"hidden must be a multiple of {HEAD_DIM}, found {hidden}")
    more = {"num_key_value_heads": 1, "head_dim": HEAD_DIM, "max_position_embeddings": 2048}
    return _llama(sizes["vocab"], hidden, round(8 / 3 * hidden), sizes["layers"], hidden // HEAD_DIM, **more)


def _read_config(path: Path) -> dict[str, Any]:
    """The shape in a Llama's config.json, without dtype, model type and token ids."""
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
    except json.JSONDecodeError as error:
        raise ValueError(f"{path} is no JSON: {error}") from error
    needed = ("num_hidden_layers", "hidden_size", "num_attention_heads")
    if missing := [key for key in needed if not isinstance(config, dict) or key not in config]:
        raise ValueError(f"{path}: the config of a Llama has {missing[0]}")
    if config.get("model_type") != "llama":
        raise ValueError(f"{path}: a surrogate is a Llama, found model_type {config.get('model_type')!r}")
    known, ours = LlamaConfig(), ("dtype", "torch_dtype", "model_type")
    return {key: x for key, x in config.items() if hasattr(known, key) and key not in ours and not key.endswith("_token_id")}


@dataclass(frozen=True)
class CalibratedSurrogate:
    """A synthetic model and its measurements on contexts that the calibration did not see. Intervals are over contexts."""

    model: LlamaForCausalLM
    shape: SurrogateShape
    factor: float  # of the output projections outside the part that agrees
    agreement: IntervalEstimate  # realised
    overlap: IntervalEstimate  # mean of sum(min(p, q)), the acceptance rate of sampling at T = 1
    alone: IntervalEstimate
    """Share of tokens that the whole chooses alike in passes of one token and in one pass over all. No draft can be expected to
    agree more often in this dtype on this machine."""

    def report(self) -> dict[str, Any]:
        """The figures as plain JSON values."""
        return {
            "shape": self.shape.name,
            **{name: getattr(self.shape, name) for name in ("exit_layer", "skip_ratio", "part", "agreement", "sure")},
            "factor": self.factor,
            "realised_agreement": asdict(self.agreement),
            "overlap_at_temperature_1": asdict(self.overlap),
            "agreement_of_the_whole_token_by_token": asdict(self.alone),
            "contexts": "sampled at T = 1 from the surrogate itself",
        }


def calibrate(
    shape: SurrogateShape, seed: int, *, sequences: int = CONTEXTS, length: int = 96, say: Say = lambda _: None, **where: Any
) -> CalibratedSurrogate:
    """Build a synthetic model and scale the sublayers outside its part until the part reaches the target agreement.

    sequences, length: contexts of each measurement; the reported one uses twice as many, from other seeds. where: dtype and
    device, as in `build`. ValueError if the target cannot be reached.
    """
    assert shape.agreement is not None
    model = build(shape, seed, **where)
    weights = [module.weight for module in _outputs(model, shape.rest)]
    full = [weight.detach().clone() for weight in weights]
    low, high, factor = MIN_FACTOR, 1.0, 1.0
    for _ in range(MAX_BISECTIONS):
        factor = (low * high) ** 0.5
        _scale(weights, full, factor)
        agree, _ = measure_agreement(model, shape.rest, contexts(model, sequences, length, seed))
        say(f"factor {factor:.4f}: agreement {agree}")
        if abs(agree.value - shape.agreement) < max(TOLERANCE, (agree.high - agree.low) / 4):  # within a standard error
            break
        low, high = (factor, high) if agree.value > shape.agreement else (low, factor)
    fresh = contexts(model, 2 * sequences, length, seed + 1_000_000)
    agreement, overlap = measure_agreement(model, shape.rest, fresh)
    if not agreement.low - FINAL_TOLERANCE <= shape.agreement <= agreement.high + FINAL_TOLERANCE:
        raise ValueError(f"{shape.part} of {shape.name} cannot agree at {shape.agreement}: the nearest is {agreement}")
    return CalibratedSurrogate(model, shape, factor, agreement, overlap, measure_alone(model, fresh[:TOKEN_BY_TOKEN]))


def build(shape: SurrogateShape, seed: int, dtype: torch.dtype = torch.float32, device: Any = "cpu") -> LlamaForCausalLM:
    """A random Llama, drawn on the CPU in its dtype. If something is to agree, its logits have a moderate entropy. Otherwise
    its weights are as transformers draws them, and its early exits mean nothing."""
    config = LlamaConfig(**shape.config, bos_token_id=None, eos_token_id=None, pad_token_id=None, dtype=dtype)
    config.tie_word_embeddings = config.tie_word_embeddings and not shape.sure
    with torch.random.fork_rng(devices=[]), torch.no_grad():
        torch.manual_seed(seed)
        model: Any = LlamaForCausalLM._from_config(config, dtype=dtype).eval()
        if shape.agreement is not None:
            for weight in (parameter for parameter in model.parameters() if parameter.ndim == 2):
                weight.normal_(0, GAIN / weight.shape[1] ** 0.5)
            width = config.hidden_size
            model.model.embed_tokens.weight.normal_(0, SHARPNESS / width**0.5 if config.tie_word_embeddings else 1)
            model.lm_head.weight.normal_(0, SHARPNESS / width**0.5)
            _make_sure(model, shape.sure)
    return model.to(device)


def _make_sure(model: Any, share: float) -> None:
    """Give a share of the tokens a nearly certain successor. Every successor has one predecessor, so short loops are rare."""
    embedding, head = model.model.embed_tokens.weight, model.lm_head.weight
    if not (count := round(share * len(head))):
        return
    embedding.mul_(LAYER_SPREAD * (model.config.num_hidden_layers / 2) ** 0.5)
    sure, successors = torch.randperm(len(head))[:count], torch.randperm(len(head))[:count]
    for tokens, following in zip(sure.split(HEAD_ROWS), successors.split(HEAD_ROWS), strict=True):
        along = torch.nn.functional.normalize(embedding[tokens].float(), dim=-1)
        head[following] = (head[following].float() + SURENESS / along.shape[-1] ** 0.5 * along).to(head.dtype)


def _outputs(model: Any, rest: SkipSet) -> list[torch.nn.Linear]:
    """The output projections of sublayers."""
    layers = model.model.layers
    return [layers[i].self_attn.o_proj for i in sorted(rest.attention)] + [layers[i].mlp.down_proj for i in sorted(rest.mlp)]


@torch.no_grad()
def _scale(weights: list[Tensor], full: list[Tensor], factor: float) -> None:
    for weight, original in zip(weights, full, strict=True):
        weight.copy_(original * factor)


def contexts(model: Any, sequences: int, length: int, seed: int) -> Tensor:
    """[sequences, length] int64 ids, sampled from the model itself at T = 1 after a few random tokens. Reproducible."""
    generator = torch.Generator().manual_seed(seed)
    start = torch.randint(model.config.vocab_size, (sequences, OPENING), generator=generator).to(model.device)
    options = {"do_sample": True, "temperature": 1.0, "top_k": 0, "top_p": 1.0, "eos_token_id": None, "pad_token_id": 0}
    return api.generate(model, start, "autoregressive", seed=seed, max_new_tokens=length - OPENING, **options).sequences


def _mean(sums: list[float], tokens: int) -> IntervalEstimate:
    """The mean over the tokens of contexts, with its interval over contexts. sums: of each context."""
    return rate(sums, [float(tokens)] * len(sums)).estimate()


@torch.inference_mode()
def measure_agreement(model: Any, rest: SkipSet, ids: Tensor) -> tuple[IntervalEstimate, IntervalEstimate]:
    """(agreement, overlap) of a model without some sublayers with the whole model, teacher-forced.

    ids: sampled contexts [S, T]. Their random openings do not count. Intervals are bootstraps over contexts.
    """
    same, overlap, count = [], [], ids.shape[1] - OPENING
    for part in ids.split(BATCH):  # distributions are large
        late = model(part, use_cache=False).logits[:, OPENING:].float()
        with ExitStack() as hooks:
            for module in _outputs(model, rest):
                hooks.callback(module.register_forward_hook(lambda *given: torch.zeros_like(given[-1])).remove)
            early = model(part, use_cache=False).logits[:, OPENING:].float()
        same += (early.argmax(-1) == late.argmax(-1)).double().sum(1).tolist()
        overlap += torch.minimum(early.softmax(-1), late.softmax(-1)).sum(-1).double().sum(1).tolist()
    return _mean(same, count), _mean(overlap, count)


@torch.inference_mode()
def measure_alone(model: Any, ids: Tensor) -> IntervalEstimate:
    """Share of tokens that a model chooses alike in passes of one token and in one pass. ids: contexts [S, T]."""
    same = []
    for row in ids:
        together = model(row[None], use_cache=False).logits[0, OPENING:].argmax(-1)
        cache = DynamicCache(config=model.config)
        logits = [model(token, past_key_values=cache).logits[0] for token in row[None].split(1, dim=1)]
        same.append(float((torch.cat(logits)[OPENING:].argmax(-1) == together).sum()))
    return _mean(same, ids.shape[1] - OPENING)


def sampled_prompts(model: Any, count: int, length: int, seed: int) -> list[TaskConversation]:
    """Contexts that the model samples. ValueError if even sampled text loops, because no measurement on it means anything."""
    rows = contexts(model, count, length, seed).cpu()
    shares = [repeated_share(row[:OPENING].tolist(), row[OPENING:].tolist()) for row in rows]
    if (mean := sum(shares) / len(shares)) >= LOOPING:
        raise ValueError(f"the surrogate's sampled text loops (share of repeated 8-grams {mean:.2f}); use a larger vocab")
    return [TaskConversation(f"sampled at T = 1, number {index}", ids=row.clone()) for index, row in enumerate(rows)]


def random_prompts(vocab: int, count: int, length: int, seed: int) -> list[TaskConversation]:
    """Prompts of uniformly random ids."""
    rows = torch.randint(vocab, (count, length), generator=torch.Generator().manual_seed(seed))
    return [TaskConversation(f"random ids, number {index}", ids=row.clone()) for index, row in enumerate(rows)]


def run_surrogate(
    shape: SurrogateShape, plan: BenchPlan, path: Path, argv: list[str], say: Say = print, fresh: bool = False, **more: Any
) -> Path:
    """Measure what the file does not hold yet. The method that drafts with the calibrated part is the model's default.

    more: `contexts`, of each measurement while calibrating (default: CONTEXTS). ValueError if the file holds another run, or
    the target agreement cannot be reached.
    """
    if plan.threads is not None:
        torch.set_num_threads(plan.threads)
    ((_, settings),) = resolved(plan)
    assert settings.num_prompts is not None
    assert settings.prompt_tokens is not None
    counted = {} if shape.agreement is None else {name: n for name, n in more.items() if n != CONTEXTS}
    header: dict[str, Any] = {"shape": shape.name, "exit_layer": shape.exit_layer, "agreement": shape.agreement, **counted}
    set_later = {"skip_ratio": shape.skip_ratio, "sure": shape.sure or None}  # older files do not have them
    header |= {name: value for name, value in set_later.items() if value is not None}
    kept = {**plan.model_dump(mode="json"), "surrogate": header}
    with RunFile(path, kept, machine.provenance(argv, plan.seed), fresh) as journal:
        model, about = _load_or_calibrate(journal, shape, plan, say, **more)
        attach(model, EngineOptions(None if plan.engine == "auto" else plan.engine, plan.quantize))
        count, length = plan.tune_prompts + settings.num_prompts, settings.prompt_tokens
        if shape.agreement is None:
            prompts = random_prompts(model.config.vocab_size, count, length, plan.seed)
        else:
            prompts = sampled_prompts(model, count, length, plan.seed + 1)
        subject = BenchModel(plan.models[0], model, None, about)
        entrants = enter(journal, subject, plan, say)
        task = Task("synthetic", DatasetLocation(None, ""), (), "none", lambda record: [])
        task_run = TaskRun(subject, 0, task, settings, PromptBuilder(None, False, length), plan, journal)
        measure_task(task_run, entrants, (prompts[: plan.tune_prompts], prompts[plan.tune_prompts :]), say)
    return path


def _load_or_calibrate(
    journal: RunFile, shape: SurrogateShape, plan: BenchPlan, say: Say, contexts: int = CONTEXTS
) -> tuple[Any, dict[str, Any]]:
    """(the model, its report). The file's calibration is taken if it has one."""
    dtype, device = torch.float32 if plan.dtype == "auto" else getattr(torch, plan.dtype), usable_device(plan.device)
    known = next(journal.lines_of("calibrated"), None)
    if shape.agreement is not None and known is None:
        say(f"calibrating {shape.name}: {shape.part} are to agree with all at {shape.agreement}")
        made = calibrate(shape, plan.seed, sequences=contexts, dtype=dtype, device=device, say=say)
        model, about = made.model, made.report()
        journal.add({"kind": "calibrated", "model": plan.models[0], "factor": made.factor, "about": about})
    else:
        model, about = build(shape, plan.seed, dtype, device), {"shape": shape.name, "contexts": "random ids"}
    if known is not None:
        about, weights = known["about"], [module.weight for module in _outputs(model, shape.rest)]
        _scale(weights, weights, known["factor"])
    if shape.agreement is not None:
        setattr(model.generation_config, OWN_FIELD, shape.method)
        say(describe_calibration(about))
    return model, about
