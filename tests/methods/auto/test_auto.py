"""`auto` says what plain decoding says whatever is decided, is told the truth about its drafters, and decides by it."""

from __future__ import annotations

import random
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

import skipstone
from skipstone import (
    AdaSD,
    Autoregressive,
    Jacobi,
    LayerSkip,
    Lookahead,
    Method,
    PromptLookup,
    Recycle,
    SelfSpeculative,
    Speculative,
    Swift,
)
from skipstone.decoding.draft import Step
from skipstone.decoding.loop import DecodingLoop, run
from skipstone.decoding.request import Request
from skipstone.engines.model_runner import ModelRunner
from skipstone.lab.inspect.policy_replay import replay_decisions
from skipstone.methods import resolve, speculative
from skipstone.methods.auto.auto import Auto, AutoDrafter
from skipstone.policy.choose_drafter import LOOKUP, PLAIN, PROBE, RECYCLE, Decision, Policy
from skipstone.policy.draft_length import best_tree
from tests.helpers import families
from tests.helpers.conformance import truncated
from tests.helpers.machine import llama, near, prompt, start
from tests.helpers.pairwise import round_robin
from tests.helpers.support import assert_same_texts, decode, plainly, references

QUICK = ("llama", "gemma2", "qwen3")
FAMILIES = [pytest.param(name, marks=[] if name in QUICK else pytest.mark.slow) for name in families.NAMES]


def everything(model: Any, second: Any) -> Auto:
    """All kinds of candidates, as far as the model bears them."""
    chains = LayerSkip(2), SelfSpeculative((1,), (2,)), Speculative(second), Swift(0.5, context_window=6)
    methods, runner = (PromptLookup(), Recycle(), *chains, Lookahead(3, 3, 3), Jacobi(4)), ModelRunner(model)

    def fits(method: Method) -> bool:
        try:
            method.check(runner)
        except ValueError:
            return False
        return True

    return Auto(tuple(filter(fits, methods)))


class Dice:
    """A policy that decides at random: any drafter, any length, any tree, or none."""

    def __init__(self, seed: int) -> None:
        self.dice = random.Random(seed)
        self.kinds: list[str] = []

    def decide(self, policy: Policy, matches: Sequence[int] = (), can_replay: bool = True) -> Decision:
        kind = self.dice.choice([PLAIN, PROBE, *policy.drafters] + [LOOKUP] * any(matches))
        self.kinds.append(kind)
        thresholds = tuple(sorted(self.dice.random() ** 3 for _ in range(self.dice.randrange(6))))
        chances = [self.dice.random() * 0.6 for _ in range(3)]
        tree = best_tree(chances, 0.0, lambda _: 0.0, max_nodes=self.dice.randrange(1, 12), max_depth=4)
        drafts = tuple(self.dice.randrange(8) if match else 0 for match in matches)
        return Decision(kind, 1.0, None, "by dice", thresholds, (), drafts, tree)

    def next_replay(self, policy: Policy, lag: Mapping[str, int]) -> str | None:
        return self.dice.choice([None, *policy.costs.replays])


@pytest.fixture
def dice(monkeypatch: pytest.MonkeyPatch) -> Dice:
    found = Dice(7)
    monkeypatch.setattr(Policy, "decide", lambda policy, *asked: found.decide(policy, *asked))
    monkeypatch.setattr(Policy, "next_replay", lambda policy, lag: found.next_replay(policy, lag))
    return found


@round_robin(family=FAMILIES, rows=[1, 3])
def test_whatever_is_decided_the_greedy_text_is_transformers_own(family: str, rows: int, dice: Dice) -> None:
    model, options = families.cached(family), {"max_new_tokens": 96}
    prompts, expected, _ = references(family, rows, **options)
    output = decode(model, prompts, everything(model, truncated(family)), **options)
    assert_same_texts(model, prompts, expected, output, options)
    assert {PLAIN, PROBE, "layerskip, exit 2", "speculative"} <= set(dice.kinds)
    if family in QUICK:
        assert {RECYCLE, "self_speculative", "swift", "lookahead", "jacobi"} <= set(dice.kinds)


@pytest.mark.parametrize("rows", [1, 3])
def test_whatever_is_decided_the_sampled_text_is_plain_decodings(rows: int, dice: Dice) -> None:
    options: dict[str, Any] = {"max_new_tokens": 48, "do_sample": True, "temperature": 1.3, "top_k": 40, "seed": 5}
    model = families.cached("llama")
    prompts, expected = plainly("llama", rows, **options)
    output = decode(model, prompts, everything(model, truncated("llama")), **options)
    assert_same_texts(model, prompts, expected, output, options)
    assert output.stats is not None
    assert output.stats.accepted > 0


