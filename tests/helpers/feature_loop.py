"""Runs drafters that read hidden states in the real loop, records the logits of their drafts, and compares them."""

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from skipstone.decoding.draft import Step
from skipstone.decoding.loop import DecodingLoop
from skipstone.decoding.method import Method
from skipstone.decoding.request import Request
from skipstone.engines.model_runner import ModelRunner
from skipstone.methods.drafting.chain import DraftChain
from skipstone.methods.drafting.feature_drafter import FeatureDrafter
from tests.helpers.feature_references import Eagle3Reference, HeadReference, MtpReference, normed_states, target_states

ROUNDING = 1e-3
"""Largest difference between logits in float32 and in float64. Logits deviate by 3 and more, faults show by a tenth of that."""
LENGTHS, NEW = (9, 80, 3), (25, 22, 19)
"""Of a ragged batch, in tokens. One prompt has more columns than a head leaves unread."""


@dataclass
class DraftRecord:
    """One draft of a row. text: the committed tokens. tokens: the drafted ones [k]. logits: [V], where each of them and the
    next was drawn from: k + 1 of them, or k if the head did not read the last."""

    row: int
    text: list[int]
    tokens: list[int] = field(default_factory=list)
    logits: list[Tensor] = field(default_factory=list)


class DraftRecorder:
    """Records all drafts of a drafter, which drafts token by token from then on.

    texts: what the target will say, prompts included. Drafts are then tokens of these texts with a probability of `peeking`,
    so that drafts of any head are accepted and rejected.
    """

    def __init__(self, drafter: FeatureDrafter, texts: Sequence[list[int]] = (), peeking: float = 0.6) -> None:
        self.drafter, self.texts, self.peeking = drafter, texts, peeking
        self.records: list[DraftRecord] = []
        self._current: dict[int, DraftRecord] = {}
        self._own_logits, self._own_propose = drafter.next_logits, drafter.propose
        replaced: Any = drafter
        replaced.next_logits, replaced.draft_in_one_call = self._next_logits, lambda *_: None
        if texts:
            replaced.propose = self._propose

    def _next_logits(self, chain: DraftChain, forward: Any) -> Tensor:
        logits = self._own_logits(chain, forward)
        if len(chain):
            tokens, valid = chain.newest
            for row, record in [*self._current.items()]:
                if valid is None or bool(valid[row]):
                    record.tokens.append(int(tokens[row]))
                    record.logits.append(logits[row])
                else:
                    del self._current[row]
            return logits
        live = [row for row, alive in enumerate(self.drafter.view.alive) if alive]
        self._current = {row: DraftRecord(row, [*self.drafter.text[row]], [], [logits[row]]) for row in live}
        self.records += self._current.values()
        return logits

    def _propose(self, logits: Tensor, position: Tensor, path: Tensor, active: Any) -> Any:
        tokens, q, scores = self._own_propose(logits, position, path, active)
        assert q is None, "tokens of another text are no draws"
        tokens = tokens.clone()
        for row, record in self._current.items():
            so_far = [*record.text, *path[row].tolist()]
            known = next((one for one in self.texts if one[: len(so_far)] == so_far and len(one) > len(so_far)), None)
            if known is not None and random.Random(f"{row} {len(so_far)}").random() < self.peeking:
                tokens[row] = known[len(so_far)]
        return tokens, q, scores


@dataclass
class Run:
    """What a loop has done. texts: of all requests, prompts included. recorders: of the drafters, by their place."""

    texts: list[list[int]]
    steps: list[Step]
    records: list[DraftRecord]

    @property
    def drafted(self) -> int:
        return sum(sum(step.drafted) for step in self.steps)

    @property
    def accepted(self) -> int:
        return sum(sum(step.accepted) for step in self.steps)

    def acceptance(self) -> list[float]:
        """Share of the drafts at each depth that were accepted, of those behind accepted ones."""
        pairs = [pair for step in self.steps for pair in zip(step.drafted, step.accepted, strict=True) if pair[0]]
        deepest = max(drafted for drafted, _ in pairs)
        reached = [[pair for pair in pairs if pair[0] > depth and pair[1] >= depth] for depth in range(deepest)]
        return [sum(pair[1] > depth for pair in own) / max(len(own), 1) for depth, own in enumerate(reached)]


