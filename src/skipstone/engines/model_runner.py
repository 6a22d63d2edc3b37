"""A Hugging Face decoder, layer by layer, on any engine."""

from collections.abc import Callable, Sequence
from copy import copy
from dataclasses import replace
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from skipstone.engines import greedy_tokens
from skipstone.engines.choose_engine import KV_DTYPES, EngineOptions, missing_room_for_copy, options_for, prepare_model
from skipstone.engines.engine import ChainInputs, ChainOutputs
from skipstone.engines.kv_cache import KVCache
from skipstone.engines.model_lock import alone_after_fork, lock_of
from skipstone.engines.native import packed_cache
from skipstone.engines.native.engine import NativeEngine
from skipstone.models.decoder_model import DecoderModel, refuse_state, unwrapped
from skipstone.models.fingerprint import fingerprint
from skipstone.models.mapped_model import MappedModel
from skipstone.models.passes import Pass, SkipSet
from skipstone.models.weight_version import model_version
from skipstone.utils.setup_times import setup_work

if TYPE_CHECKING:
    from transformers import PreTrainedModel


def only(shortlist: Tensor, logits: Tensor, vocabulary: int) -> Tensor:
    """Logits of a whole vocabulary [..., V] from those of a shortlist's ids [..., S]; -inf for all other ids."""
    whole = logits.new_full((*logits.shape[:-1], vocabulary), float("-inf"))
    whole[..., shortlist] = logits
    return whole


