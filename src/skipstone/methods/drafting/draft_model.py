"""Drafts of a second, smaller model: how it is chosen and checked, its KV cache, and the chains that it drafts."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import Tensor
from transformers import PreTrainedModel

from skipstone.assets import DRAFTS
from skipstone.decoding.draft import Draft, RowVerdict
from skipstone.decoding.prefill import PREFILL_CHUNK, Prefill
from skipstone.decoding.request import Request
from skipstone.decoding.settings import RejectionRule, setting
from skipstone.engines.choose_engine import EngineOptions, attach, attached
from skipstone.engines.host_transfer import cached_arange, on_device, to_device
from skipstone.engines.kv_cache import KVCache
from skipstone.engines.loading import COMMIT, load_model, vocabulary
from skipstone.engines.model_runner import ModelRunner
from skipstone.engines.partial_forward import PartialForward
from skipstone.methods.drafting.candidates import check_draft_quantize
from skipstone.methods.drafting.chain import ChainDrafter, DraftChain
from skipstone.methods.drafting.confidence import Threshold
from skipstone.methods.drafting.shortlist import ShortlistMethod, vocabulary_setting
from skipstone.models.passes import Pass, SkipSet
from skipstone.models.per_model_cache import PerModelCache

DTYPES = ("float32", "bfloat16", "float16")
_LOADED: PerModelCache["DraftModel"] = PerModelCache()


class DraftModel(ModelRunner):
    """A model that drafts for another one. vocabulary_size: that of the target, which its logits are brought to.
    options: of its engine."""

    def __init__(self, model: PreTrainedModel, vocabulary_size: int, options: EngineOptions | None = None) -> None:
        options = options or EngineOptions()
        super().__init__(model, options.engine, options.quantize, options.kv_dtype)
        self.name = name_of(model)
        self._missing = vocabulary_size - self.head.weight.shape[0]
        self._vocabulary_size = vocabulary_size

    @property
    def uses_engine_argmax(self) -> bool:
        """Whether its likeliest token is the target's too: nothing is cut off, and what is added is never likely."""
        return self._missing >= 0

    @property
    def num_draftable_tokens(self) -> int:
        """As in `ModelRunner`, but none that the target has no logits of."""
        return min(super().num_draftable_tokens, self._vocabulary_size)

    def project(self, normed: Tensor, head: Any = None, shortlist: Tensor | None = None) -> Tensor:
        """Logits over the target's vocabulary, [B, n, V] float32. Models with the same tokenizer pad their embeddings to
        different sizes; the padding is cut off, or added with a probability of 0."""
        logits = super().project(normed, head, shortlist)
        if self._missing <= 0:
            return logits[..., : self._vocabulary_size]
        return torch.nn.functional.pad(logits, (0, self._missing), value=float("-inf"))


def name_of(model: Any) -> str:
    """The name of a model in error messages."""
    return _folder_or_hub_id(model) or type(model).__name__


def _folder_or_hub_id(model: Any) -> str:
    """The folder or hub id that a model was loaded from; empty if there is none."""
    return str(getattr(model.config, "name_or_path", "") or "")


def _vocabulary_of(model: Any) -> dict[str, int] | None:
    """Token -> id of a model's tokenizer at the model's own commit; None if it is not on this machine."""
    return vocabulary(_folder_or_hub_id(model), getattr(model.config, COMMIT, None))


def _check_choice(device: Any, dtype: Any, quantize: Any, given: Any) -> None:
    """ValueError for settings that name no draft model, device, dtype or quantisation, or that would change a model given as an
    object."""
    if dtype is not None and dtype not in DTYPES:
        raise ValueError(f"draft_dtype must be one of {', '.join(DTYPES)} or none, found {dtype!r}")
    if device is not None and not isinstance(device, str):
        raise ValueError(f"draft_device must be the name of a device or none, found {device!r}")
    check_draft_quantize(quantize)
    if isinstance(given, PreTrainedModel) and (device, dtype, quantize) != (None, None, None):
        raise ValueError(
            "draft_device, draft_dtype and draft_quantize go with the name of a draft model: "
            "one that is given as an object stays as it is"
        )
    if given is not None and not isinstance(given, (str, Path, PreTrainedModel)):
        raise ValueError(
            f"draft_model must be a folder, a hub id, one of {', '.join(DRAFTS)} or a model of transformers, "
            f"found {given if isinstance(given, (int, float, bool)) else type(given).__name__}"
        )


