"""`skipstone check`: whether a method writes what the model alone would write, on this model, machine and dtype.

It knows nothing of the method's inside. Greedy texts are compared token for token: alone, in a batch, under processors and up
to an end. Sampled texts are compared by their law and with their neighbours. Every step is audited: drafts keep their laws, and
keys and values equal those of a fresh forward. The logits of a token are compared bit for bit with those of the same token in a
batch. Engines that promise equal bits must keep the promise; for others the difference is reported.

Two greedy texts that differ show a tie or a bug. A pass over one row and one over several multiply in different orders, so
their scores differ by rounding. If the two best scores are closer than that, either choice is the model's own: a tie. A larger
gap is a bug.
"""

import copy
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import asdict, dataclass, field, replace
from functools import partial
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
from skipstone.engines import agreement
from skipstone.engines.choose_engine import EngineOptions, attach
from skipstone.engines.engine import SurvivalThresholds
from skipstone.engines.host_transfer import CPU, left_padded, on_device
from skipstone.engines.model_lock import lock_of
from skipstone.engines.model_runner import ModelRunner
from skipstone.hf import api
from skipstone.hf.generate_call import token_tensor
from skipstone.hf.generation_defaults import neutral_defaults
from skipstone.lab.check import batch_invariance, distribution_tests
from skipstone.lab.check.batch_invariance import BatchInvarianceCheck, LogitsComparison
from skipstone.lab.check.distribution_tests import TokenSample
from skipstone.lab.check.reference import Reference
from skipstone.models.mapped_model import MappedModel
from skipstone.models.quantised_checkpoints import kernels
from skipstone.models.recognition import derived_family, recognise
from skipstone.models.torch_defaults import stable_defaults
from skipstone.utils.cached_property import cached_property

Options = Mapping[str, Any]  # of `model.generate`
PROCESSORS = {"repetition_penalty": 1.3, "no_repeat_ngram_size": 3}
LAWS: tuple[dict[str, Any], ...] = ({"temperature": 1.0}, {"temperature": 0.7, "top_p": 0.9})
AUDITED_TOKENS = 6  # texts of an audited batch have two, three and four times as many tokens
SAMPLED_TOKENS = 24  # tokens of a sampled text
SAMPLED_ROWS = 100  # texts sampled at once
SCORED_TEXTS = 10  # texts whose distributions exist at once
BATCH = 3  # prompts at once, of different lengths
BEST_TOKENS = 8  # tokens on which the rounding of scores is measured
SPREAD = 4  # allowed difference of texts of quantised kernels, in measured differences between passes of other widths
ROUNDING = 30  # allowed difference between a stored key or value and a fresh one, in units in the last place


@dataclass(frozen=True)
class CheckScale:
    """The size of a check."""

    max_new_tokens: int = 64  # of a greedy text
    samples: int = 400  # texts for each law and side
    seed: int = 0


@dataclass(frozen=True)
class ScoredDifference:
    """The first token in which two texts of one prompt differ. Gaps are in units of the scores (logits)."""

    prompt: int  # number of the prompt
    position: int  # the token's index among the new ones
    expected: int | None  # token id, None if that text has ended
    found: int | None
    margin: float | None = None  # difference of the two tokens' precise scores
    gap: float | None = None  # difference between the best precise score of all and the worse of the two
    allowed: float | None = None  # the largest gap that rounding in the model's own dtype explains
    texts: tuple[list[int], list[int]] = field(default=([], []), repr=False)  # expected and found, whole

    @property
    def tie(self) -> bool:
        """Whether rounding explains the difference."""
        return self.gap is not None and self.allowed is not None and self.gap <= self.allowed

    def scored(self, precise: Tensor, rounding: Callable[[Tensor], float], eps: float) -> "ScoredDifference":
        """This difference with its gaps. precise: [V] float64 scores. rounding: of the scores of some tokens. eps: of the
        model's own dtype."""
        best = precise.topk(min(BEST_TOKENS, len(precise))).indices
        pair = precise.new_tensor([self.expected, self.found], dtype=torch.int64)
        unit = eps * float(precise[best[0]].abs())
        margin, gap = float(precise[pair].diff().abs()), float(precise[best[0]] - precise[pair].min())
        return replace(self, margin=margin, gap=gap, allowed=SPREAD * rounding(torch.cat([best, pair])) + 2 * unit)

    def __str__(self) -> str:
        expected, found = ("the end" if one is None else f"token {one}" for one in (self.expected, self.found))
        text = f"prompt {self.prompt}, new token {self.position}: expected {expected}, found {found}"
        if self.gap is None:
            return text
        return f"{text}, {self.gap:.3g} below the best score where rounding explains {self.allowed:.2g}"


