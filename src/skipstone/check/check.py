"""`skipstone check`: whether a method writes what the model alone would write, on this model, machine and dtype.

It knows no method's inside. Greedy texts are compared token for token, alone, in a batch, under processors and up to an end;
sampled ones by their law and against their neighbours; every step is audited: drafts keep their laws, and keys and values are
those of a fresh forward.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor
from transformers import LogitsProcessorList, PreTrainedModel, TemperatureLogitsWarper, TopPLogitsWarper

from skipstone import api
from skipstone.check import laws
from skipstone.check.findings import Finding, Report, Scale
from skipstone.check.ties import Judge
from skipstone.decoding.draft import Draft
from skipstone.decoding.loop import Decoder
from skipstone.decoding.method import Method
from skipstone.decoding.sampling import Sampling
from skipstone.decoding.session import Request
from skipstone.hf.defaults import neutral_defaults
from skipstone.models.layered import LayeredModel

PROCESSORS = {"repetition_penalty": 1.3, "no_repeat_ngram_size": 3}
LAWS: tuple[dict[str, Any], ...] = ({"temperature": 1.0}, {"temperature": 0.7, "top_p": 0.9})
AUDITED = 6  # tokens of which the texts of an audited batch have two, three and four times as many
SAMPLED = 24  # tokens of a sampled text
ROWS = 100  # texts sampled at once
HELD = 10  # texts whose distributions are held at once
BATCH = 3  # prompts at once, of different lengths
ROUNDING = 30  # units in the last place by which a stored key or value may differ from a fresh one


class Checker:
    """A model and a method under test. prompts: [T] int64 ids each, at least two of different texts."""

    def __init__(self, model: PreTrainedModel, method: Method, prompts: Sequence[Tensor], scale: Scale) -> None:
        self.model, self.method, self.scale = model, method, scale
        self.prompts = [prompt.cpu() for prompt in prompts]
        self.judge = Judge(model)
        self.plain: list[list[int]] = []
        layered, longest = LayeredModel(model), max(map(len, self.prompts))
        method.check(layered)
        laws.ready()
        most = max(scale.max_new_tokens, SAMPLED, AUDITED * (BATCH + 1))
        if longest + most > layered.max_positions:
            raise ValueError(
                f"a prompt of {longest} tokens + {most} new ones is more than the model's {layered.max_positions} positions"
            )

    def run(self, told: Callable[[Finding], None] = lambda _: None) -> Report:
        """All probes, one after the other. told: called after each."""
        findings = []
        with neutral_defaults(self.model), warnings.catch_warnings():
            warnings.simplefilter("ignore", RuntimeWarning)  # that speculation does not pay is no question here
            for title, probe in self._probes():
                findings.append(finding := Finding(title))
                self._survive(probe, finding)
                told(finding)
        named = {"method": self.method.name, **self.method.settings}
        return Report(named, str(self.model.dtype).removeprefix("torch."), str(self.model.device), findings)

    @property
    def _exact(self) -> bool:
        """Whether the dtype's rounding is too small to move a draw in a while."""
        return self.model.dtype in (torch.float32, torch.float64)

    def _probes(self) -> list[tuple[str, Callable[[Finding], None]]]:
        laws_of = [
            (
                "the law of sampled texts, " + ", ".join(f"{name} {value:g}" for name, value in one.items()),
                partial(self.law, one),
            )
            for one in LAWS
        ]
        return [
            ("plain decoding is transformers' own", self.against_transformers),
            ("greedy texts", self.greedy),
            ("greedy texts in a batch", self.batched),
            ("greedy texts under a repetition penalty and without repeated trigrams", self.processed),
            ("texts that end inside a draft", self.ended),
            ("every step: drafts and the key/value store", self.audited),
            *laws_of,
            ("sampled texts alone and in a batch", self.neighbours),
        ]

    def _survive(self, probe: Callable[[Finding], None], finding: Finding) -> None:
        """Probe; that the method failed altogether is found too."""
        try:
            probe(finding)
        except torch.OutOfMemoryError:
            raise  # the machine's fault
        except (ArithmeticError, AssertionError, LookupError, RuntimeError, TypeError, ValueError) as error:
            finding.tested += 1
            finding.bugs.append(f"{type(error).__name__}: {error}")

    # ------------------------------------------------------------------------------------------------- greedy

    def against_transformers(self, finding: Finding) -> None:
        """Our plain decoding is `model.generate`'s: what all else is compared with."""
        kind: Any = type(self.model)
        for number, prompt in enumerate(self.prompts):
            ids = prompt[None].to(self.model.device)
            options = {"max_new_tokens": self.scale.max_new_tokens, "do_sample": False}
            expected = kind.generate(self.model, ids, attention_mask=torch.ones_like(ids), **options)[0, len(prompt) :].tolist()
            self.plain.append(self._texts("autoregressive", [prompt], {}, finding)[0])
            self._compare(finding, number, expected, self.plain[-1], {})

    def greedy(self, finding: Finding) -> None:
        """One prompt at a time."""
        for number, prompt in enumerate(self.prompts):
            self._compare(finding, number, self.plain[number], self._texts(self.method, [prompt], {}, finding)[0], {})

    def batched(self, finding: Finding) -> None:
        """Prompts of different lengths at once."""
        for start in range(0, len(self.prompts), BATCH):
            part = _uneven(self.prompts[start : start + BATCH])
            texts = self._texts(self.method, part, {}, finding)
            for number, (prompt, found) in enumerate(zip(part, texts, strict=True), start):
                expected = self._texts("autoregressive", [prompt], {}, None)[0]
                self._compare(finding, number, expected, found, {}, prompt)

    def processed(self, finding: Finding) -> None:
        """Processors that look at all tokens so far, the draft's included."""
        for number, prompt in enumerate(self.prompts):
            expected = self._texts("autoregressive", [prompt], PROCESSORS, None)[0]
            found = self._texts(self.method, [prompt], PROCESSORS, finding)[0]
            self._compare(finding, number, expected, found, PROCESSORS)

    def ended(self, finding: Finding) -> None:
        """A token of each text is made its end: the text stops right there."""
        for number, prompt in enumerate(self.prompts):
            text = self.plain[number]
            for end in dict.fromkeys(text[len(text) // 3 :: max(1, len(text) // 4)]):
                expected = text[: text.index(end) + 1]
                found = self._texts(self.method, [prompt], {"eos_token_id": end, "pad_token_id": end}, finding)[0]
                self._compare(finding, number, expected, found, {})

    def _compare(
        self,
        finding: Finding,
        number: int,
        expected: list[int],
        found: list[int],
        options: Mapping[str, Any],
        prompt: Tensor | None = None,
    ) -> None:
        finding.tested += 1
        ids = self.prompts[number] if prompt is None else prompt
        parted = self.judge.compare(ids, expected, found, options, number)
        if parted is None:
            return
        if parted.tie:
            finding.ties.append(parted)
        else:
            finding.bugs.append(str(parted))

    # ------------------------------------------------------------------------------------------------ sampled

    def law(self, settings: Mapping[str, Any], finding: Finding) -> None:
        """Texts of one prompt by the method: each token against its own law, and all against plain decoding's from other
        seeds."""
        prompt, count = self.prompts[0], self.scale.samples
        mine = self._sampled(self.method, prompt, settings, range(self.scale.seed, self.scale.seed + count), finding)
        other = range(self.scale.seed + count, self.scale.seed + 2 * count)
        sample = laws.compare(mine, self._sampled("autoregressive", prompt, settings, other, None))
        exact = self._drawn(prompt, mine, settings).law()
        finding.tested = count
        finding.note = (
            f"{sample.tests} two-sample tests, p = {sample.p_value:.2g}; {exact.tests} exact ones, p = {exact.p_value:.2g}"
        )
        if not sample.same:
            finding.bugs.append(f"{sample.where}: the law differs from plain sampling's, p = {sample.p_value:.2g}")
        if not exact.same:
            finding.bugs.append(f"{exact.where}: the law differs from the model's own, p = {exact.p_value:.2g}")

    @torch.inference_mode()
    def _drawn(self, prompt: Tensor, texts: list[list[int]], settings: Mapping[str, Any]) -> laws.Drawn:
        """All tokens of some texts against their laws, by the model's own forward and transformers' warpers."""
        warpers = LogitsProcessorList([TemperatureLogitsWarper(settings["temperature"])])
        if "top_p" in settings:
            warpers.append(TopPLogitsWarper(settings["top_p"]))
        drawn = laws.Drawn(rare=laws.RARE if self._exact else laws.ROUNDED)
        for start in range(0, len(texts), HELD):
            new = torch.tensor(texts[start : start + HELD])
            ids = torch.cat([prompt.expand(len(new), -1), new], 1).to(self.model.device)
            logits = self.model(ids, use_cache=False).logits[:, len(prompt) - 1 : -1].flatten(0, 1).float()
            drawn.add(warpers(ids, logits).softmax(-1), new.flatten().to(logits.device))  # type: ignore[arg-type]
        return drawn

    def neighbours(self, finding: Finding) -> None:
        """A seed's text does not depend on what is decoded beside it. In half precision rounding moves draws: nothing is
        compared."""
        if not self._exact:
            finding.note = "rounding in this dtype moves draws"
            return
        settings, seeds = LAWS[0], range(self.scale.seed, self.scale.seed + 2 * BATCH)
        together = self._sampled(self.method, self.prompts[0], settings, seeds, finding)
        for seed, found in zip(seeds, together, strict=True):
            (alone,) = self._sampled(self.method, self.prompts[0], settings, [seed], None)
            finding.tested += 1
            if alone != found:
                finding.bugs.append(f"seed {seed}: {found} in a batch, {alone} alone")

    def _sampled(
        self, method: Method | str, prompt: Tensor, settings: Mapping[str, Any], seeds: Sequence[int], finding: Finding | None
    ) -> list[list[int]]:
        texts: list[list[int]] = []
        options = {"do_sample": True, "top_k": 0, "max_new_tokens": SAMPLED, **settings}
        for start in range(0, len(seeds), ROWS):
            part = list(seeds[start : start + ROWS])
            texts += self._generate(method, [prompt] * len(part), options, finding, part)
        return texts

    # ------------------------------------------------------------------------------------------------- audit

    def audited(self, finding: Finding) -> None:
        """Every step of a batch: limits and laws of drafts, and the store against a fresh forward."""
        layered = LayeredModel(self.model)
        tolerance = max(1e-3, ROUNDING * torch.finfo(self.model.dtype).eps)
        for temperature in (0.0, 1.0):
            requests = [
                Request(prompt, AUDITED * (2 + i), sampling=Sampling(temperature, seed=i))
                for i, prompt in enumerate(_uneven(self.prompts[:BATCH]))
            ]
            try:
                finding.tested += self._audit(layered, requests, tolerance)
            except AssertionError as error:
                finding.bugs.append(f"temperature {temperature:g}: {error}")

    @torch.inference_mode()
    def _audit(self, layered: LayeredModel, requests: list[Request], tolerance: float) -> int:
        capacity = max(len(request.prompt) + request.max_new_tokens for request in requests)
        session = self.method.start(layered, len(requests), capacity)
        decoder, own, steps = Decoder(session), session.draft, 0

        def draft(limit: list[int]) -> Draft:
            found = own(limit)
            found.check()
            deepest = found.valid.sum(1).tolist() if found.parents is None else []
            assert all(count <= most for count, most in zip(deepest, limit, strict=False)), f"{deepest} drafts, at most {limit}"
            return found

        session.draft = draft  # type: ignore[method-assign]
        for row, request in enumerate(requests):
            decoder.admit(row, request)
        texts: list[list[int]] = [[] for _ in requests]
        while decoder.busy:
            step = decoder.step()
            steps += 1
            for row, more in enumerate(step.tokens):
                texts[row] += more
                if session.alive[row]:
                    tokens = torch.cat([requests[row].prompt, torch.tensor(texts[row], dtype=torch.long)])
                    session.check(row, tokens.to(layered.device), tolerance)
        return steps

    # ---------------------------------------------------------------------------------------------- decoding

    def _texts(
        self, method: Method | str, prompts: Sequence[Tensor], options: Mapping[str, Any], finding: Finding | None
    ) -> list[list[int]]:
        wanted = {"max_new_tokens": self.scale.max_new_tokens, "do_sample": False, **options}
        return self._generate(method, prompts, wanted, finding, None)

    def _generate(
        self,
        method: Method | str,
        prompts: Sequence[Tensor],
        options: dict[str, Any],
        finding: Finding | None,
        seed: list[int] | None,
    ) -> list[list[int]]:
        width = max(map(len, prompts))
        ids = torch.stack([torch.cat([prompt.new_zeros(width - len(prompt)), prompt]) for prompt in prompts])
        mask = torch.stack([(torch.arange(width) >= width - len(prompt)).long() for prompt in prompts])
        device = self.model.device
        output = api.generate(self.model, ids.to(device), method, attention_mask=mask.to(device), seed=seed, **options)
        assert output.new_tokens is not None
        assert output.stats is not None
        if finding is not None:
            finding.drafted += output.stats.drafted
            finding.accepted += output.stats.accepted
        return output.new_tokens


def _uneven(prompts: Sequence[Tensor]) -> list[Tensor]:
    """Prompts cut to different lengths, whatever they are like."""
    return [prompt[: max(1, len(prompt) - 2 * place)] for place, prompt in enumerate(prompts)]
