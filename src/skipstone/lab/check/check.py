"""`skipstone check`: whether a method writes what the model alone would write, on this model, machine and dtype.

It knows no method's inside. Greedy texts are compared token for token, alone, in a batch, under processors and up to an end;
sampled ones by their law and against their neighbours; every step is audited: drafts keep their laws, and keys and values are
those of a fresh forward. The logits of a token are compared bit for bit with those of the same token beside others: on engines
that promise it they must be equal, and then no tie can fall another way; on others it is said how far they are apart.

Where two greedy texts part it is a tie that rounding broke, or a bug. One row and several rows are multiplied in different
orders, so their scores differ by rounding; where the two best tokens are closer than that, either choice is the model's own.
Anything farther apart is a bug, whoever made it.
"""

import copy
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import asdict, dataclass, field
from functools import cached_property, partial
from itertools import zip_longest
from typing import Any

import torch
from torch import Tensor
from transformers import LogitsProcessorList, PreTrainedModel, TemperatureLogitsWarper, TopPLogitsWarper

from skipstone.decoding.draft import Draft
from skipstone.decoding.loop import DecodingLoop
from skipstone.decoding.method import Method
from skipstone.decoding.request import Request
from skipstone.decoding.sampling import Sampling
from skipstone.engines.choose_engine import attach
from skipstone.engines.engine import SurvivalThresholds
from skipstone.engines.host_transfer import CPU, left_padded, on_device
from skipstone.engines.model_lock import lock_of
from skipstone.engines.model_runner import ModelRunner
from skipstone.hf import api
from skipstone.hf.generate_call import token_tensor
from skipstone.hf.generation_defaults import neutral_defaults
from skipstone.lab.check import distribution_tests
from skipstone.lab.check.batch_invariance import BatchInvarianceCheck, LogitsComparison
from skipstone.lab.check.kernel_invariance import measured, spread, stored_spread
from skipstone.models.quantised import kernels
from skipstone.models.torch_defaults import stable_defaults

PROCESSORS = {"repetition_penalty": 1.3, "no_repeat_ngram_size": 3}
LAWS: tuple[dict[str, Any], ...] = ({"temperature": 1.0}, {"temperature": 0.7, "top_p": 0.9})
AUDITED = 6  # tokens of which the texts of an audited batch have two, three and four times as many
SAMPLED = 24  # tokens of a sampled text
ROWS = 100  # texts sampled at once
HELD = 10  # texts whose distributions are held at once
BATCH = 3  # prompts at once, of different lengths
NEAR = 8  # best tokens on which the rounding of scores is measured
SPREAD = 4  # times as far apart as passes of other widths are, measured on a few, may texts of quantised kernels be
ROUNDING = 30  # units in the last place by which a stored key or value may differ from a fresh one


@dataclass(frozen=True)
class CheckScale:
    """How much is tested."""

    max_new_tokens: int = 64  # of a greedy text
    samples: int = 400  # texts for each law and side
    seed: int = 0


@dataclass(frozen=True)
class ScoredDifference:
    """The first token in which two texts of one prompt differ. Gaps are in units of the scores (logits)."""

    prompt: int  # which of several prompts, as the caller numbers them
    position: int  # the token's index among the new ones
    expected: int | None  # token id, None where that text had ended
    found: int | None
    margin: float | None = None  # by how much the precise scores prefer the better of the two
    gap: float | None = None  # how far the worse of them is from the best token of all
    allowed: float | None = None  # the largest gap that rounding in the model's own dtype explains
    texts: tuple[list[int], list[int]] = field(default=([], []), repr=False)  # expected and found, whole

    @property
    def tie(self) -> bool:
        """Whether rounding explains it."""
        return self.gap is not None and self.allowed is not None and self.gap <= self.allowed

    def __str__(self) -> str:
        """Where, what, and by how much, in one line."""
        expected, found = ("the end" if one is None else f"token {one}" for one in (self.expected, self.found))
        told = f"prompt {self.prompt}, new token {self.position}: expected {expected}, found {found}"
        if self.gap is None:
            return told
        return f"{told}, {self.gap:.3g} below the best score where rounding explains {self.allowed:.2g}"