def test_the_store_is_that_of_plain_decoding_after_every_step(dice: Dice) -> None:
    raw = llama()
    model = ModelRunner(raw)
    decoder = start(everything(raw, near(raw, 0.3)), model, [Request(prompt(9), 40), Request(prompt(5, 1), 40)])
    texts = [prompt(9).tolist(), prompt(5, 1).tolist()]
    while decoder.busy:
        step = decoder.step()
        for row, tokens in enumerate(step.tokens):
            texts[row] += tokens
            if decoder.session.alive[row]:
                decoder.session.check(row, torch.tensor(texts[row]))


def test_rows_come_and_go_between_steps_and_one_is_never_taken() -> None:
    raw = llama()
    model = ModelRunner(raw)
    decoder = DecodingLoop(everything(raw, near(raw, 0.3)).start(model, 3, 80))
    requests = {seed: Request(prompt(9, seed), 24 + 6 * seed) for seed in range(4)}
    texts: dict[int, list[int]] = {}
    waiting, running = [0, 1, 2, 3], {}
    while waiting or decoder.busy:
        for row in (0, 2):
            if waiting and row not in running:
                running[row] = waiting.pop(0)
                texts[running[row]] = []
                decoder.admit(row, requests[running[row]])
                break
        step = decoder.step()
        for row, tokens in enumerate(step.tokens):
            if tokens:
                texts[running[row]] += tokens
        for row in step.finished:
            del running[row]
    for seed, text in texts.items():
        alone = start(skipstone.Autoregressive(), model, [requests[seed]])
        assert text == [token for step in run(alone) for token in step.tokens[0]]


# ------------------------------------------------------------------------------------------------------------- replays


def decoded(method: Any, raw: Any, tokens: int = 30) -> tuple[DecodingLoop, list[int]]:
    """A decoder in the midst of one row's text, and that text."""
    decoder = start(method, ModelRunner(raw), [Request(prompt(9), 200)])
    text = prompt(9).tolist()
    while len(text) < 9 + tokens:
        text += decoder.step().tokens[0]
    return decoder, text


def session_of(decoder: DecodingLoop) -> AutoDrafter:
    assert isinstance(decoder.session.drafter, AutoDrafter)
    return decoder.session.drafter


def exited(raw: Any) -> Any:
    """The first two layers, norm and head as a model of their own."""
    short = llama(layers=2)
    wanted = short.state_dict()
    for name, weight in raw.state_dict().items():
        if name in wanted:
            wanted[name].copy_(weight)
    return short