def prompts(lengths: Sequence[int] = LENGTHS, vocab: int = 97, seed: int = 1) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randint(1, vocab, (length,), generator=generator) for length in lengths]


def requests(lengths: Sequence[int] = LENGTHS, new: Sequence[int] = NEW, **settings: Any) -> list[Request]:
    """settings: of `Request`."""
    return [Request(prompt, count, **settings) for prompt, count in zip(prompts(lengths), new, strict=True)]


def start(method: Method, model: ModelRunner, asked: Sequence[Request], chunk: int = 16, **settings: Any) -> DecodingLoop:
    """A loop with a row for every request. settings: of `DecodingLoop`."""
    capacity = max(len(one.prompt) + one.max_new_tokens for one in asked)
    loop = DecodingLoop(method.start(model, len(asked), capacity), chunk=chunk, **settings)
    for row, request in enumerate(asked):
        loop.admit(row, request)
    return loop


def finish(loop: DecodingLoop, asked: Sequence[Request], after: Callable[[DecodingLoop], None] = lambda _: None) -> Run:
    """Run a loop to its end. after: is called after every step."""
    run = Run([one.prompt.tolist() for one in asked], [], [])
    while loop.busy:
        run.steps.append(loop.step())
        for row, tokens in enumerate(run.steps[-1].tokens):
            run.texts[row] += tokens
        with torch.inference_mode():
            after(loop)
    return run


def record(
    method: Method,
    model: ModelRunner,
    asked: Sequence[Request],
    texts: Sequence[list[int]] = (),
    after: Callable[[DecodingLoop], None] = lambda _: None,
    **settings: Any,
) -> Run:
    """Decode with a recorded drafter. Arguments as in `DraftRecorder`, `start` and `finish`."""
    loop = start(method, model, asked, **settings)
    drafter: Any = loop.session.drafter
    recorder = DraftRecorder(drafter, texts)
    run = finish(loop, asked, after)
    run.records = recorder.records
    return run


class Expected:
    """Logits of a reference for drafts after texts of a target. depths: of the states that an EAGLE-3 head reads."""

    def __init__(self, model: Any, reference: HeadReference, depths: Sequence[int] = ()) -> None:
        self.model, self.reference, self.depths = model, reference, [*depths]
        self._known: dict[tuple[int, ...], Tensor] = {}

    def states(self, text: list[int]) -> Tensor:
        """[T, E * D]."""
        for known, states in self._known.items():
            if known[: len(text)] == tuple(text):
                return states[: len(text)]
        tokens = torch.tensor(text)
        mtp = isinstance(self.reference, MtpReference)
        found = normed_states(self.model, tokens) if mtp else target_states(self.model, tokens, self.depths)
        self._known[tuple(text)] = found
        return found

    def logits(self, record: DraftRecord) -> Tensor:
        """[k, V], of all logits that a drafter has computed."""
        states, drafts = self.states(record.text)[:-1], torch.tensor(record.tokens, dtype=torch.long)
        return self.reference.chain(states, torch.tensor(record.text), len(record.logits), drafts)[0]

    def assert_logits(self, records: Sequence[DraftRecord], tolerance: float = ROUNDING) -> list[int]:
        """Assert that logits at all depths are the reference's. Returns how many there are at each depth."""
        counts = [0] * max(len(record.logits) for record in records)
        for record in sorted(records, key=lambda one: -len(one.text)):
            expected = self.logits(record)
            for depth, (found, right) in enumerate(zip(record.logits, expected, strict=True)):
                finite = right.isfinite()
                where = f"row {record.row}, {len(record.text)} tokens, depth {depth + 1}"
                assert torch.equal(finite, found.isfinite()), f"{where}: other tokens can be drafted"
                off = float((found[finite].double() - right[finite]).abs().max())
                assert off <= tolerance, f"{where}: off by {off:.3g}"
                counts[depth] += 1
        return counts


def of_eagle3(model: Any, folder: Any, depths: Sequence[int]) -> Expected:
    """The reference of an EAGLE-3 head's folder. depths: of the states that it reads."""
    head: Any = model.get_output_embeddings()
    return Expected(model, Eagle3Reference(folder, model.get_input_embeddings().weight, head.weight), depths)