def draft_model_for(
    given: str | PreTrainedModel | None,
    target: ModelRunner,
    device: str | None = None,
    dtype: str | None = None,
    quantize: str | None = None,
) -> DraftModel:
    """The draft model for a target, loaded once; its engine is set up as was asked of it, and where nothing was, of the target.
    given: its name, a model object, or None for the bundled one of the target's vocabulary. device, dtype, quantize: of a model
    that is given by its name; None for the target's.

    OSError where nothing is found; ValueError where none is bundled, and for one of another vocabulary.
    """
    _check_choice(device, dtype, quantize, given)
    if isinstance(given, PreTrainedModel):
        return _checked(given, name_of(given), target)
    given = None if given is None else str(given)
    sizes = (target.head.weight.shape[0], str(target.device), str(target.model.dtype))
    key = (given, device, dtype, quantize, *sizes, target.engine_options)
    return _LOADED.get(target.model, key, lambda: _loaded(given, target, device, dtype, quantize))


def _loaded(given: str | None, target: ModelRunner, device: str | None, dtype: str | None, quantize: str | None) -> DraftModel:
    name = given or _bundled_name(target)
    if name is None:
        raise ValueError(
            f"no draft model for {name_of(target.model)}: pass draft_model=, a folder or hub id of a smaller "
            "one with the same tokenizer"
        )
    kind = target.model.dtype if dtype is None else getattr(torch, dtype)
    try:
        model = load_model(DRAFTS.get(str(name), name), dtype=kind, device=device or target.device)
    except OSError as error:
        raise OSError(f"the draft model {name} for {name_of(target.model)} is not there: {error}") from error
    except (ValueError, RuntimeError) as error:
        raise ValueError(f"the draft model {name} for {name_of(target.model)} cannot be loaded: {error}") from error
    attach(model, None if quantize is None else "native", quantize, keep_weights=False)  # nobody else has this model
    return _checked(model, str(name), target)


def _checked(model: PreTrainedModel, name: str, target: ModelRunner) -> DraftModel:
    """The model as a draft model. ValueError if it cannot draft for the target, or if skipstone cannot decode it."""
    if model.get_output_embeddings() is None:
        raise ValueError(
            f"the draft model {name} for {name_of(target.model)} has no LM head ({type(model).__name__}): load it with "
            "AutoModelForCausalLM"
        )
    _check_vocabularies(model, name, target)
    try:
        return DraftModel(model, target.head.weight.shape[0], attached(model).over(target.engine_options))
    except ValueError as error:
        raise ValueError(f"the draft model {name} for {name_of(target.model)} cannot draft: {error}") from error


def _bundled_name(target: ModelRunner) -> str | None:
    """The name of the bundled draft model of a target's vocabulary; None where there is none."""
    own = _vocabulary_of(target.model)
    return next((name for name, folder in DRAFTS.items() if own is not None and own == vocabulary(str(folder))), None)


def _check_vocabularies(model: PreTrainedModel, name: str, target: ModelRunner) -> None:
    """ValueError if an id is another token in each of the two models. Without both tokenizers only the sizes are compared."""
    own, targets = _vocabulary_of(model), _vocabulary_of(target.model)
    head: Any = model.get_output_embeddings()
    own_size, target_size = int(head.weight.shape[0]), int(target.head.weight.shape[0])
    pair = f"the draft model {name} and the target {name_of(target.model)}"
    if own is not None and targets is not None:
        if own != targets:
            differ = sum(own.get(token) != number for token, number in targets.items())
            raise ValueError(
                f"{pair} have different vocabularies ({len(own)} and {len(targets)} tokens, {differ} of the target's mean "
                "other or none): a draft's tokens must be the target's"
            )
        if (fewer := min(own_size, target_size)) <= max(own.values()):
            raise ValueError(f"{pair}: {fewer} logits are too few for their {max(own.values()) + 1} tokens")
    elif own_size != target_size:
        raise ValueError(f"{pair} have vocabularies of different sizes, {own_size} and {target_size}")


