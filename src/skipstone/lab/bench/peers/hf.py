"""Transformers' own decoding, as methods of the benchmark; and a draft model by itself.

Traps (see the tests): `num_assistant_tokens` and `assistant_confidence_threshold` given to `generate` are ignored, they are
read from the model's generation config; early exit leaves `config.num_hidden_layers` cut after an exception; families that do
not slice their layers by that field cannot do it at all.
"""

import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import cache
from importlib.util import find_spec
from typing import Any, ClassVar
from weakref import WeakKeyDictionary

import torch
from torch import Tensor
from transformers import PreTrainedModel, StaticCache, StoppingCriteria, StoppingCriteriaList

from skipstone.assets import DRAFTS
from skipstone.decoding.settings import whole_number
from skipstone.engines.loading import load_model
from skipstone.engines.model_runner import ModelRunner
from skipstone.hf.generation_defaults import neutral_defaults
from skipstone.lab.timing.measure import GeneratedOutput, GenerationBackend, MethodBackend, synchronise
from skipstone.methods.autoregressive import Autoregressive
from skipstone.methods.speculative import Speculative
from skipstone.models.families import text_config


@dataclass(frozen=True)
class Transformers(GenerationBackend):
    """Base of transformers' ways of decoding."""

    needs_transformers: ClassVar[bool] = True

    def options(self, model: PreTrainedModel, tokens: int) -> dict[str, Any]:
        """Further options of `model.generate`. tokens: the maximum of the text, prompt included."""
        return {}

    def generate(self, model: PreTrainedModel, prompt: Tensor, options: dict[str, Any], seed: int) -> GeneratedOutput:
        """As `GenerationBackend.generate`."""
        kind: Any = type(model)  # the class's own generate: `skipstone.enable` may have put another on the instance
        clock, width = _FirstTokenTimer(), prompt.shape[1]
        own = self.options(model, width + options["max_new_tokens"])
        sequences = kind.generate(model, prompt, stopping_criteria=StoppingCriteriaList([clock]), **options, **own)
        return GeneratedOutput(sequences[0, width:].tolist(), first_at=clock.first_at)


@dataclass(frozen=True)
class HFGenerate(Transformers):
    """`model.generate` with its dynamic cache."""

    name: ClassVar[str] = "hf-generate"


_CACHE_SIZES: WeakKeyDictionary[PreTrainedModel, int] = WeakKeyDictionary()
"""Model -> size of its latest static cache in tokens."""


@dataclass(frozen=True)
class HFGenerateStatic(Transformers):
    """`model.generate` with a static cache, whose decoding steps transformers compiles (torch.compile) on a GPU.

    The cache holds the next power of two of tokens and never shrinks for a model. So hardly anything is compiled after a
    warm-up with as many tokens as the task has.
    """

    name: ClassVar[str] = "hf-generate-static"
    long_warm_up: ClassVar[bool] = True

    def options(self, model: PreTrainedModel, tokens: int) -> dict[str, Any]:
        size = _CACHE_SIZES[model] = max(1 << (tokens - 1).bit_length(), _CACHE_SIZES.get(model, 0))
        return {"past_key_values": StaticCache(config=model.config, max_cache_len=size)}


@dataclass(frozen=True)
class HFEarlyExit(Transformers):
    """`assistant_early_exit`: transformers' self-speculative decoding (its blog post "layerskip", 2024)."""

    name: ClassVar[str] = "hf-early-exit"
    sampled: ClassVar[bool] = False  # its drafts are judged by another q than they were drawn from (transformers#32867)

    exit_layer: int
    num_assistant_tokens: int = 20  # drafts a step, constant schedule
    confidence_threshold: float = 0.4  # drafting stops after a token whose probability is below it, 0 never stops

    def check(self, model: PreTrainedModel) -> None:
        super().check(model)
        depth = text_config(model).num_hidden_layers
        whole_number("hf-early-exit: exit_layer", self.exit_layer, 1)
        if self.exit_layer >= depth:
            raise ValueError(f"hf-early-exit: exit_layer must lie between 1 and {depth - 1}, found {self.exit_layer!r}")

    @torch.inference_mode()
    def refusal(self, model: PreTrainedModel) -> str | None:
        """Transformers sets `config.num_hidden_layers`. A forward over one token shows whether that cuts the stack."""
        layers, ran = ModelRunner(model).layers, []
        wanted = len(layers) - 1
        if not wanted:
            return "the model has one layer"
        with ExitStack() as stack:
            stack.enter_context(changed(model.base_model.config, num_hidden_layers=wanted))
            for layer in layers:
                stack.callback(layer.register_forward_pre_hook(lambda *_: ran.append(1)).remove)
            try:
                model(torch.zeros((1, 1), dtype=torch.long, device=model.device), use_cache=True)
                found = f"{len(ran)} of {wanted + 1} layers ran"
            except (IndexError, AttributeError, RuntimeError, ValueError) as error:
                found = f"its forward fails with {type(error).__name__}: {error}"
        if found.startswith(f"{wanted} of"):
            return None
        return f"transformers exits early by setting config.num_hidden_layers; with {wanted} on {type(model).__name__} {found}"

    def generate(self, model: PreTrainedModel, prompt: Tensor, options: dict[str, Any], seed: int) -> GeneratedOutput:
        config: Any = model.base_model.config  # transformers leaves its depth cut after an error
        whole = changed(config, num_hidden_layers=config.num_hidden_layers)
        with whole, changed(model.generation_config, **_drafting(self)):
            return super().generate(model, prompt, {**options, "assistant_early_exit": self.exit_layer}, seed)