class ModelRunner(DecoderModel):
    """A model and the engine that computes it. ValueError for a model that skipstone cannot decode exactly.

    Making one is cheap. The model is prepared once, and again after its modules, its config, or the places and dtypes of its
    weights have changed. A thread holds the model's lock while it prepares the model, takes a decoding step or runs a pass.

    engine: computes the layers. engine_options: how it was chosen. engine_reason: why "auto" did not take the native engine,
    else None. kv_dtype: of keys and values in a `KVCache`. dtype: of the hidden states. lock: of the transformers model.
    methods: as in `PreparedModel`.
    """

    def __init__(
        self,
        model: "PreTrainedModel | MappedModel",
        engine: str | None = None,
        quantize: str | None = None,
        kv_dtype: str | None = None,
        compute_dtype: str | None = None,
    ) -> None:
        """engine, quantize, kv_dtype, compute_dtype: as in `EngineOptions`. None: the setting of `load` or `enable` for this
        model, else the environment's, else the default of `load`.

        ValueError if "native", quantised weights or rounded inputs are requested and the native engine cannot do it.
        OverwrittenCheckpointError as in `MappedModel.expect_unwritten_files`.
        """
        self._prepare(model, EngineOptions(engine, quantize, kv_dtype, compute_dtype))

    def _prepare(self, model: "PreTrainedModel | MappedModel", options: EngineOptions) -> None:
        inner = self._kept_alive = unwrapped(model)
        alone_after_fork()
        refuse_state(model, inner)
        if isinstance(inner, MappedModel):
            inner.expect_unwritten_files()
        self.engine_options = options_for(inner, options)
        self.kv_dtype = KV_DTYPES[self.engine_options.kv_dtype or "float32"]
        self.lock = lock_of(inner)
        self._pass_lock = self.lock.passes
        with self.lock:
            version = model_version(inner)
            self._prepared = prepare_model(inner, version.modules)
            self.methods = self._prepared.methods
            vars(self).update(vars(self._prepared.description))
            self.engine, self.engine_reason = self._prepared.choose_engine(self.engine_options, inner, version.weights)
        self.dtype = self.engine.dtype

    @property
    def fingerprint(self) -> str:
        """A hash of the weights, by which files made for them identify them. On the native engine it is the hash of its
        copy."""
        return fingerprint(self.model, self.engine.version)

    def in_fewer_bits(self, quantize: str) -> "ModelRunner":
        """A runner of this model with the native engine's weights quantised to "int8" or "int4". A model has one copy of each
        kind, of the version of the weights that this runner's engine has. ValueError if it would take too much memory."""
        if (reason := missing_room_for_copy(self.model, quantize)) is not None:
            raise ValueError(reason)
        drafting_model = copy(self)
        drafting_model.engine_options = self._options_of_copy(quantize)
        drafting_model.engine = self.copy_in(quantize)
        drafting_model.dtype = drafting_model.engine.dtype
        return drafting_model

    def copy_in(self, quantize: str) -> NativeEngine:
        """The engine with the weights in fewer bits: made before, mapped from the disk's cache, or made now."""
        with self.lock:
            engine, _ = self._prepared.choose_engine(self._options_of_copy(quantize), self.model, self.engine.version)
        assert isinstance(engine, NativeEngine)
        return engine

    def _options_of_copy(self, quantize: str) -> EngineOptions:
        return replace(self.engine_options.for_drafts, engine="native", quantize=quantize)

    def has_copy(self, quantize: str) -> bool:
        """Whether this process has a copy of the present weights in fewer bits."""
        engine = self._prepared.copies.get(quantize)
        return engine is not None and engine.is_current(self.engine.version)

    @property
    def caches_copies(self) -> bool:
        """Whether copies of the weights in fewer bits are read from the disk's cache, and written there."""
        return isinstance(self.model, MappedModel) and self.model.caches_panels

    def has_cached_copy(self, quantize: str) -> bool:
        """Whether the disk's cache has a copy of the weights in fewer bits. It is not read."""
        return self.caches_copies and packed_cache.has(self.model.files.identity, quantize)

    @setup_work("copy from the cache")
    def map_copy(self, quantize: str) -> bool:
        """Take a copy of the weights in fewer bits from the disk's cache. Returns whether it has one."""
        engine = self._prepared.map_copy(quantize, self.model)
        if engine is not None:
            self._keep_copy(quantize, engine)
        return engine is not None

    def make_copy(self, quantize: str, pause: Callable[[], None]) -> NativeEngine:
        """Make a copy of the weights in fewer bits on this thread, without the lock. pause: called between pieces."""
        engine = self._prepared.make_copy(self.model, quantize, pause)
        self._keep_copy(quantize, engine)
        return engine

    def _keep_copy(self, quantize: str, engine: NativeEngine) -> None:
        with self.lock:
            if not self.has_copy(quantize):  # which a request may have asked for meanwhile
                self._prepared.add_copy(quantize, engine)

    def embed(self, tokens: Tensor, positions: Tensor) -> Tensor:
        """[B, n] ids and positions -> [B, n, d], the states that enter layer 0."""
        return self.engine.embed(tokens, positions)

    def run(self, hidden: Tensor, at: Pass, store: KVCache, layers: range, skip: SkipSet | None = None) -> Tensor:
        """Run layers over [b, n, d], writing keys and values to the pass's slots. Returns [b, n, d].

        skip: sublayers that add nothing to the residual stream in this pass.
        """
        with self._pass_lock:
            return self.engine.run(hidden, at, store, layers, skip)

    def chain(self, start: ChainInputs, store: KVCache) -> ChainOutputs:
        """Draft a greedy chain in one call of an engine with `chains`."""
        with self._pass_lock:
            return self.engine.chain(start, store)

    def read(self, ids: Tensor) -> Tensor:
        """Run whole texts [B, T] through all layers and the final norm -> [B, T, d']."""
        return self.normed(self.read_layers(ids, [range(self.depth)])[-1])

    def read_layers(self, ids: Tensor, ranges: Sequence[range]) -> list[Tensor]:
        """Run whole texts [B, T] through ranges of layers, one after the other -> the input and each output, [B, T, d]."""
        return self.run_layers(self.embed(ids, self._positions(*ids.shape)), ranges)

    def _positions(self, rows: int, length: int) -> Tensor:
        return torch.arange(length, device=self.device, dtype=torch.int64).expand(rows, -1)

    def run_layers(self, hidden: Tensor, ranges: Sequence[range]) -> list[Tensor]:
        """As `read_layers`. hidden: [B, T, d], the states that enter the first range."""
        rows, length, _ = hidden.shape
        store, positions = KVCache(rows, self.depth, length), self._positions(rows, length)
        store.reserve(length)
        at = Pass(positions, positions, None, slice(0, rows), length, 0)
        states = [hidden]
        for layers in ranges:
            states.append(self.run(states[-1], at, store, layers))
        return states

    def normed(self, hidden: Tensor) -> Tensor:
        """The input of the LM head: states after the final norm (and OPT-350m's projection). [..., d] -> [..., d']."""
        return self.engine.normed(hidden)

    def greedy_tokens(self, hidden: Tensor) -> Tensor:
        """As in `Engine`, unless a subclass changes the logits. [B, n, d] -> [B, n] int64."""
        with self._pass_lock:
            if self.uses_engine_argmax:
                return self.engine.greedy_tokens(hidden)
            return greedy_tokens.greedy_token(self.logits(hidden))

    def top_k_tokens(self, logits: Tensor, count: int) -> Tensor:
        """As in `Engine`. ValueError for an impossible count."""
        if not 1 <= count <= logits.shape[-1]:
            raise ValueError(f"count must lie between 1 and the {logits.shape[-1]} logits of a token, found {count}")
        return self.engine.top_k_tokens(logits, count)

    @property
    def uses_engine_argmax(self) -> bool:
        """Whether the engine may choose the greedy token: no subclass changes its logits."""
        return type(self).project is ModelRunner.project

    @property
    def num_draftable_tokens(self) -> int:
        """Number of ids, from 0 on, that it has logits and embeddings for."""
        return min(int(self.head.weight.shape[0]), self.embeddings)

    def project(self, normed: Tensor, head: nn.Module | None = None, shortlist: Tensor | None = None) -> Tensor:
        """LM head and the family's scaling of logits. [B, n, d'] -> [B, n, V] float32. head: replaces the model's own.
        shortlist: [S] int64, ascending and unique, the ids to compute; all others get -inf."""
        with self._pass_lock:
            logits = self.engine.project(normed, head, shortlist)
        return logits if shortlist is None else only(shortlist, logits, self.head.weight.shape[0])

    def logits(self, hidden: Tensor, shortlist: Tensor | None = None) -> Tensor:
        """Final norm and `project`. [B, n, d] -> [B, n, V] float32."""
        return self.project(self.normed(hidden), None, shortlist)