@dataclass(frozen=True)
class DraftModelMethod(ShortlistMethod):
    """What methods with a draft model share: which one, where it lies, and the ordinary acceptance rule."""

    by_model: ClassVar[tuple[str, ...]] = ("draft_model",)
    aliases: ClassVar[dict[str, str]] = {"model": "draft_model", "assistant_model": "draft_model"}
    if_few_accepted: ClassVar[str] = (
        "An acceptance rate that low says that the draft model does not suit the target or the text."
    )

    draft_model: str | PreTrainedModel | None = setting(
        None,
        "a folder, a hub id, a bundled name or a model object with the target's vocabulary; none: the bundled one that fits",
    )
    draft_device: str | None = setting(None, "where a named draft model is loaded; none: where the target is", kw_only=True)
    draft_dtype: str | None = setting(None, "the dtype a named draft model is loaded in; none: the target's", kw_only=True)
    draft_quantize: str | None = setting(
        None,
        "int8 or int4: what the native engine quantises a named draft model to, which changes its speed and not the text of a "
        "lossless method; none: as the target",
        kw_only=True,
    )
    rejection_sample_method: RejectionRule = setting(
        "standard", '"standard" is Leviathan\'s rule; "coupled" draws drafts from the target\'s own noise', kw_only=True
    )
    draft_vocabulary: int | str | None = vocabulary_setting()

    def check(self, model: ModelRunner) -> None:
        super().check(model)
        self.shortlist(self.draft_model_for(model))

    def draft_model_for(self, target: ModelRunner) -> DraftModel:
        """The draft model for a target. OSError where there is none of that name, ValueError where the two do not fit."""
        return draft_model_for(self.draft_model, target, self.draft_device, self.draft_dtype, self.draft_quantize)