@dataclass(frozen=True)
class HFAssisted(Transformers):
    """`assistant_model`: transformers' speculative decoding with a draft model."""

    name: ClassVar[str] = "hf-assisted"
    sampled: ClassVar[bool] = False  # as for hf-early-exit

    assistant: str  # the draft model's folder, hub id or bundled name
    num_assistant_tokens: int = 20  # drafts a step, constant schedule
    confidence_threshold: float = 0.4
    """Drafting stops after a token whose probability is below it, 0 never stops; transformers moves it as it goes, for which it
    needs scikit-learn."""

    def check(self, model: PreTrainedModel) -> None:
        super().check(model)
        _assistant(self.assistant, model.dtype, str(model.device))  # loaded now, and not within a timed call

    def refusal(self, model: PreTrainedModel) -> str | None:
        if self.confidence_threshold and find_spec("sklearn") is None:
            what = "transformers moves its confidence threshold with scikit-learn, which is not installed"
            return f'{what}: pip install "skipstone[bench]", or confidence_threshold=0.0 for drafts of one length'
        return None

    def generate(self, model: PreTrainedModel, prompt: Tensor, options: dict[str, Any], seed: int) -> GeneratedOutput:
        helper = _assistant(self.assistant, model.dtype, str(model.device))
        with changed(helper.generation_config, **_drafting(self)):
            return super().generate(model, prompt, {**options, "assistant_model": helper}, seed)


@dataclass(frozen=True)
class DraftAlone(GenerationBackend):
    """The draft model without its target, decoded plainly by skipstone, for its speed and its scores."""

    name: ClassVar[str] = "draft-alone"

    draft_model: str | None = None

    @property
    def lossless(self) -> bool:
        return False

    def check(self, model: PreTrainedModel) -> None:
        Speculative(self.draft_model).draft_model_for(ModelRunner(model))

    def generate(self, model: PreTrainedModel, prompt: Tensor, options: dict[str, Any], seed: int) -> GeneratedOutput:
        helper: Any = Speculative(self.draft_model).draft_model_for(ModelRunner(model)).model
        stop: Any = model.generation_config
        with neutral_defaults(helper, stop.eos_token_id is not None):
            return MethodBackend(Autoregressive()).generate(helper, prompt.to(helper.device), options, seed)


@dataclass(frozen=True)
class HFPromptLookup(Transformers):
    """`prompt_lookup_num_tokens`: drafts are what followed the last n-gram earlier in the text (Saxena, 2023)."""

    name: ClassVar[str] = "hf-prompt-lookup"
    sampled: ClassVar[bool] = False

    prompt_lookup_num_tokens: int = 10

    def options(self, model: PreTrainedModel, tokens: int) -> dict[str, Any]:
        return {"prompt_lookup_num_tokens": self.prompt_lookup_num_tokens}


class _FirstTokenTimer(StoppingCriteria):
    """Records the time of the first new tokens. Stops nothing."""

    def __init__(self) -> None:
        self.first_at: float | None = None

    def __call__(self, input_ids: Tensor, scores: Any, **_: Any) -> Any:
        if self.first_at is None:
            synchronise(input_ids.device)
            self.first_at = time.perf_counter()
        return torch.zeros(input_ids.shape[0], dtype=torch.bool, device=input_ids.device)


@contextmanager
def changed(owner: Any, **wanted: Any) -> Iterator[None]:
    """Change attributes of an object and restore them afterwards."""
    before = {name: getattr(owner, name) for name in wanted}
    try:
        for name, value in wanted.items():
            setattr(owner, name, value)
        yield
    finally:
        for name, value in before.items():
            setattr(owner, name, value)


def _drafting(peer: HFEarlyExit | HFAssisted) -> dict[str, Any]:
    """Drafting settings as transformers reads them, from a generation config alone."""
    return {
        "num_assistant_tokens": peer.num_assistant_tokens,
        "num_assistant_tokens_schedule": "constant",
        "assistant_confidence_threshold": peer.confidence_threshold,
    }


@cache
def _assistant(name: str, dtype: torch.dtype, device: str) -> PreTrainedModel:
    """The draft model, loaded once."""
    return load_model(DRAFTS.get(name, name), dtype=dtype, device=device)