@dataclass
class ProbeResult:
    """The comparisons and findings of one probe."""

    name: str
    tested: int = 0  # comparisons
    unit: str = ""  # of the comparisons, unless they are texts, steps or draws
    ties: list[ScoredDifference] = field(default_factory=list)
    bugs: list[str] = field(default_factory=list)
    note: str = ""
    drafted: int = 0  # draft tokens; a proof needs accepted and rejected ones
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
def _exclusive(model: PreTrainedModel) -> Iterator[None]:
    """Hold the model's lock, without its own generation defaults: other threads would see them changed."""
    with lock_of(model), neutral_defaults(model):
        yield


class TieDetector:
    """Tells ties from bugs on one model. The copy of it in a wider dtype is made when it is first needed."""

    def __init__(
        self, model: PreTrainedModel, context: Callable[[PreTrainedModel], AbstractContextManager[None]] = nullcontext
    ) -> None:
        """context: entered with a model while its scores are computed."""
        self.model, self._context = model, context

    @cached_property
    def precise(self) -> PreTrainedModel:
        """The model in float32, or in float64 if it is in float32."""
        dtype = torch.float64 if self.model.dtype in (torch.float32, torch.float64) else torch.float32
        wider: Any = copy.deepcopy(self.model)
        attach(wider, EngineOptions("eager"))  # which runs any dtype, whatever engine the environment names
        return wider.to(dtype)

    @cached_property
    def quantised(self) -> bool:
        """Whether quantised kernels compute the model. They have no wider copy, so passes of other widths show the rounding."""
        return bool(kernels(self.model))

    def compare(
        self, prompt: Tensor, expected: list[int], found: list[int], options: Mapping[str, Any] | None = None, number: int = 0
    ) -> ScoredDifference | None:
        """The first difference of two greedy texts, or None for equal texts.

        prompt: [T] int64. expected, found: new token ids. options: of `model.generate`, those that change scores.
        number: of the prompt, for messages.
        """
        texts = expected, found
        if expected == found:
            return None
        pairs = enumerate(zip_longest(expected, found))
        position, (one, other) = next((place, pair) for place, pair in pairs if pair[0] != pair[1])
        exact = has_own_values(ModelRunner(self.model))  # the same bits in every pass
        if one is None or other is None or exact:
            return ScoredDifference(number, position, one, other, texts=texts)
        prefix = torch.cat([prompt.cpu(), on_device(expected[:position], CPU, prompt.dtype)])[None]  # [1, T + position]
        scores = self._next_scores(self.model, prefix, options or {})  # [V]
        precise = scores if self.quantised else self._next_scores(self.precise, prefix, options or {})
        difference = ScoredDifference(number, position, one, other, texts=texts)
        if self.quantised:
            rounding = partial(batch_invariance.logits_spread, ModelRunner(self.model), prefix[0])
        else:
            rounding = partial(_largest_difference, scores, precise)
        return difference.scored(precise, rounding, torch.finfo(self.model.dtype).eps)

    def _next_scores(self, model: PreTrainedModel, ids: Tensor, options: Mapping[str, Any]) -> Tensor:
        """[V] float64 on the CPU: the processed scores of the token after ids [1, T], as in plain decoding."""
        one_token = {**options, "max_new_tokens": 1, "do_sample": False, "output_scores": True}
        with self._context(model):
            output = api.generate(model, ids.to(model.device), "autoregressive", **one_token)
        scores: Any = output.scores
        return scores[0][0].double().cpu()


def _largest_difference(scores: Tensor, precise: Tensor, tokens: Tensor) -> float:
    """Of the finite scores of some tokens."""
    differences = (scores[tokens] - precise[tokens]).abs()
    return max(differences[differences.isfinite()].tolist(), default=0.0)


def has_own_values(runner: ModelRunner) -> bool:
    """Whether transformers' modules do not compute what the engine does: its weights are quantised or those of a GGUF file, or
    it computes in a finer dtype."""
    return bool(runner.engine.quantize) or runner.dtype != runner.model.dtype or isinstance(runner.model, MappedModel)


