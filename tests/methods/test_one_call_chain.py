"""A greedy chain in one native call is the chain that is drafted token by token: tokens, states, keys and values, the text."""

import copy
import math
import random
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor

from skipstone import LayerSkip, Method, Request, SelfSpeculative, Swift
from skipstone.decoding import verify
from skipstone.decoding.draft import Draft
from skipstone.engines.engine import ChainInputs, ChainOutputs
from skipstone.engines.kv_cache import KVCache
from skipstone.engines.model_runner import ModelRunner
from skipstone.engines.native.engine import NativeEngine
from skipstone.methods.auto import auto
from skipstone.models.decoder_model import DecoderModel
from skipstone.policy import choose_drafter
from skipstone.policy.choose_drafter import PLAIN, Decision, Policy
from tests.helpers import families
from tests.helpers.machine import start
from tests.helpers.native import NATIVE_ONLY
from tests.helpers.pairwise import round_robin

pytestmark = NATIVE_ONLY

DRAFTS = 6


class Noting(NativeEngine):
    """The native engine, which notes the inputs of its chains."""

    def __init__(self, *given: Any) -> None:
        super().__init__(*given)
        self.calls: list[ChainInputs] = []

    def chain(self, start: ChainInputs, store: KVCache) -> Any:
        self.calls.append(start)
        return super().chain(start, store)


class TokenByToken(Noting):
    """The native engine without the one call."""

    supports_chains = False


@dataclass
class Drafted:
    """A draft, and what it left behind. valid: [B, n]; the others for valid entries only, in their order.

    states: [entries, d] and depth: [entries], of the root and the drafts of every row but the last (of a tree, of its chain).
    stored: keys and values of the same tokens and those before them. max_drafts: of every row, as the engine was called with
    them; None without a call.
    """

    valid: Tensor
    tokens: Tensor
    confidence: Tensor | None
    depth: Tensor
    states: Tensor
    stored: list[Tensor]
    max_drafts: list[int] | None


def seen(session: Any, draft: Draft, calls: list[ChainInputs]) -> Drafted:
    forward: Any = draft.forward
    in_chain = draft.valid if draft.parents is None else draft.valid[:, : draft.levels]
    entries, counts = torch.nn.functional.pad(in_chain, (0, 1)), in_chain.sum(1).tolist()  # [B, n + 1]
    return Drafted(
        draft.valid,
        draft.tokens[draft.valid],
        None if draft.confidence is None else draft.confidence[draft.valid],
        torch.from_numpy(forward.depth.copy())[:, : entries.shape[1]][entries],
        forward.hidden[:, : entries.shape[1]][entries],
        [
            buffer[row, :, : forward.base[row] + count].clone()
            for buffer in (*session.store.keys, *session.store.values)
            for row, count in enumerate(counts)
            if session.alive[row]
        ],
        [max(0, count) for count in calls[0].max_drafts] if calls else None,
    )


def decode(
    engine: type[Noting], model: Any, method: Method, requests: list[Request], steps: int | None = None
) -> tuple[list[list[int]], list[Drafted]]:
    """The texts and all drafts. steps: of the loop at most."""
    runner: Any = ModelRunner(model, "native")
    runner.engine = engine(model, DecoderModel(model))
    decoder, drafts, texts = start(method, runner, requests), list[Drafted](), [list[int]() for _ in requests]
    session: Any = decoder.session
    own = session.drafter.propose_draft

    def draft(limit: list[int]) -> Draft:
        runner.engine.calls.clear()
        found = own(limit)
        drafts.append(seen(session, found, runner.engine.calls))
        return found

    session.drafter.propose_draft = draft
    while decoder.busy and (steps is None or len(drafts) < steps):
        for row, more in enumerate(decoder.step().tokens):
            texts[row] += more
    return texts, drafts


def requests(rows: int, eos: frozenset[int], sizes: tuple[int, ...] = (30, 11, 21)) -> list[Request]:
    """Ragged prompts whose texts end at different steps, so that rows have different room, and then none."""
    return [Request(prompt, sizes[row], eos) for row, prompt in enumerate(families.prompts(rows))]