@dataclass
class ProbeResult:
    """What one probe compared, and what it found."""

    name: str
    tested: int = 0  # comparisons
    unit: str = ""  # what was compared, where it is not texts, steps or draws
    ties: list[ScoredDifference] = field(default_factory=list)
    bugs: list[str] = field(default_factory=list)
    note: str = ""
    drafted: int = 0  # draft tokens: only texts with drafts accepted and rejected prove anything
    accepted: int = 0

    def report(self) -> dict[str, Any]:
        """Plain JSON values."""
        ties = [{name: value for name, value in asdict(one).items() if name != "texts"} for one in self.ties]
        return {**asdict(self), "ties": ties, "passed": not self.bugs}


@dataclass
class CheckReport:
    """All probes of a method on a model."""

    method: dict[str, Any]
    dtype: str
    device: str
    findings: list[ProbeResult]

    @property
    def passed(self) -> bool:
        """Whether no probe found a bug. Ties are no bugs."""
        return not any(finding.bugs for finding in self.findings)

    @property
    def proves(self) -> bool:
        """Whether drafts were both accepted and rejected somewhere, or the method drafts nothing."""
        drafted, accepted = (sum(getattr(one, name) for one in self.findings) for name in ("drafted", "accepted"))
        return not drafted or 0 < accepted < drafted


@contextmanager
def _own_turn(model: PreTrainedModel) -> Iterator[None]:
    """No other thread's texts inside, and the model's own generation defaults left out: they are the model's, not the
    thread's."""
    with lock_of(model), neutral_defaults(model):
        yield


class TieDetector:
    """Tells ties from bugs on one model. A copy of it in the next wider dtype is made when it is first needed.

    context: of a model, in which its scores are computed."""

    def __init__(
        self, model: PreTrainedModel, context: Callable[[PreTrainedModel], AbstractContextManager[None]] = nullcontext
    ) -> None:
        self.model, self._context = model, context

    @cached_property
    def precise(self) -> PreTrainedModel:
        """The model in float32, or in float64 where it is in float32 already."""
        wide = torch.float64 if self.model.dtype in (torch.float32, torch.float64) else torch.float32
        wider: Any = copy.deepcopy(self.model)
        attach(wider, "eager")  # which runs any dtype, whatever engine the environment names
        return wider.to(wide)

    @cached_property
    def quantised(self) -> bool:
        """Whether kernels compute the model that have no wider copy: what rounding does is seen in passes of other widths."""
        return bool(kernels(self.model))

    def compare(
        self, prompt: Tensor, expected: list[int], found: list[int], options: Mapping[str, Any] | None = None, number: int = 0
    ) -> ScoredDifference | None:
        """Where two greedy texts part, and whether rounding explains it; None for equal texts.

        prompt: [T] int64. expected, found: new token ids. options: of `model.generate`, those that change scores.
        number: which of several prompts it is, for messages.
        """
        texts = expected, found
        if expected == found:
            return None
        pairs = enumerate(zip_longest(expected, found))
        position, (one, other) = next((place, pair) for place, pair in pairs if pair[0] != pair[1])
        exact = ModelRunner(self.model).engine.quantize  # the same bits in every pass, and no wider copy of the weights
        if one is None or other is None or exact:
            return ScoredDifference(number, position, one, other, texts=texts)
        before = torch.cat([prompt.cpu(), on_device(expected[:position], CPU, prompt.dtype)])[None]  # [1, T + position]
        scores = self._next_scores(self.model, before, options or {})  # [V]
        precise = scores if self.quantised else self._next_scores(self.precise, before, options or {})
        best = precise.topk(min(NEAR, len(precise))).indices
        near = torch.cat([best, torch.tensor([one, other], dtype=torch.int64, device=best.device)])
        differences = (scores[near] - precise[near]).abs()
        rounding = max(differences[differences.isfinite()].tolist(), default=0.0)
        if self.quantised:
            rounding = spread(ModelRunner(self.model), before[0], near)
        unit = torch.finfo(self.model.dtype).eps * float(precise[best[0]].abs())
        margin = float((precise[one] - precise[other]).abs())
        gap = float(precise[best[0]] - torch.minimum(precise[one], precise[other]))
        return ScoredDifference(number, position, one, other, margin, gap, SPREAD * rounding + 2 * unit, texts)

    def _next_scores(self, model: PreTrainedModel, ids: Tensor, options: Mapping[str, Any]) -> Tensor:
        """[V] float64 on the CPU: the scores of the token after ids [1, T], processors applied, as plain decoding has them."""
        wanted = {**options, "max_new_tokens": 1, "do_sample": False, "output_scores": True}
        with self._context(model):
            output = api.generate(model, ids.to(model.device), "autoregressive", **wanted)
        scores: Any = output.scores
        return scores[0][0].double().cpu()