class Checker:
    """Runs the probes of a method on a model."""

    def __init__(self, model: Any, method: Method, prompts: Sequence[Tensor], scale: CheckScale) -> None:
        """model: a PreTrainedModel, or the `MappedModel` of a GGUF file. prompts: at least two different ones, [T] ids of any
        integer dtype.

        ValueError if a prompt is too long for the model or the method does not fit it; ImportError without scipy.
        """
        self.model, self.method, self.scale = model, method, scale
        self.prompts = [token_tensor(prompt).cpu() for prompt in prompts]
        self.detector = TieDetector(model, _exclusive)
        self.plain: list[list[int]] = []  # greedy texts of plain decoding
        self.finding = ProbeResult("")  # of the current probe
        self.greedy_options: dict[str, Any] = {"max_new_tokens": scale.max_new_tokens, "do_sample": False}
        runner, longest = ModelRunner(model), max(map(len, self.prompts))
        self._quantize, self._has_own_values = runner.engine.quantize, has_own_values(runner)
        needs_reference = self._has_own_values and not self._quantize
        self.reference = Reference(model, runner.engine.rounds_inputs) if needs_reference else None
        method.check(runner)
        distribution_tests.ready()
        new = max(scale.max_new_tokens, SAMPLED_TOKENS, AUDITED_TOKENS * (BATCH + 1))
        if longest + new > runner.max_positions:
            raise ValueError(f"{longest} tokens of a prompt + {new} are more than the model's {runner.max_positions} positions")

    def run(self, done: Callable[[ProbeResult], None] = lambda _: None) -> CheckReport:
        """Run all probes. done: called after each. A method that fails altogether has a bug."""
        findings = []
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", RuntimeWarning)  # whether speculation pays does not matter here
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
                done(finding)
        method = {"method": self.method.name, **self.method.settings}
        return CheckReport(method, str(self.model.dtype).removeprefix("torch."), str(self.model.device), findings)

    @property
    def _exact(self) -> bool:
        """Whether rounding is too small to change a draw."""
        is_precise = self._has_own_values or self.model.dtype in (torch.float32, torch.float64)
        return is_precise and not self.detector.quantised

    def _probes(self) -> list[tuple[str, Callable[[], None]]]:
        laws = [("the law of sampled texts, " + ", ".join(f"{k} {v:g}" for k, v in law.items()), law) for law in LAWS]
        probes = [
            *self._reference_probes(),
            ("greedy texts", self.greedy),
            ("greedy texts in a batch", self.batched),
            ("greedy texts under a repetition penalty and without repeated trigrams", self.processed),
            ("texts that end inside a draft", self.ended),
            ("every step: drafts and the key/value store", self.audited),
            *((title, partial(self.law, settings)) for title, settings in laws),
            ("sampled texts alone and in a batch", self.neighbours),
            *self._bits(),
        ]
        if self.detector.quantised:
            probes.append(("the sums of quantised layers, a row alone and beside others", self.quantised_sums))
        return probes

    def _reference_probes(self) -> list[tuple[str, Callable[[], None]]]:
        """Plain decoding and the layers. The former comes first, because all other texts are compared with its own."""
        if self.reference is not None:
            expected = "those of the same weights in float64"
            probes: list[tuple[str, Callable[[], None]]] = [
                (f"the tokens of plain decoding are {expected}", partial(self.score_plain, self.reference)),
                (f"the layers, one by one, are {expected}", partial(self.compare_layers, self.reference)),
            ]
        else:
            probes = [("plain decoding" if self._quantize else "plain decoding is transformers' own", self.decode_plainly)]
        layers = ("the layers, one by one, are transformers' own", self.verify_layers)
        return probes + ([] if isinstance(self.model, MappedModel) else [layers])

    # --------------------------------------------------------------------------------------------- bit for bit

    def _bits(self) -> list[tuple[str, Callable[[], None]]]:
        """One probe per claim of the engine, or a single one without bugs if the engine promises nothing."""
        bits = BatchInvarianceCheck(ModelRunner(self.model), self.prompts)
        unpromised = f"bits of a token in a batch ({bits.runner.engine.name} does not promise them)"
        claims = bits.claims() if bits.promised else [(unpromised, bits.difference)]
        return [(title, partial(self.logits, compare, bits.promised)) for title, compare in claims]

    @torch.inference_mode()
    def logits(self, compare: Callable[[], LogitsComparison], is_promise: bool) -> None:
        """Logits that must have the same bits, or else may differ by rounding."""
        found = compare()
        self.finding.tested, self.finding.unit = found.logits, "logits"
        if not is_promise:
            self.finding.note = f"they differ by up to {found.largest:.2g}; ties nearer than that may fall either way"
        elif (fault := found.fault) is not None:
            self.finding.bugs.append(fault)

    def quantised_sums(self) -> None:
        """The difference of quantised layers' sums between passes of different widths, kernel by kernel."""
        found = batch_invariance.compare_kernels(ModelRunner(self.model), torch.cat(self.prompts))
        self.finding.tested, self.finding.unit = sum(one.sums for one in found.values()), "sums"
        self.finding.note = "; ".join(f"{name}: {one}" for name, one in found.items())

    # ------------------------------------------------------------------------------------------------- greedy

    def verify_layers(self) -> None:
        """The family that is known of the model's type is the one that its forward shows, and its layers give that forward's
        results."""
        known, shown = recognise(self.model).family, derived_family(self.model)
        differing = [name for name, value in vars(shown).items() if value != getattr(known, name)]
        self.finding.tested, self.finding.unit = ModelRunner(self.model).depth, "layers"
        if differing:
            self.finding.bugs.append(f"the model's type is known to have another {', '.join(differing)} than its forward shows")
        agreement.verify(self.model, ModelRunner(self.model))

    def compare_layers(self, reference: Reference) -> None:
        """The native engine's layers against those of the reference, which get the same inputs."""
        found = reference.layers(ModelRunner(self.model), torch.cat(self.prompts))
        self.finding.tested, self.finding.unit = len(found), "layers"
        median, largest = (max(getattr(one, name) for one in found) for name in ("median", "largest"))
        self.finding.note = f"by {median:.1g} of a layer's change of a token in the middle, {largest:.1g} at most"
        self.finding.bugs += [str(one) for one in found if not one.is_rounding]

    def score_plain(self, reference: Reference) -> None:
        """Plain decoding, the texts that all other probes compare with, against the best tokens of the reference."""
        self.plain = [self._greedy("autoregressive", prompt) for prompt in self.prompts]
        self.finding.unit, same, same_in_float32 = "tokens", 0, 0
        single = reference.copy_in(torch.float32)
        rounded = [reference.scores(single, *each).float() for each in zip(self.prompts, self.plain, strict=True)]
        del single  # before the copy in float64 is made
        for number, (prompt, text, scores) in enumerate(zip(self.prompts, self.plain, rounded, strict=True)):
            precise = reference.scores(reference.precise, prompt, text)
            best = precise.argmax(-1).tolist()
            self.finding.tested += len(text)
            differing = [position for position, token in enumerate(text) if token != best[position]]
            same += len(text) - len(differing)
            same_in_float32 += int((scores.argmax(-1) == precise.argmax(-1)).sum())
            for at in differing:
                difference = ScoredDifference(number, at, best[at], text[at], texts=(best, text))
                rounding = partial(_largest_difference, scores[at], precise[at])
                self._add(difference.scored(precise[at], rounding, torch.finfo(torch.float32).eps))
        self.finding.note = f"{same} are the reference's; of its own in float32, {same_in_float32} are"

    def decode_plainly(self) -> None:
        """Plain decoding, the reference of all other probes, against `model.generate`.

        transformers does not have the native engine's quantised weights, so their plain decoding is compared with nothing.
        """
        self.plain = [self._greedy("autoregressive", prompt) for prompt in self.prompts]
        if self._quantize:
            self.finding.note = f"the reference for all else: no other engine has the weights quantised to {self._quantize}"
            return
        model: Any = self.model
        for number, prompt in enumerate(self.prompts):
            ids = prompt[None].to(model.device)
            with _exclusive(model):
                whole = type(model).generate(model, ids, attention_mask=torch.ones_like(ids), **self.greedy_options)[0]
            self._compare(number, prompt, whole[len(prompt) :].tolist(), self.plain[number])

    def greedy(self) -> None:
        """One prompt at a time."""
        for number, prompt in enumerate(self.prompts):
            self._compare(number, prompt, self.plain[number], self._greedy(self.method, prompt))

    def batched(self) -> None:
        """Prompts of different lengths at once."""
        for start in range(0, len(self.prompts), BATCH):
            prompts = _uneven(self.prompts[start : start + BATCH])
            texts = self._generate(self.method, prompts, self.greedy_options)
            for number, (prompt, found) in enumerate(zip(prompts, texts, strict=True), start):
                self._compare(number, prompt, self._greedy("autoregressive", prompt), found)

    def processed(self) -> None:
        """Processors that depend on all tokens so far, drafts included."""
        for number, prompt in enumerate(self.prompts):
            expected, found = (self._greedy(method, prompt, **PROCESSORS) for method in ("autoregressive", self.method))
            self._compare(number, prompt, expected, found, **PROCESSORS)

    def ended(self) -> None:
        """A token of each text becomes its end of sequence; the text must stop there."""
        for number, prompt in enumerate(self.prompts):
            text = self.plain[number]
            for end in dict.fromkeys(text[len(text) // 3 :: max(1, len(text) // 4)]):
                found = self._greedy(self.method, prompt, eos_token_id=end, pad_token_id=end)
                self._compare(number, prompt, text[: text.index(end) + 1], found)

    def _compare(self, number: int, prompt: Tensor, expected: list[int], found: list[int], **options: Any) -> None:
        self.finding.tested += 1
        if (difference := self.detector.compare(prompt, expected, found, options, number)) is not None:
            self._add(difference)

    def _add(self, difference: ScoredDifference) -> None:
        if difference.tie:
            self.finding.ties.append(difference)
        else:
            self.finding.bugs.append(str(difference))

    # ------------------------------------------------------------------------------------------------ sampled

    def law(self, settings: Mapping[str, Any]) -> None:
        """Sampled texts of one prompt: each token against its own law, and all against plain decoding with other seeds."""
        prompt, count, finding, seed = self.prompts[0], self.scale.samples, self.finding, self.scale.seed
        own = self._sampled(self.method, prompt, settings, range(seed, seed + count))
        plain = self._sampled("autoregressive", prompt, settings, range(seed + count, seed + 2 * count))
        laws = [
            (distribution_tests.compare(own, plain), "two-sample tests", "plain sampling's"),
            (self._token_sample(prompt, own, settings).law(), "exact ones", "the model's own"),
        ]
        finding.tested = count
        finding.note = "; ".join(f"{law.tests} {kind}, p = {law.p_value:.2g}" for law, kind, _ in laws)
        for law, _, whose in laws:
            if not law.same:
                finding.bugs.append(f"{law.where}: the law differs from {whose}, p = {law.p_value:.2g}")

    @torch.inference_mode()
    def _token_sample(self, prompt: Tensor, texts: list[list[int]], settings: Mapping[str, Any]) -> TokenSample:
        """All tokens of the texts with their laws, by transformers' forward and warpers.

        If transformers' forward computes something else than the engine, the engine's is taken.
        """
        warpers = LogitsProcessorList([TemperatureLogitsWarper(settings["temperature"])])
        if "top_p" in settings:
            warpers.append(TopPLogitsWarper(settings["top_p"]))
        runner = ModelRunner(self.model)
        sample = TokenSample(rare=distribution_tests.RARE if self._exact else distribution_tests.ROUNDED)
        for start in range(0, len(texts), SCORED_TEXTS):
            new = on_device(texts[start : start + SCORED_TEXTS], CPU)
            ids = torch.cat([prompt.expand(len(new), -1), new], 1).to(self.model.device)
            if self._has_own_values:
                logits = runner.project(runner.read(ids)[:, len(prompt) - 1 : -1])
            else:
                with stable_defaults():
                    logits = self.model(ids, use_cache=False).logits[:, len(prompt) - 1 : -1]
            logits = logits.flatten(0, 1).float()
            sample.add(warpers(ids, logits).softmax(-1), new.flatten().to(logits.device))  # type: ignore[arg-type]
        return sample

    def neighbours(self) -> None:
        """A seed's text does not depend on its batch. In half precision rounding changes draws, so nothing is compared."""
        if not self._exact:
            self.finding.note = f"rounding in {'quantised kernels' if self.detector.quantised else 'this dtype'} moves draws"
            return
        settings, seeds = LAWS[0], range(self.scale.seed, self.scale.seed + 2 * BATCH)
        batch = self._sampled(self.method, self.prompts[0], settings, seeds)
        for seed, found in zip(seeds, batch, strict=True):
            (alone,) = self._sampled(self.method, self.prompts[0], settings, [seed])
            self.finding.tested += 1
            if alone != found:
                self.finding.bugs.append(f"seed {seed}: {found} in a batch, {alone} alone")

    def _sampled(self, method: Method | str, prompt: Tensor, settings: Options, seeds: Sequence[int]) -> list[list[int]]:
        texts: list[list[int]] = []
        options = {"do_sample": True, "top_k": 0, "max_new_tokens": SAMPLED_TOKENS, **settings}
        for start in range(0, len(seeds), SAMPLED_ROWS):
            part = list(seeds[start : start + SAMPLED_ROWS])
            texts += self._generate(method, [prompt] * len(part), options, part)
        return texts

    # ------------------------------------------------------------------------------------------------- audit

    def audited(self) -> None:
        """Every step of a batch: limits and laws of drafts, and the KV cache against a fresh forward."""
        runner = ModelRunner(self.model)
        tolerance = max(1e-3, ROUNDING * torch.finfo(self.model.dtype).eps)
        if self.detector.quantised:
            spread = batch_invariance.kv_spread(runner, torch.cat(self.prompts))
            tolerance = max(tolerance, SPREAD * spread)
            self.finding.note = f"keys and values of quantised layers differ by up to {spread:.2g} of the largest by themselves"
        for temperature in (0.0, 1.0):
            prompts = enumerate(_uneven(self.prompts[:BATCH]))
            requests = [Request(one, AUDITED_TOKENS * (2 + i), sampling=Sampling(temperature, seed=i)) for i, one in prompts]
            try:
                self.finding.tested += self._audit(runner, requests, tolerance)
            except AssertionError as error:
                self.finding.bugs.append(f"temperature {temperature:g}: {error}")

    @torch.inference_mode()
    def _audit(self, runner: ModelRunner, requests: list[Request], tolerance: float) -> int:
        """Decode a batch with a check after every step. Returns the number of steps. AssertionError for a fault."""
        capacity = max(len(request.prompt) + request.max_new_tokens for request in requests)
        with runner.lock:
            session = self.method.start(runner, len(requests), capacity)
        decoder, propose_draft = DecodingLoop(session), session.drafter.propose_draft

        def checked_draft(limits: list[int], stop_rule: SurvivalThresholds | None = None) -> Draft:
            draft = propose_draft(limits, stop_rule)
            draft.check()
            lengths = draft.valid.sum(1).tolist() if draft.parents is None else []
            assert all(n <= limit for n, limit in zip(lengths, limits, strict=False)), f"{lengths} drafts, at most {limits}"
            return draft

        session.drafter.propose_draft = checked_draft  # type: ignore[method-assign]
        for row, request in enumerate(requests):
            decoder.admit(row, request)
        texts = [request.prompt.tolist() for request in requests]
        steps = 0
        while decoder.busy:
            steps += 1
            for row, tokens in enumerate(decoder.step().tokens):
                texts[row] += tokens
                if session.alive[row]:
                    session.check(row, torch.tensor(texts[row], dtype=torch.int64, device=runner.device), tolerance)
        return steps

    # ---------------------------------------------------------------------------------------------- decoding

    def _greedy(self, method: Method | str, prompt: Tensor, **options: Any) -> list[int]:
        return self._generate(method, [prompt], {**self.greedy_options, **options})[0]

    def _generate(self, method: Method | str, prompts: Sequence[Tensor], options: Options, seed: Any = None) -> list[list[int]]:
        """New tokens of every prompt. Drafts are counted."""
        ids, mask = (one.to(self.model.device) for one in left_padded([prompt.tolist() for prompt in prompts]))
        with _exclusive(self.model):
            output = api.generate(self.model, ids, method, attention_mask=mask, seed=seed, **options)
        assert output.new_tokens is not None
        assert output.stats is not None
        self.finding.drafted += output.stats.drafted
        self.finding.accepted += output.stats.accepted
        return output.new_tokens


def _uneven(prompts: Sequence[Tensor]) -> list[Tensor]:
    """Prompts cut to different lengths."""
    return [prompt[: max(1, len(prompt) - 2 * place)] for place, prompt in enumerate(prompts)]