class DraftModelDrafter(ChainDrafter):
    """Drafts with a draft model, which has keys and values of its own for what was committed.

    After a step the draft model's store lacks the last committed token, or two of them: where a whole draft was accepted, the
    last of it never went through the draft model. Steps without drafts let it fall behind further; it catches up when it drafts
    next.

    store: keys and values of the draft model. prompts: on their way into it. text: every row's tokens so far. last_id: the
    highest token id that the draft model has. The target may have more, which mean nothing; the draft model reads this one in
    their place.
    """

    def __init__(
        self,
        method: DraftModelMethod,
        model: ModelRunner,
        draft_model: DraftModel,
        rows: int,
        capacity: int,
        max_drafts: int,
        threshold: Threshold,
    ) -> None:
        super().__init__(
            model, rows, max_drafts=max_drafts, threshold=threshold, coupled=method.rejection_sample_method == "coupled"
        )
        self.draft_model, self.own_threads = draft_model, draft_model.engine.own_threads
        self.store = KVCache(rows, draft_model.depth, capacity, draft_model.kv_dtype)
        self.prompts = Prefill(draft_model, self.store)
        self.draft_shortlist = method.shortlist(draft_model)
        self.text: list[list[int]] = [[] for _ in range(rows)]
        self.last_id = draft_model.embeddings - 1
        # of this step's draft
        self._ahead: PartialForward | None = None  # what the draft model reads: committed tokens, then draft tokens
        self._committed = 0  # columns of it that hold committed tokens
        self._read: list[int] | None = None  # draft tokens of every row that it has read; None where rows do not differ
        self._path: Tensor | None = None  # [B, width], draft tokens where the target is

    @property
    def caches(self) -> list[tuple[ModelRunner, KVCache]]:
        return [(self.draft_model, self.store)]

    def validate_request(self, request: Request) -> None:
        length, new, limit = len(request.prompt), request.max_new_tokens, self.draft_model.max_positions
        if length + new > limit:
            raise ValueError(
                f"prompt of {length} tokens + max_new_tokens={new} is more than the {limit} positions of the draft model "
                f"{self.draft_model.name} ({self.draft_model.max_positions_source}); the target {name_of(self.model.model)} "
                f"has {self.model.max_positions}"
            )

    def add_request(self, row: int, request: Request) -> None:
        super().add_request(row, request)
        self.store.length[row] = 0
        self.prompts.add(row, request.prompt.clamp(max=self.last_id))
        self.text[row] = request.prompt.tolist()

    def remove_request(self, row: int) -> None:
        self.prompts.remove(row)
        self.store.length[row] = 0

    def prefill_tokens(self, chunk: int) -> None:
        if self.prompts.waiting:  # a row that caught up between two chunks has read other rows' prompts as well
            self.prompts.run(chunk)

    def one_call(self) -> tuple[int, SkipSet | None] | None:
        return self.draft_model.depth, None

    def next_logits(self, chain: DraftChain, forward: PartialForward) -> Tensor:
        """Logits of the draft model after the newest token. It never reads the last token of a chain."""
        device = self.draft_model.device
        if not len(chain):
            self._ahead = self._ahead or self._start_catching_up(chain.max_drafts)
            self._path = forward.tokens.new_empty((self.view.rows, chain.width))
        else:
            assert self._ahead is not None
            tokens, valid = chain.newest
            tokens = to_device(tokens.clamp(max=self.last_id), device)
            self._ahead.append(tokens, None if valid is None else to_device(valid, device))
        return to_device(self._ahead.exit_logits(self.draft_model.depth), self.model.device)

    def draft_at_once(self, max_drafts: list[int], forward: PartialForward) -> Draft | None:
        """The greedy chain of the draft model in one call of its engine."""
        if self.one_call() is None or not self.sampler.picks_only or not any(max_drafts):
            return None
        self._ahead = self._start_catching_up(
            [count if alive else 0 for count, alive in zip(max_drafts, self.view.alive, strict=True)]
        )
        thresholds = self.rule.thresholds if self.rule.active else None
        chain = self._ahead.draft_with_all_layers(max_drafts, thresholds, self.sampler.eos, self.rule.survival)
        if chain is None:
            return None
        self._read = [count - 1 for count in chain.counts]
        tokens = to_device(chain.tokens, self.model.device)
        even = min(chain.counts) == tokens.shape[1]
        valid = cached_arange(tokens.shape[1], tokens.device) < on_device(chain.counts, tokens.device)[:, None]
        forward.append(tokens, None if even else valid)
        confidence = None if chain.confidence is None else to_device(chain.confidence, self.model.device)
        return Draft(tokens, valid, forward, confidence=confidence)

    def _start_catching_up(self, max_drafts: list[int]) -> PartialForward:
        """A forward over the one or two committed tokens that were not read yet, with room for `max_drafts` tokens a row."""
        lengths, live = self.store.length, [row for row, alive in enumerate(self.view.alive) if alive]
        for row in live:
            if len(self.text[row]) - lengths[row] > 2:
                self._read_tokens(row, self.text[row][lengths[row] : -1])  # all but its last token
        lacking = self._committed = max(len(self.text[row]) - lengths[row] for row in live)
        for row in live:  # where rows differ, one that lacks a single token runs the one before it once more
            lengths[row] = len(self.text[row]) - lacking
        tokens = [text[-lacking:] if alive else [0] * lacking for text, alive in zip(self.text, self.view.alive, strict=True)]
        columns = on_device(tokens, self.draft_model.device).clamp_(max=self.last_id)  # [B, lacking]
        room = [count + lacking - 1 for count in max_drafts]
        ahead = PartialForward(self.draft_model, self.store, columns[:, 0], self.view.alive, room, self.draft_shortlist)
        if lacking > 1:
            ahead.append(columns[:, 1:])
        return ahead

    def _read_tokens(self, row: int, tokens: list[int]) -> None:
        """Run the draft model over tokens of a row that follow those in its KV cache."""
        self.prompts.add(row, on_device(tokens, self.draft_model.device).clamp_(max=self.last_id))
        while self.prompts.waiting:
            self.prompts.run(PREFILL_CHUNK)

    def append(self, chain: DraftChain, forward: PartialForward) -> Tensor:
        assert self._path is not None
        self._path[:, len(chain) - 1 : len(chain)] = chain.newest[0]
        return self._path[:, : len(chain)]

    def finish(self, chain: DraftChain, forward: PartialForward) -> Draft:
        """The target reads all tokens of the draft at once."""
        draft = chain.draft(forward)
        if draft.width:
            forward.append(draft.tokens, draft.valid if chain.ragged else None)
        return draft

    def observe_commits(self, draft: Draft | None, verdicts: list[RowVerdict]) -> None:
        """Lengths of the draft model's store move as well; nothing is run."""
        super().observe_commits(draft, verdicts)
        for row, verdict in enumerate(verdicts):
            if verdict.tokens:
                if self._ahead is not None:
                    read = self._ahead.width - self._committed if self._read is None else self._read[row]
                    self.store.length[row] = len(self.text[row]) + min(len(verdict.path), read)
                self.text[row] += verdict.tokens
        self._ahead = self._read = None

    def tokens_to_replay(self, row: int, wanted: int) -> int:
        return max(len(self.text[row]) - 1 - self.store.length[row], wanted)

    def replay_tokens(self, row: int, tokens: Sequence[int]) -> Tensor | None:
        """Logits of the draft model at the last tokens, in one pass over the tokens that it has not read."""
        store, wanted, text, device = self.store, len(tokens) - 1, self.text[row], self.draft_model.device
        if len(text) - 1 - store.length[row] < wanted:
            return None
        if before := text[store.length[row] : -1 - wanted]:
            self._read_tokens(row, before)
        self.prompts.remove(row)
        known, end = store.length[row], len(text) - 1
        read = on_device([text[known:end]], device).clamp_(max=self.last_id)  # [1, wanted]
        store.reserve(end)
        positions = torch.arange(known, end, device=device, dtype=torch.int64)[None]
        at = Pass(positions, positions, None, slice(row, row + 1), end, known)
        hidden = self.draft_model.embed(read, positions)
        states = self.draft_model.run(hidden, at, store, range(self.draft_model.depth))
        store.length[row] = end
        return self.draft_model.logits(states, self.draft_shortlist)[0].to(self.model.device)
