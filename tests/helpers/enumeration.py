"""Exact laws by enumeration: a noise that explores every outcome of every draw, each with its weight."""

from collections import Counter, defaultdict
from collections.abc import Callable, Hashable, Sequence
from functools import cache, partial
from itertools import product
from types import SimpleNamespace
from typing import Any, TypeVar

import torch
from torch import Tensor
from transformers.generation.logits_process import LogitsProcessor

from skipstone.decoding.draft import Step
from skipstone.decoding.loop import DecodingLoop
from skipstone.decoding.method import Method
from skipstone.decoding.request import Request
from skipstone.decoding.sampling import Sampling
from skipstone.engines.kv_cache import KVCache
from skipstone.engines.model_lock import ModelLock
from skipstone.engines.model_runner import ModelRunner, only
from skipstone.models.passes import Pass

Outcome = TypeVar("Outcome", bound=Hashable)
Law = dict[tuple[int, ...], float]
EXACT = 1e-9
VOCAB, NEW = 3, 4  # four tokens: one from the prefill, then steps that have room for two drafts
PROMPT = torch.tensor([1, 0, 2])
NEGLIGIBLE = 1e-14  # branches that floating point opens where exact arithmetic has none


class Chooser:
    """One path through the tree of outcomes: the first choices are given, later ones take the first open branch."""

    def __init__(self, given: Sequence[int]) -> None:
        self.given = given
        self.taken: list[int] = []
        self.others: list[list[int]] = []
        self.weight = 1.0
        self._used: set[Hashable] = set()

    def choose(self, weights: Sequence[float], key: Hashable) -> int:
        """An index with positive weight. key: what the noise is addressed by; asking for it twice would tie draws together."""
        assert key not in self._used, f"the noise of (position, stream) {key} is used twice"
        self._used.add(key)
        place = len(self.taken)
        if place < len(self.given):
            pick = self.given[place]
        else:
            pick, *rest = [index for index, weight in enumerate(weights) if weight > NEGLIGIBLE]
            self.others += [[*self.taken, other] for other in rest]
        self.weight *= weights[pick]
        self.taken.append(pick)
        return pick


class Tracking:
    def __init__(self, chooser: Chooser) -> None:
        self.chooser = chooser

    def draw(self, p: Tensor, position: Tensor, stream: int) -> Tensor:
        assert p.shape[0] == 1
        weights = (p[0].double() / p[0].double().sum()).tolist()
        return torch.tensor([self.chooser.choose(weights, (int(position), stream))])

    def race(self, p: Tensor, position: Tensor, stream: int) -> Tensor:
        """Every order of draws without replacement; tokens that are impossible have -inf."""
        assert p.shape[0] == 1
        weights, order = p[0].double(), torch.full_like(p, -torch.inf, dtype=torch.double)
        for place in range(int((weights > 0).sum())):
            token = self.chooser.choose((weights / weights.sum()).tolist(), (int(position), stream, place)[: 2 + (place > 0)])
            order[0, token], weights = -place, weights.scatter(0, torch.tensor([token]), 0.0)
        return order

    def accept(self, probability: Tensor, position: Tensor, stream: int | Tensor, place: int = 0) -> Tensor:
        """Every position has a draw of its own, also behind one that failed."""
        streams = torch.as_tensor(stream).expand_as(position)
        draws = zip(probability[0].tolist(), position[0].tolist(), streams[0].tolist(), strict=True)
        return torch.tensor([[self._accepts(ratio, (at, stream, place)[: 2 + (place > 0)]) for ratio, at, stream in draws]])

    def _accepts(self, ratio: float, key: Hashable) -> bool:
        sure = min(1.0, ratio)
        return self.chooser.choose([1 - sure, sure], key) == 1


def explore(run: Callable[[Chooser], Outcome]) -> dict[Outcome, float]:
    law: dict[Outcome, float] = defaultdict(float)
    open_paths: list[list[int]] = [[]]
    while open_paths:
        chooser = Chooser(open_paths.pop())
        outcome = run(chooser)
        law[outcome] += chooser.weight
        open_paths += chooser.others
    return dict(law)


def exact_law(p: Callable[[tuple[int, ...]], Sequence[float]], tokens: int, vocab: int) -> Law:
    """The law of `tokens` tokens drawn one by one. p: a prefix of tokens -> the distribution of the next."""
    law: Law = {}
    for text in product(range(vocab), repeat=tokens):
        weight = 1.0
        for place in range(tokens):
            weight *= p(text[:place])[text[place]] if weight > 0 else 0.0
        law[text] = weight
    return law


def distance(found: Law, expected: Law) -> float:
    return max(abs(found.get(text, 0.0) - expected.get(text, 0.0)) for text in found.keys() | expected.keys())