@pytest.mark.usefixtures("no_gradients")
@pytest.mark.parametrize("kind", ["exit", "draft model"])
def test_a_replay_is_what_the_drafter_would_have_said(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for explored in ("next_replay", "_explore"):  # a draft model has read nothing of the text yet
        monkeypatch.setattr(Policy, explored, lambda *_: None)
    raw = llama()
    second = near(raw, 0.3)
    decoder, text = decoded(Auto((LayerSkip(2) if kind == "exit" else Speculative(second),)), raw)
    session = session_of(decoder)
    (candidate,) = session.candidates.values()
    session._settle()
    found = candidate.drafter.replay_tokens(0, text[-13:])
    assert found is not None
    drafter = exited(raw) if kind == "exit" else second
    expected = drafter(torch.tensor([text[:-1]])).logits[0, -12:]
    torch.testing.assert_close(found, expected, atol=1e-4, rtol=1e-4)
    decoder.session.check(0, torch.tensor(text))


# -------------------------------------------------------------------------------------------------- on a clock of our own


REPLAY = 0.5
"""Milliseconds of a replay."""


class Clocked:
    """Steps that take the time that a table says: of a plain step one millisecond. extra: of a draft step, by drafter."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, drafts: dict[str, float], token: float = 0.03) -> None:
        self.drafts, self.token, self.total, self.tokens = drafts, token, 0.0, 0
        own = AutoDrafter.observe_step

        def clocked(session: AutoDrafter, step: Step) -> None:
            passes = max(step.draft_steps, default=0)
            step.seconds_draft = self.drafts.get(session._decision.kind, 0.0) * passes / 1000
            step.seconds_score = (1 + self.token * step.verified_nodes) / 1000
            step.seconds_other = 0.0
            step.seconds_search = 0.0
            self.total += step.seconds
            self.tokens += len(step.tokens[0])
            own(session, step)

        monkeypatch.setattr(AutoDrafter, "observe_step", clocked)
        replays = AutoDrafter._replay

        def replayed(session: AutoDrafter, *asked: Any) -> None:
            self.total += REPLAY / 1000
            replays(session, *asked)

        monkeypatch.setattr(AutoDrafter, "_replay", replayed)
        monkeypatch.setattr(speculative, "size_ratio", lambda *models: 0.1)
        monkeypatch.setattr(AutoDrafter, "replay_seconds", lambda session, began: REPLAY / 1000)
        monkeypatch.setattr(AutoDrafter, "policy_seconds", lambda session, began: 0.0)

    @property
    def rate(self) -> float:
        """Tokens a plain step."""
        return self.tokens / (1000 * self.total)


def texts_of(raw: Any, method: Any, count: int = 6, tokens: int = 150) -> skipstone.Output:
    output = None
    for seed in range(count):
        output = skipstone.generate(raw, prompt(12, seed)[None], method, max_new_tokens=tokens)
    assert output is not None
    return output


def test_a_draft_model_that_is_right_is_found_and_pays(monkeypatch: pytest.MonkeyPatch) -> None:
    raw = llama()
    clock = Clocked(monkeypatch, {"speculative": 0.1, "layerskip, exit 1": 0.3})
    method = Auto((Speculative(near(raw, 0.02)), LayerSkip(1)))
    texts_of(raw, method, count=4)
    before, time = clock.tokens, clock.total
    output = texts_of(raw, method, count=6)
    known = method.report(raw)
    assert known["current"] == "speculative"
    assert known["draft_steps"]["speculative"] == pytest.approx(0.1, abs=0.01)
    assert known["draft_setups"]["speculative"] < 0.02
    assert (clock.tokens - before) / (1000 * (clock.total - time)) > 1.5
    assert output.stats is not None
    assert output.stats.mean_acceptance_length > 2


def test_where_nothing_is_right_it_stays_plain_and_loses_next_to_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    raw = llama(head=1.0)
    clock = Clocked(monkeypatch, {"speculative": 0.3, "layerskip, exit 1": 0.3})
    method = Auto((Speculative(llama(seed=9, layers=2)), LayerSkip(1)))
    texts_of(raw, method)
    assert clock.rate > 0.98
    assert method.report(raw)["current"] is None


def test_a_prediction_is_drafted_from_and_what_it_gave_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a model that never repeats itself: nothing but the prediction can be looked up."""
    raw, asked = llama(head=1.0), prompt(12, 3)

    def written(method: Method, prediction: Sequence[int] = ()) -> tuple[list[int], DecodingLoop]:
        decoder = start(method, ModelRunner(raw), [Request(asked, 120, prediction=prediction)])
        return [token for step in run(decoder) for token in step.tokens[0]], decoder

    plain, _ = written(Autoregressive())
    clock = Clocked(monkeypatch, {})
    text, decoder = written(Auto((PromptLookup(),)), [*plain[:60], 1, 2, *plain[62:]])
    assert text == plain
    assert 60 <= decoder.session.drafter.accepted_predictions(0) <= 118
    assert clock.rate > 2


def test_a_whole_method_is_tried_and_kept_where_it_pays(monkeypatch: pytest.MonkeyPatch) -> None:
    """Texts of a model of random weights go round in circles, which Lookahead's n-grams know."""
    raw, method = llama(), Auto((Lookahead(),))
    clock = Clocked(monkeypatch, {}, token=0.001)
    texts_of(raw, method)
    assert method.report(raw)["current"] == "lookahead"
    assert clock.rate > 1.3


def test_swifts_evaluations_are_its_replays(monkeypatch: pytest.MonkeyPatch) -> None:
    """A set is searched for while nothing drafts with it; what is judged of other sets counts for none of them."""
    raw, swift = llama(layers=6), Swift(0.5, search="random")
    Clocked(monkeypatch, {"swift": 0.6})
    texts_of(raw, Auto((swift,)), count=10)
    found = swift.report(raw)
    assert found["evaluations"] >= 5
    assert found["matchness"] is not None


# ------------------------------------------------------------------------------------------------------ the guard


@pytest.mark.parametrize("method", ["layerskip exit_layer=2", "swift skip_ratio=0.5", "lookahead", "prompt_lookup", "recycle"])
def test_a_guard_is_auto_with_one_candidate_and_keeps_the_text(method: str) -> None:
    guarded, raw = resolve(method + " guard=true"), llama()
    assert guarded == Auto((resolve(method),))
    own = resolve(method)
    assert resolve(replace(own, guard=True)) == guarded  # type: ignore[call-arg]
    plain = skipstone.generate(raw, prompt(9)[None], "autoregressive", max_new_tokens=60).new_tokens
    assert skipstone.generate(raw, prompt(9)[None], method + " guard=true", max_new_tokens=60).new_tokens == plain


def test_a_method_that_draws_its_drafts_is_coupled_under_a_guard() -> None:
    """Sampled texts are those of plain decoding with the same seed, whatever the clock decides."""
    raw = llama()
    second, wish = near(raw, 0.3), {"max_new_tokens": 60, "do_sample": True, "seed": 4}
    plain = skipstone.generate(raw, prompt(9)[None], "autoregressive", **wish).new_tokens
    for method in (Speculative(second, guard=True), AdaSD(second, relaxed=False, guard=True)):
        assert skipstone.generate(raw, prompt(9)[None], method, **wish).new_tokens == plain


# ------------------------------------------------------------------------------------------------------ how it is named


def test_candidates_are_spelled_and_read() -> None:
    method = resolve('auto candidates="prompt_lookup;layerskip exit_layer=2"')
    assert isinstance(method, Auto)
    assert method.candidates == (PromptLookup(), LayerSkip(2))
    assert resolve(skipstone.methods.spell(method)) == method
    assert resolve({"method": "auto", "candidates": ["prompt_lookup", {"method": "layerskip", "exit_layer": 2}]}) == method


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ('auto candidates="adasd"', "adasd with these settings changes texts"),
        ("adasd guard=true", "adasd with these settings changes texts"),
        ('auto candidates="auto"', "auto drafts nothing that could be chosen or left out"),
        ("autoregressive guard=true", "autoregressive has no setting 'guard'"),
        ('auto candidates="layerskip exit_layer=9"', "exit_layer"),
        ('auto candidates="nothing"', "unknown method"),
        ("auto slack=2", "slack"),
    ],
)
def test_what_is_wrong_is_said_before_any_work(text: str, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        skipstone.generate(llama(), prompt(5)[None], text, max_new_tokens=4)


# ------------------------------------------------------------------------------------------------------------- records


def test_every_decision_of_a_log_is_made_again_without_a_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    raw, file = llama(), tmp_path / "steps.jsonl"
    Clocked(monkeypatch, {"layerskip, exit 2": 0.3})
    method = Auto((PromptLookup(), Recycle(), LayerSkip(2)), log=str(file))
    texts_of(raw, method, count=4)
    found = list(replay_decisions(file, time.perf_counter))
    assert len({one.again.kind for one in found}) >= 3
    assert all(one.is_same for one in found)
    drafted = [one for one in found if one.again.kind == one.recorded.kind not in (PLAIN, PROBE) and one.position > 50]
    taken = [1000 * sum(step.seconds for step in one.results) - one.tokens for one in drafted]  # a plain step takes 1 ms
    counted = [one.lost == pytest.approx(own, abs=0.01) for one, own in zip(drafted, taken, strict=True)]
    assert sum(counted) >= 0.9 * len(counted) > 0, "but for stalls and first steps"
    lines = file.read_text().splitlines()
    changed = [line.replace('"tokens": 2.0', '"tokens": 1.0') for line in lines]
    file.write_text("\n".join(changed))
    assert not all(one.is_same for one in replay_decisions(file, time.perf_counter)), "decisions rest on what is recorded"


@pytest.mark.parametrize("text", ["{}", "nothing", '{"state": 3}', '{"request": null}', '{"other": 1}'])
def test_a_file_that_is_no_log_is_refused_with_its_line(text: str, tmp_path: Path) -> None:
    file = tmp_path / "steps.jsonl"
    file.write_text(text + "\n")
    with pytest.raises(ValueError, match="line 1: this is no record of auto's decisions"):
        list(replay_decisions(file, time.perf_counter))


def test_what_was_learnt_outlives_a_request(monkeypatch: pytest.MonkeyPatch) -> None:
    raw = llama()
    Clocked(monkeypatch, {"speculative": 0.1})
    method = Auto((Speculative(near(raw, 0.02)),))
    texts_of(raw, method, count=4)
    output = skipstone.generate(raw, prompt(12, 50)[None], method, max_new_tokens=40)
    assert output.stats is not None
    assert output.stats.drafting > 0.7 * output.stats.steps


def test_the_models_own_method_is_a_candidate() -> None:
    method = resolve("auto", {"method": "layerskip", "exit_layer": 3})
    assert isinstance(method, Auto)
    names = [one.name for one in method.methods(ModelRunner(llama()))]
    assert names == ["prompt_lookup", "recycle", "self_speculative", "layerskip"]