class Checker:
    """A model and a method under test."""

    def __init__(self, model: PreTrainedModel, method: Method, prompts: Sequence[Tensor], scale: CheckScale) -> None:
        """prompts: [T] ids each, of any integer dtype, at least two of different texts. ValueError where a prompt is too long
        for the model, or the method does not fit it; ImportError without scipy."""
        self.model, self.method, self.scale = model, method, scale
        self.prompts = [token_tensor(prompt).cpu() for prompt in prompts]
        self.judge = TieDetector(model, _own_turn)
        self.plain: list[list[int]] = []  # greedy texts of plain decoding
        self.finding = ProbeResult("")  # of the probe that runs
        self.greedy_options: dict[str, Any] = {"max_new_tokens": scale.max_new_tokens, "do_sample": False}
        runner, longest = ModelRunner(model), max(map(len, self.prompts))
        self._quantize = runner.engine.quantize
        method.check(runner)
        distribution_tests.ready()
        most = max(scale.max_new_tokens, SAMPLED, AUDITED * (BATCH + 1))
        if longest + most > runner.max_positions:
            raise ValueError(
                f"a prompt of {longest} tokens + {most} new ones is more than the model's {runner.max_positions} positions"
            )

    def run(self, told: Callable[[ProbeResult], None] = lambda _: None) -> CheckReport:
        """All probes, one after the other. told: called after each. That the method fails altogether is a bug, too."""
        findings = []
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", RuntimeWarning)  # that speculation does not pay is no question here
            for title, probe in self._probes():
                findings.append(finding := ProbeResult(title))
                self.finding = finding
                try:
                    probe()
                except torch.OutOfMemoryError:
                    raise  # the machine's fault
                except (ArithmeticError, AssertionError, LookupError, RuntimeError, TypeError, ValueError) as error:
                    finding.tested += 1
                    finding.bugs.append(f"{type(error).__name__}: {error}")
                told(finding)
        named = {"method": self.method.name, **self.method.settings}
        return CheckReport(named, str(self.model.dtype).removeprefix("torch."), str(self.model.device), findings)

    @property
    def _exact(self) -> bool:
        """Whether rounding, the dtype's and of quantised kernels, is too small to move a draw in a while."""
        return self.model.dtype in (torch.float32, torch.float64) and not self.judge.quantised

    def _probes(self) -> list[tuple[str, Callable[[], None]]]:
        laws_of = [("the law of sampled texts, " + ", ".join(f"{k} {v:g}" for k, v in one.items()), one) for one in LAWS]
        return [
            ("plain decoding", self.told)
            if self._quantize
            else ("plain decoding is transformers' own", self.against_transformers),
            ("greedy texts", self.greedy),
            ("greedy texts in a batch", self.batched),
            ("greedy texts under a repetition penalty and without repeated trigrams", self.processed),
            ("texts that end inside a draft", self.ended),
            ("every step: drafts and the key/value store", self.audited),
            *((title, partial(self.law, settings)) for title, settings in laws_of),
            ("sampled texts alone and in a batch", self.neighbours),
            *self._bits(),
            *([("the sums of quantised layers, a row alone and beside others", self.summed)] if self.judge.quantised else []),
        ]

    # --------------------------------------------------------------------------------------------- bit for bit

    def _bits(self) -> list[tuple[str, Callable[[], None]]]:
        """A probe for every claim that the engine makes; one, which finds no bugs, where it makes none."""
        bits = BatchInvarianceCheck(ModelRunner(self.model), self.prompts)
        if not bits.promised:
            name = bits.runner.engine.name
            return [(f"the bits of a token beside others, of which {name} promises nothing", partial(self.rounded, bits))]
        return [(title, partial(self.promised, claim)) for title, claim in bits.claims()]

    @torch.inference_mode()
    def promised(self, claim: Callable[[], LogitsComparison]) -> None:
        """Logits that must have the same bits."""
        found = claim()
        self.finding.tested, self.finding.unit = found.logits, "logits"
        if (fault := found.fault) is not None:
            self.finding.bugs.append(fault)

    @torch.inference_mode()
    def rounded(self, bits: BatchInvarianceCheck) -> None:
        """Logits that may differ by rounding: by how much."""
        found = bits.difference()
        self.finding.tested, self.finding.unit = found.logits, "logits"
        self.finding.note = f"they differ by up to {found.largest:.2g}; ties nearer than that may fall either way"

    @torch.inference_mode()
    def summed(self) -> None:
        """Sums of quantised layers, which may depend on how many rows there are: by how much, kernel by kernel."""
        found = measured(ModelRunner(self.model), torch.cat(self.prompts))
        self.finding.tested, self.finding.unit = sum(one.sums for one in found.values()), "sums"
        self.finding.note = "; ".join(f"{name}: {one}" for name, one in found.items())

    # ------------------------------------------------------------------------------------------------- greedy

    def against_transformers(self) -> None:
        """Our plain decoding is `model.generate`'s: what all else is compared with. Where the engine computes in a finer dtype
        than the weights are stored in, the reference is transformers in that dtype, on a copy of the same weights."""
        kind: Any = type(self.model)
        dtype = ModelRunner(self.model).dtype
        model: Any = self.model
        if dtype != model.dtype:
            model = copy.deepcopy(model).to(dtype)
        for number, prompt in enumerate(self.prompts):
            ids = prompt[None].to(self.model.device)
            with _own_turn(model):
                whole = kind.generate(model, ids, attention_mask=torch.ones_like(ids), **self.greedy_options)[0]
            expected = whole[len(prompt) :]
            self.plain.append(self._greedy("autoregressive", prompt))
            self._compare(number, prompt, expected.tolist(), self.plain[-1])

    def told(self) -> None:
        """Plain decoding of quantised weights, which transformers does not have: what all else is compared with."""
        self.plain = [self._greedy("autoregressive", prompt) for prompt in self.prompts]
        self.finding.note = (
            f"the reference for all else: the weights quantised to {self._quantize} are the native engine's alone"
        )

    def greedy(self) -> None:
        """One prompt at a time."""
        for number, prompt in enumerate(self.prompts):
            self._compare(number, prompt, self.plain[number], self._greedy(self.method, prompt))

    def batched(self) -> None:
        """Prompts of different lengths at once."""
        for start in range(0, len(self.prompts), BATCH):
            part = _uneven(self.prompts[start : start + BATCH])
            texts = self._generate(self.method, part, self.greedy_options)
            for number, (prompt, found) in enumerate(zip(part, texts, strict=True), start):
                self._compare(number, prompt, self._greedy("autoregressive", prompt), found)

    def processed(self) -> None:
        """Processors that look at all tokens so far, the draft's included."""
        for number, prompt in enumerate(self.prompts):
            expected, found = (self._greedy(one, prompt, **PROCESSORS) for one in ("autoregressive", self.method))
            self._compare(number, prompt, expected, found, PROCESSORS)

    def ended(self) -> None:
        """A token of each text is made its end: the text stops right there."""
        for number, prompt in enumerate(self.prompts):
            text = self.plain[number]
            for end in dict.fromkeys(text[len(text) // 3 :: max(1, len(text) // 4)]):
                found = self._greedy(self.method, prompt, eos_token_id=end, pad_token_id=end)
                self._compare(number, prompt, text[: text.index(end) + 1], found)

    def _compare(
        self, number: int, prompt: Tensor, expected: list[int], found: list[int], options: Mapping[str, Any] | None = None
    ) -> None:
        self.finding.tested += 1
        if (parted := self.judge.compare(prompt, expected, found, options, number)) is not None:
            if parted.tie:
                self.finding.ties.append(parted)
            else:
                self.finding.bugs.append(str(parted))

    # ------------------------------------------------------------------------------------------------ sampled

    def law(self, settings: Mapping[str, Any]) -> None:
        """Texts of one prompt by the method: each token against its own law, and all against plain decoding's from other
        seeds."""
        prompt, count, finding = self.prompts[0], self.scale.samples, self.finding
        mine = self._sampled(self.method, prompt, settings, range(self.scale.seed, self.scale.seed + count))
        other = range(self.scale.seed + count, self.scale.seed + 2 * count)
        sample = distribution_tests.compare(mine, self._sampled("autoregressive", prompt, settings, other))
        exact = self._drawn(prompt, mine, settings).law()
        finding.tested = count
        kinds = (sample, "two-sample tests", "plain sampling's"), (exact, "exact ones", "the model's own")
        finding.note = "; ".join(f"{law.tests} {kind}, p = {law.p_value:.2g}" for law, kind, _ in kinds)
        for law, _, whose in kinds:
            if not law.same:
                finding.bugs.append(f"{law.where}: the law differs from {whose}, p = {law.p_value:.2g}")

    @torch.inference_mode()
    def _drawn(self, prompt: Tensor, texts: list[list[int]], settings: Mapping[str, Any]) -> distribution_tests.TokenSample:
        """All tokens of some texts against their laws, by the model's own forward (the engine's, where it has quantised the
        weights) and transformers' warpers."""
        warpers = LogitsProcessorList([TemperatureLogitsWarper(settings["temperature"])])
        if "top_p" in settings:
            warpers.append(TopPLogitsWarper(settings["top_p"]))
        runner = ModelRunner(self.model)
        drawn = distribution_tests.TokenSample(rare=distribution_tests.RARE if self._exact else distribution_tests.ROUNDED)
        for start in range(0, len(texts), HELD):
            new = on_device(texts[start : start + HELD], CPU)
            ids = torch.cat([prompt.expand(len(new), -1), new], 1).to(self.model.device)
            if self._quantize:
                logits = runner.project(runner.read(ids)[:, len(prompt) - 1 : -1])
            else:
                with stable_defaults():
                    logits = self.model(ids, use_cache=False).logits[:, len(prompt) - 1 : -1]
            logits = logits.flatten(0, 1).float()
            drawn.add(warpers(ids, logits).softmax(-1), new.flatten().to(logits.device))  # type: ignore[arg-type]
        return drawn

    def neighbours(self) -> None:
        """A seed's text does not depend on what is decoded beside it. In half precision rounding moves draws: nothing is
        compared."""
        if not self._exact:
            self.finding.note = f"rounding in {'quantised kernels' if self.judge.quantised else 'this dtype'} moves draws"
            return
        settings, seeds = LAWS[0], range(self.scale.seed, self.scale.seed + 2 * BATCH)
        together = self._sampled(self.method, self.prompts[0], settings, seeds)
        for seed, found in zip(seeds, together, strict=True):
            (alone,) = self._sampled(self.method, self.prompts[0], settings, [seed])
            self.finding.tested += 1
            if alone != found:
                self.finding.bugs.append(f"seed {seed}: {found} in a batch, {alone} alone")

    def _sampled(
        self, method: Method | str, prompt: Tensor, settings: Mapping[str, Any], seeds: Sequence[int]
    ) -> list[list[int]]:
        texts: list[list[int]] = []
        options = {"do_sample": True, "top_k": 0, "max_new_tokens": SAMPLED, **settings}
        for start in range(0, len(seeds), ROWS):
            part = list(seeds[start : start + ROWS])
            texts += self._generate(method, [prompt] * len(part), options, part)
        return texts

    # ------------------------------------------------------------------------------------------------- audit

    def audited(self) -> None:
        """Every step of a batch: limits and laws of drafts, and the store against a fresh forward."""
        runner = ModelRunner(self.model)
        tolerance = max(1e-3, ROUNDING * torch.finfo(self.model.dtype).eps)
        if self.judge.quantised:
            apart = stored_spread(runner, torch.cat(self.prompts))
            tolerance = max(tolerance, SPREAD * apart)
            self.finding.note = f"keys and values of quantised layers differ by up to {apart:.2g} of the largest by themselves"
        for temperature in (0.0, 1.0):
            requests = [
                Request(prompt, AUDITED * (2 + i), sampling=Sampling(temperature, seed=i))
                for i, prompt in enumerate(_uneven(self.prompts[:BATCH]))
            ]
            try:
                self.finding.tested += self._audit(runner, requests, tolerance)
            except AssertionError as error:
                self.finding.bugs.append(f"temperature {temperature:g}: {error}")

    @torch.inference_mode()
    def _audit(self, runner: ModelRunner, requests: list[Request], tolerance: float) -> int:
        capacity = max(len(request.prompt) + request.max_new_tokens for request in requests)
        with runner.lock:
            session = self.method.start(runner, len(requests), capacity)
        decoder, own = DecodingLoop(session), session.drafter.propose_draft

        def draft(limit: list[int], stop_rule: SurvivalThresholds | None = None) -> Draft:
            found = own(limit, stop_rule)
            found.check()
            deepest = found.valid.sum(1).tolist() if found.parents is None else []
            assert all(count <= most for count, most in zip(deepest, limit, strict=False)), f"{deepest} drafts, at most {limit}"
            return found

        session.drafter.propose_draft = draft  # type: ignore[method-assign]
        for row, request in enumerate(requests):
            decoder.admit(row, request)
        texts = [request.prompt.tolist() for request in requests]
        steps = 0
        while decoder.busy:
            steps += 1
            for row, more in enumerate(decoder.step().tokens):
                texts[row] += more
                if session.alive[row]:
                    session.check(row, torch.tensor(texts[row], dtype=torch.int64, device=runner.device), tolerance)
        return steps

    # ---------------------------------------------------------------------------------------------- decoding

    def _greedy(self, method: Method | str, prompt: Tensor, **options: Any) -> list[int]:
        return self._generate(method, [prompt], {**self.greedy_options, **options})[0]

    def _generate(
        self, method: Method | str, prompts: Sequence[Tensor], options: dict[str, Any], seed: list[int] | None = None
    ) -> list[list[int]]:
        """New tokens of every prompt. Drafts are counted."""
        ids, mask = (one.to(self.model.device) for one in left_padded([prompt.tolist() for prompt in prompts]))
        with _own_turn(self.model):
            output = api.generate(self.model, ids, method, attention_mask=mask, seed=seed, **options)
        assert output.new_tokens is not None
        assert output.stats is not None
        self.finding.drafted += output.stats.drafted
        self.finding.accepted += output.stats.accepted
        return output.new_tokens


def _uneven(prompts: Sequence[Tensor]) -> list[Tensor]:
    """Prompts cut to different lengths, whatever they are like."""
    return [prompt[: max(1, len(prompt) - 2 * place)] for place, prompt in enumerate(prompts)]
