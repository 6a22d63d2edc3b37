"""Drafting with a second, smaller model: its choice and checks, its KV cache and its chains."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor, nn

from skipstone.assets import DRAFTS
from skipstone.decoding.draft import Draft, RowVerdict
from skipstone.decoding.prefill import PREFILL_CHUNK, Prefill
from skipstone.decoding.request import Request
from skipstone.decoding.settings import RejectionRule, setting
from skipstone.engines.choose_engine import EngineOptions, attach, attached
from skipstone.engines.host_transfer import on_device, to_device
from skipstone.engines.mapped_loading import load_named
from skipstone.engines.model_runner import ModelRunner
from skipstone.engines.native.engine import NativeEngine
from skipstone.engines.partial_forward import PartialForward
from skipstone.methods.drafting.candidates import FewerBits
from skipstone.methods.drafting.chain import DraftChain, OwnCacheDrafter
from skipstone.methods.drafting.chain_stop_rule import Threshold
from skipstone.methods.drafting.shortlist import ShortlistMethod
from skipstone.models.passes import Pass, SkipSet
from skipstone.models.per_model_cache import PerModelCache
from skipstone.models.vocabularies import COMMIT, vocabulary
from skipstone.utils.setup_times import setup_work

_LOADED: PerModelCache["DraftModel"] = PerModelCache()


class DraftModel(ModelRunner):
    """A model that drafts for a target. vocabulary_size: of the target, to which logits are cut or padded. options:
    engine's."""

    def __init__(self, model: Any, vocabulary_size: int, options: EngineOptions | None = None) -> None:
        self._prepare(model, options or EngineOptions())
        self.name = name_of(model)
        self._missing = vocabulary_size - self.head.weight.shape[0]
        self._vocabulary_size = vocabulary_size

    @property
    def uses_engine_argmax(self) -> bool:
        """Whether the argmax needs no change for the target's vocabulary: no logits are cut off."""
        return self._missing >= 0

    @property
    def num_draftable_tokens(self) -> int:
        """As in `ModelRunner`, at most the size of the target's vocabulary."""
        return min(super().num_draftable_tokens, self._vocabulary_size)

    def project(self, normed: Tensor, head: Any = None, shortlist: Tensor | None = None) -> Tensor:
        """Logits over the target's vocabulary, [B, n, V] float32.

        Models with one tokenizer may pad their embeddings to different sizes. Padding is cut off, or added as -inf."""
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


def _checked(model: Any, name: str, target: ModelRunner) -> DraftModel:
    """The model as a draft model. ValueError if it does not fit the target or skipstone cannot decode it."""
    if model.get_output_embeddings() is None:
        raise ValueError(
            f"the draft model {name} for {name_of(target.model)} has no LM head ({type(model).__name__}): load it with "
            "AutoModelForCausalLM"
        )
    _check_vocabularies(model, name, target)
    try:
        return DraftModel(model, target.head.weight.shape[0], attached(model).over(target.engine_options.for_drafts))
    except ValueError as error:
        raise ValueError(f"the draft model {name} for {name_of(target.model)} cannot draft: {error}") from error


def _check_vocabularies(model: Any, name: str, target: ModelRunner) -> None:
    """ValueError if an id means different tokens in the two models. If a tokenizer is missing, only the sizes are compared."""
    draft_ids, target_ids = _vocabulary_of(model), _vocabulary_of(target.model)
    head: Any = model.get_output_embeddings()
    draft_size, target_size = int(head.weight.shape[0]), int(target.head.weight.shape[0])
    pair = f"the draft model {name} and the target {name_of(target.model)}"
    if draft_ids is not None and target_ids is not None:
        if draft_ids != target_ids:
            differ = sum(draft_ids.get(token) != number for token, number in target_ids.items())
            raise ValueError(
                f"{pair} have different vocabularies ({len(draft_ids)} and {len(target_ids)} tokens, {differ} of the target's "
                "have another id or are missing in the draft model): both must have the same tokenizer"
            )
        if (fewer := min(draft_size, target_size)) <= max(draft_ids.values()):
            raise ValueError(f"{pair}: {fewer} logits are too few for their {max(draft_ids.values()) + 1} tokens")
    elif draft_size != target_size:
        raise ValueError(f"{pair} have vocabularies of different sizes, {draft_size} and {target_size}")