def assert_alike(family: str, method: Method, asked: list[Request], steps: int | None = None) -> tuple[list[Drafted], Any]:
    """Drafts and texts are those of a token-by-token engine. Returns both."""
    model = families.cached(family)
    texts, drafts = decode(Noting, model, method, asked, steps)
    expected_texts, expected = decode(TokenByToken, model, method, asked, steps)
    assert all((draft.max_drafts is not None) == bool(draft.valid.any()) for draft in drafts), "chains in one call"
    assert all(draft.max_drafts is None for draft in expected)
    for mine, theirs in zip(drafts, expected, strict=True):
        width = mine.valid.shape[1]
        assert torch.equal(mine.valid, theirs.valid[:, :width])
        assert not theirs.valid[:, width:].any()  # columns that it drafted before it saw that all rows had stopped
        for name in ("tokens", "depth", "states"):
            assert torch.equal(getattr(mine, name), getattr(theirs, name))
        assert all(torch.equal(a, b) for a, b in zip(mine.stored, theirs.stored, strict=True))
        torch.testing.assert_close(mine.confidence, theirs.confidence, rtol=1e-5, atol=1e-7)
    assert texts == expected_texts
    return drafts, texts


METHODS: dict[str, Any] = {
    "layerskip": lambda threshold: LayerSkip(2, DRAFTS, threshold),
    "skip sets": lambda threshold: SelfSpeculative((1, 2), (2,), None, DRAFTS, threshold),
    "a skipped attention": lambda threshold: SelfSpeculative((1,), (), None, DRAFTS, threshold),
    "layerskip without reuse": lambda threshold: LayerSkip(2, DRAFTS, threshold, reuse_cache=False),
    "layerskip, some tokens": lambda threshold: LayerSkip(2, DRAFTS, threshold, draft_vocabulary=60),
    "skip sets, some tokens": lambda threshold: SelfSpeculative((1, 2), (2,), None, DRAFTS, threshold, draft_vocabulary=60),
}


@round_robin(method=METHODS, threshold=[None, 0.9, 0.3, "adaptive"], family=["llama", "gemma2"])
def test_one_call_drafts_what_single_tokens_draft(method: str, threshold: Any, family: str) -> None:
    drafts, _ = assert_alike(family, METHODS[method](threshold), requests(3, frozenset()))
    max_drafts = [draft.max_drafts for draft in drafts if draft.max_drafts is not None]
    assert any(len(set(counts) - {0}) > 1 for counts in max_drafts), "no two rows had different room"
    assert any(0 in counts for counts in max_drafts), "every row took part in every step"
    stopped = [draft for draft in drafts if draft.max_drafts is not None and draft.valid.sum(1).tolist() != draft.max_drafts]
    if threshold is None:
        assert not stopped, "nothing but a threshold stops a draft here"
    elif threshold != 0.3:
        assert stopped, "the threshold stopped no draft"


@round_robin(threshold=[None, 0.3, "adaptive"], dynamic=[True, False], tokens=[None, 60, 6], rows=[3, 1])
def test_trees_of_one_call_are_those_of_single_tokens(threshold: Any, dynamic: bool, tokens: int | None, rows: int) -> None:
    settings: Any = {"search": "uniform", "dynamic_verification": dynamic, "draft_vocabulary": tokens}
    drafts, _ = assert_alike("llama", Swift(0.45, DRAFTS, threshold, **settings), requests(rows, frozenset()))
    assert any(draft.valid.shape[1] > DRAFTS for draft in drafts) == dynamic, "runners-up are leaves"