def loop_law(
    method: Method,
    model: ModelRunner,
    prompt: Tensor,
    tokens: int,
    sampling: Sampling,
    watch: Callable[[Step], None] = lambda _: None,
) -> Law:
    """The exact law of the text that the real loop produces. watch: sees every step of every path."""
    request = Request(prompt, tokens, sampling=sampling)

    def run(chooser: Chooser) -> tuple[int, ...]:
        session = method.start(model, 1, len(prompt) + tokens)
        session.sampler.noise_type = lambda seed: Tracking(chooser)  # type: ignore[assignment]
        decoder = DecodingLoop(session)
        decoder.admit(0, request)
        text: list[int] = []
        while decoder.busy:
            step = decoder.step()
            watch(step)
            text += step.tokens[0]
        return tuple(text)

    return explore(run)


class Double(ModelRunner):
    def project(self, normed: Tensor, head: Any = None, shortlist: Tensor | None = None) -> Tensor:
        logits = (head or self.head)(normed)
        return logits if shortlist is None else only(shortlist, logits[..., shortlist], logits.shape[-1])


class Widened(ModelRunner):
    """A model in float32 on the native engine, whose logits are float64 from there on."""

    def __init__(self, model: Any) -> None:
        super().__init__(model, "native")

    def project(self, normed: Tensor, head: Any = None, shortlist: Tensor | None = None) -> Tensor:
        return super().project(normed, head, shortlist).double()


def in_one_pass(runner: ModelRunner, ids: Tensor) -> Tensor:
    """Scores behind a text by one pass of the native engine. Other passes of the loop have the same bits."""
    positions, store = torch.arange(ids.shape[1])[None], KVCache(1, runner.depth, ids.shape[1])
    store.reserve(ids.shape[1])
    at = Pass(positions, positions, None, slice(0, 1), ids.shape[1], 0)
    return runner.logits(runner.run(runner.embed(ids, positions), at, store, range(runner.depth)))[:, -1]


def target(
    scores_of: Callable[[Tensor], Tensor], prompt: Tensor, processors: Sequence[Any] = ()
) -> Callable[[tuple[int, ...]], list[float]]:
    """The exact distribution of the next token: prefix -> [V]. scores_of: ids [1, T] -> [1, V]."""

    @cache
    def p(prefix: tuple[int, ...]) -> list[float]:
        ids = torch.cat([prompt, torch.tensor(prefix, dtype=torch.long)])[None]
        scores = scores_of(ids)
        for processor in processors:
            scores = processor(ids, scores)
        return scores[0].softmax(-1).tolist()

    return p


class Tabled:
    """Stands in for a ModelRunner of two layers whose p and q are the same after every token.

    p: [V] weights at the top. q: [V] weights after layer 0.
    """

    depth, device, max_positions, kv_dtype = 2, torch.device("cpu"), 64, None
    engine = SimpleNamespace(supports_draws=False, own_threads=False, skips_padding=False)

    def __init__(self, p: Sequence[float], q: Sequence[float]) -> None:
        self.embeddings, self.lock = 64, ModelLock()
        self._scores = torch.tensor([q, p], dtype=torch.double).log()

    def embed(self, tokens: Tensor, positions: Tensor) -> Tensor:
        return torch.zeros(*tokens.shape, 1, dtype=torch.double)

    def run(self, hidden: Tensor, at: Any, store: Any, layers: range, *_: Any, **__: Any) -> Tensor:
        return hidden + len(layers)

    def logits(self, hidden: Tensor, shortlist: Tensor | None = None) -> Tensor:
        assert shortlist is None
        return self._scores[hidden.squeeze(-1).long() - 1]


class Seen:
    """Counts what happened on all paths, so that no proof is about drafts that never were."""

    def __init__(self) -> None:
        self.steps: Counter[tuple[int, int]] = Counter()

    def __call__(self, step: Step) -> None:
        self.steps[step.drafted[0], step.accepted[0]] += 1

    @property
    def lengths(self) -> set[int]:
        return {drafted for drafted, _ in self.steps}


class Pushing(LogitsProcessor):
    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        assert input_ids.shape[0] == 1
        weights = torch.arange(1, input_ids.shape[1] + 1)
        return scores + torch.nn.functional.one_hot((input_ids[0] * weights).sum() % VOCAB, VOCAB)


def proves(
    model: Any,
    method: Method,
    processors: Sequence[Any] = (),
    warpers: Sequence[Any] = (),
    own: Sequence[Any] = (),
    new: int = NEW,
    native: bool = False,
    **sampling: Any,
) -> Seen:
    """Assert that the loop's law is that of transformers' own forward and processors.

    model: in float64, or in float32 for the native engine. processors and `own` warpers run in the loop and the reference.
    `warpers` are for the reference alone: `sampling` has the same settings for the loop.
    """
    seen = Seen()
    settings = Sampling(**{"temperature": 1.0, "processors": processors, "warpers": own, **sampling})
    runner = Widened(model) if native else Double(model)
    found = loop_law(method, runner, PROMPT, new, settings, seen)
    scores_of = partial(in_one_pass, runner) if native else lambda ids: model(input_ids=ids).logits[:, -1]
    expected = exact_law(target(scores_of, PROMPT, [*processors, *warpers, *own]), new, VOCAB)
    assert abs(sum(found.values()) - 1) < EXACT, "the weights of all paths add up to one"
    assert distance(found, expected) < EXACT, "the loop's law is the target's"
    return seen