@dataclass(frozen=True)
class DraftModelMethod(ShortlistMethod):
    """Common settings of methods with a draft model."""

    by_model: ClassVar[tuple[str, ...]] = ("draft_model",)
    aliases: ClassVar[dict[str, str]] = {"model": "draft_model", "assistant_model": "draft_model"}
    if_few_accepted: ClassVar[str] = (
        "An acceptance rate that low says that the draft model does not suit the target or the text."
    )

    draft_model: str | nn.Module | None = setting(
        None,
        "a folder, a hub id, a bundled name or a model object with the target's vocabulary; none: the bundled one that fits",
    )
    draft_device: str | None = setting(None, "where a named draft model is loaded; none: where the target is", kw_only=True)
    draft_dtype: Literal["float32", "bfloat16", "float16"] | None = setting(
        None, "the dtype a named draft model is loaded in; none: the target's", kw_only=True
    )
    draft_quantize: FewerBits | None = setting(
        None,
        "int8 or int4: quantise a named draft model in the native engine; texts of lossless methods stay; none: as the target",
        kw_only=True,
    )
    rejection_sample_method: RejectionRule = setting(
        "standard", '"standard" is Leviathan\'s rule; "coupled" draws drafts from the target\'s own noise', kw_only=True
    )

    def check(self, model: ModelRunner) -> None:
        given = self.draft_model
        if isinstance(given, nn.Module) and (self.draft_device or self.draft_dtype or self.draft_quantize):
            raise ValueError(
                "draft_device, draft_dtype and draft_quantize need the name of a draft model: "
                "one that is given as an object stays unchanged"
            )
        if given is not None and not isinstance(given, (str, Path, nn.Module)):
            raise ValueError(
                f"draft_model must be a folder, a hub id, one of {', '.join(DRAFTS)} or a model of transformers, "
                f"found {given if isinstance(given, (int, float, bool)) else type(given).__name__}"
            )
        super().check(model)

    def draft_model_for(self, target: ModelRunner) -> DraftModel:
        """The draft model for a target, loaded once. Its engine options default to the target's.

        OSError if there is none of that name; ValueError if none is bundled or the two do not fit."""
        given = self.draft_model
        if isinstance(given, nn.Module):
            return _checked(given, name_of(given), target)
        sizes = (target.head.weight.shape[0], str(target.device), str(target.model.dtype))
        key = (str(given), self.draft_device, self.draft_dtype, self.draft_quantize, *sizes, target.engine_options.for_drafts)
        return _LOADED.get(target.model, key, lambda: self._load(target))

    @setup_work("draft model")
    def _load(self, target: ModelRunner) -> DraftModel:
        own, ids = name_of(target.model), _vocabulary_of(target.model)
        bundled = (name for name, folder in DRAFTS.items() if ids is not None and ids == vocabulary(str(folder)))
        name = str(self.draft_model or next(bundled, ""))
        if not name:
            raise ValueError(
                f"no draft model for {own}: pass draft_model=, a folder or hub id of a smaller one with the same tokenizer"
            )
        dtype = target.model.dtype if self.draft_dtype is None else getattr(torch, self.draft_dtype)
        quantize, device = self.draft_quantize, str(self.draft_device or target.device)
        try:
            packed_in = quantize or target.engine_options.quantize
            model = load_named(DRAFTS.get(name, name), dtype, device, target.model, packed_in)
        except OSError as error:
            raise OSError(f"the draft model {name} for {own} is not there: {error}") from error
        except (ValueError, RuntimeError) as error:
            raise ValueError(f"the draft model {name} for {own} cannot be loaded: {error}") from error
        # no other code holds this model
        attach(model, EngineOptions(None if quantize is None else "native", quantize, keep_weights=False))
        draft_model = _checked(model, name, target)
        if isinstance(draft_model.engine, NativeEngine):
            draft_model.engine.cache_panels(model)
        return draft_model