@pytest.mark.parametrize("tokens", [None, 20])
def test_runners_up_distributions_and_entropies_are_those_of_float64(tokens: int | None) -> None:
    model, drafts, size = families.cached("llama"), 7, 100
    runner, exact = ModelRunner(model, "native"), copy.deepcopy(model).double()
    shortlist = None if tokens is None else torch.arange(3, 97, 4)[:tokens]
    ids, roots = torch.arange(97) if shortlist is None else shortlist, torch.tensor([[5], [11]])

    def chain(limits: list[float]) -> ChainOutputs:
        inputs = ChainInputs([drafts, drafts], None, [frozenset()] * 2, runner.depth, max_entropy=limits)
        inputs.num_ranked, inputs.distribution_size, inputs.shortlist = 30, size, shortlist
        inputs.roots, inputs.bases, inputs.extent, inputs.columns = roots[:, 0], [0, 0], drafts + 1, drafts + 1
        store = KVCache(2, runner.depth, drafts + 1)
        store.reserve(drafts + 1)
        return runner.chain(inputs, store)

    found: Any = chain([math.inf, math.inf])
    logits = exact(torch.cat([roots, found.tokens[:, :-1]], 1)).logits[..., ids]  # [2, n, S], every place at once
    p = logits.softmax(-1)
    assert torch.equal(found.ranked, ids[logits.argsort(-1, descending=True)][..., :30])
    torch.testing.assert_close(found.entropy.double(), verify.entropy(p), rtol=0, atol=2e-5)
    torch.testing.assert_close(found.distributions[..., ids].double(), p, rtol=1e-4, atol=1e-6)
    found.distributions[..., ids] = 0
    assert not found.distributions.any()
    limit = float(found.entropy[0].sort().values[2])  # as much as one of them: it does not stop there
    stopped = chain([limit, math.inf])
    assert stopped.counts == [1 + next(n for n, one in enumerate(found.entropy[0].tolist()) if one > limit), drafts]


@round_robin(method=METHODS, rows=[3, 1])
def test_a_chain_ends_with_the_token_that_ends_its_row(method: str, rows: int) -> None:
    eos = frozenset(range(3, 97, 7))
    drafts, texts = assert_alike("llama", METHODS[method](None), requests(rows, eos, (40, 40, 40)))
    early = 0
    for draft in drafts:
        tokens = iter(draft.tokens.tolist())
        for count, max_drafts in zip(draft.valid.sum(1).tolist(), draft.max_drafts or [0] * rows, strict=True):
            row = [next(tokens) for _ in range(count)]
            assert not set(row[:-1]) & eos, "the chain went on behind an end"
            assert count == max_drafts or row[-1] in eos
            early += count < max_drafts
    assert early > 0, "no draft ended a row before it was full"
    assert all(text[-1] in eos for text in texts if len(text) < 40)


def planned(monkeypatch: pytest.MonkeyPatch, *, together: bool, shared: bool = True) -> list[tuple[int, ...]]:
    """Numbers of drafts of every row and step, by plans that depend on the position alone: measured times would not repeat.
    shared: whether the draft steps that rows pay for together cost anything."""

    def decide(policy: Policy, *_: object) -> Decision:
        if policy.position < 2:
            return Decision(PLAIN)
        dice = random.Random(policy.position)
        beside = [0.6 * dice.random() ** 3 for _ in range(DRAFTS)]
        least = tuple(one + shared * 0.2 * dice.random() ** 2 for one in beside)
        return Decision("layerskip, exit 2", thresholds=(0.0, *least), shared=(0.0, *beside) if together else ())

    monkeypatch.setattr(Policy, "decide", decide)
    monkeypatch.setattr(choose_drafter, "STEADY", math.inf)  # plain decoding is timed in three steps, however long they take
    monkeypatch.setattr(Policy, "next_replay", lambda *_: None)
    monkeypatch.setattr(auto.method_states, "method_state", lambda *given: given[-1]())  # each run learns by itself
    asked = requests(3, frozenset(), (200, 200, 200))
    drafts, _ = assert_alike("llama", auto.Auto((LayerSkip(2),), use_profile=False), asked, steps=30)
    return [tuple(one.valid.sum(1).tolist()) for one in drafts]


@pytest.mark.parametrize("together", [False, True])
def test_rows_stop_by_survival_in_one_call_as_token_by_token(together: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    lengths = planned(monkeypatch, together=together)
    assert any(len(set(one)) > 1 for one in lengths), "a row stopped before others"
    if together:
        assert lengths != planned(monkeypatch, together=True, shared=False), "some steps were too dear for all rows together"