class DraftModelDrafter(OwnCacheDrafter):
    """Drafts with a draft model, which has its own KV cache of the committed tokens.

    After a step the draft model's cache lacks the last committed token. If a whole draft was accepted, it lacks two, because
    the draft model never read its last draft. It lacks more after steps without drafts, and catches up before the next draft.

    prompts: prompts that it reads while the target runs prompts. last_id: highest token id of the draft model. Higher ids of
    the target are padding; the draft model reads `last_id` instead of them.
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
        coupled = method.rejection_sample_method == "coupled"
        super().__init__(model, draft_model, rows, capacity, max_drafts=max_drafts, threshold=threshold, coupled=coupled)
        self.draft_model = draft_model
        self.prompts = Prefill(draft_model, self.store)
        self.draft_shortlist = method.shortlist(draft_model)
        self.last_id = draft_model.embeddings - 1
        # of this step's draft
        self._forward: PartialForward | None = None  # of the draft model: committed tokens, then draft tokens
        self._committed = 0  # number of its columns with committed tokens
        self._read: list[int] | None = None  # number of draft tokens read by the draft model per row; None for its whole width

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

    def prefill_tokens(self, chunk: int, max_prompt_tokens_per_pass: int | None = None) -> None:
        if self.prompts.waiting:  # the draft model may have read all prompts before the target has
            self.prompts.run(chunk, max_prompt_tokens_per_pass)

    def one_call(self) -> tuple[int, SkipSet | None] | None:
        return self.draft_model.depth, None

    def next_logits(self, chain: DraftChain, forward: PartialForward) -> Tensor:
        """Logits of the draft model after the newest token. It never reads the last token of a chain."""
        device = self.draft_model.device
        if not len(chain):
            self._forward = self._forward or self._start_draft_forward(chain.max_drafts)
        else:
            assert self._forward is not None
            tokens, valid = chain.newest
            tokens = to_device(tokens.clamp(max=self.last_id), device)
            self._forward.append(tokens, None if valid is None else to_device(valid, device))
        return to_device(self._forward.exit_logits(self.draft_model.depth), self.model.device)

    def draft_in_one_call(self, max_drafts: list[int], forward: PartialForward) -> Draft | None:
        """The greedy chain of the draft model in one call of its engine."""
        drafter = self.one_call()
        if drafter is None or not self.sampler.uses_argmax_only or not any(max_drafts):
            return None
        self._forward = self._start_draft_forward(
            [count if alive else 0 for count, alive in zip(max_drafts, self.view.alive, strict=True)]
        )
        chain = self._forward.draft_with_all_layers(self.chain_inputs(max_drafts, *drafter))
        if chain is None:
            return None
        self._read = [count - 1 for count in chain.counts]
        return self.finish_call(chain, forward)

    def _start_draft_forward(self, max_drafts: list[int]) -> PartialForward:
        """A forward of the draft model over its unread committed tokens (one or two), with space for `max_drafts` more."""
        lengths, live = self.store.length, [row for row, alive in enumerate(self.view.alive) if alive]
        self._read_tokens({row: self.text[row][lengths[row] : -1] for row in live if len(self.text[row]) - lengths[row] > 2})
        for row in live:
            self.prompts.remove(row)  # the rest of its prompt is read now
        unread = self._committed = max(len(self.text[row]) - lengths[row] for row in live)
        for row in live:  # if another row has two unread tokens, a row with one reads the token before it again
            lengths[row] = len(self.text[row]) - unread
        tokens = [text[-unread:] if alive else [0] * unread for text, alive in zip(self.text, self.view.alive, strict=True)]
        columns = on_device(tokens, self.draft_model.device).clamp_(max=self.last_id)  # [B, unread]
        counts = [count + unread - 1 for count in max_drafts]
        forward = PartialForward(self.draft_model, self.store, columns[:, 0], self.view.alive, counts, self.draft_shortlist)
        if unread > 1:
            forward.append(columns[:, 1:])
        return forward

    def _read_tokens(self, tokens: dict[int, list[int]]) -> None:
        """Run the draft model over the next tokens of some rows."""
        unread = Prefill(self.draft_model, self.store)
        for row, ids in tokens.items():
            unread.add(row, on_device(ids, self.draft_model.device).clamp_(max=self.last_id))
        while unread.waiting:
            unread.run(PREFILL_CHUNK)

    def observe_commits(self, draft: Draft | None, verdicts: list[RowVerdict]) -> None:
        """Move the lengths of the draft model's cache."""
        super().observe_commits(draft, verdicts)
        for row, verdict in enumerate(verdicts):
            if verdict.tokens:
                if self._forward is not None:
                    read = self._forward.width - self._committed if self._read is None else self._read[row]
                    self.store.length[row] = len(self.text[row]) + min(len(verdict.path), read)
                self.text[row] += verdict.tokens
        self._forward = self._read = None

    def tokens_to_replay(self, row: int, count: int) -> int:
        return max(len(self.text[row]) - 1 - self.store.length[row], count)

    def replay_tokens(self, row: int, tokens: Sequence[int]) -> Tensor | None:
        """Logits of the draft model at the last tokens, in one pass over the tokens that it has not read."""
        store, count, text, device = self.store, len(tokens) - 1, self.text[row], self.draft_model.device
        if len(text) - 1 - store.length[row] < count:
            return None
        if before := text[store.length[row] : -1 - count]:
            self._read_tokens({row: before})
        self.prompts.remove(row)
        begin, end = store.length[row], len(text) - 1
        ids = on_device([text[begin:end]], device).clamp_(max=self.last_id)  # [1, count]
        store.reserve(end)
        positions = torch.arange(begin, end, device=device, dtype=torch.int64)[None]
        at = Pass(positions, positions, None, slice(row, row + 1), end, begin)
        hidden = self.draft_model.embed(ids, positions)
        states = self.draft_model.run(hidden, at, store, range(self.draft_model.depth))
        store.length[row] = end
        return self.draft_model.logits(states, self.draft_shortlist)[0].to(self.model.device)
