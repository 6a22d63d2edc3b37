"""`auto` says what plain decoding says whatever is decided, is told the truth about its drafters, and decides by it."""

import random
import time
from collections.abc import Sequence
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
    PromptLookup,
    Recycle,
    SelfSpeculative,
    Speculative,
    Swift,
)
from skipstone.decoding.draft import Step
from skipstone.decoding.loop import run
from skipstone.decoding.request import Request
from skipstone.engines.model_runner import ModelRunner
from skipstone.lab.inspect.policy_replay import replay_decisions
from skipstone.methods import resolve, speculative
from skipstone.methods.auto.auto import Auto, AutoDrafter
from skipstone.policy.choose_drafter import LOOKUP, PLAIN, PROBE, RECYCLE, Decision, Policy
from skipstone.policy.draft_length import best_tree
from tests.helpers import families
from tests.helpers.conformance import truncated
from tests.helpers.machine import decode as decode_rows
from tests.helpers.machine import llama, near, prompt, running, serve, start
from tests.helpers.pairwise import round_robin, slow_except
from tests.helpers.support import assert_same_texts, decode, plainly, references

QUICK = ("llama", "gemma2", "qwen3")
FAMILIES = slow_except(("llama", "gemma2"), families.NAMES)


def everything(model: Any, second: Any) -> Auto:
    """All kinds of candidates that the model allows."""
    chains = LayerSkip(2), SelfSpeculative((1,), (2,)), Speculative(second), Swift(0.5, context_window=6)
    methods, runner = [PromptLookup(), Recycle(), *chains, Lookahead(3, 3, 3), Jacobi(4)], ModelRunner(model)
    for method in [*methods]:
        try:
            method.check(runner)
        except ValueError:
            methods.remove(method)
    return Auto(tuple(methods))


class Dice:
    """A policy that decides at random: any drafter, any length, any tree, or none."""

    def __init__(self, seed: int) -> None:
        self.dice = random.Random(seed)
        self.kinds: list[str] = []

    def decide(self, policy: Policy, matches: Sequence[int] = (), can_replay: bool = True) -> Decision:
        kinds = [PLAIN, PROBE, *policy.drafters] + [LOOKUP] * any(matches)
        kind = min(kinds, key=lambda kind: (self.kinds.count(kind), self.dice.random()))  # each as often as any other
        self.kinds.append(kind)
        thresholds = tuple(sorted(self.dice.random() ** 3 for _ in range(self.dice.randrange(6))))
        chances = [self.dice.random() * 0.6 for _ in range(3)]
        tree = best_tree(chances, 0.0, lambda _: 0.0, max_nodes=self.dice.randrange(1, 12), max_depth=4)
        drafts = tuple(self.dice.randrange(8) if match else 0 for match in matches)
        return Decision(kind, 1.0, None, "by dice", thresholds, (), drafts, tree)


@pytest.fixture
def dice(monkeypatch: pytest.MonkeyPatch) -> Dice:
    found = Dice(7)
    monkeypatch.setattr(Policy, "decide", lambda policy, *given: found.decide(policy, *given))
    monkeypatch.setattr(Policy, "next_replay", lambda policy, lag: found.dice.choice([None, *policy.costs.replays]))
    return found


@round_robin(family=FAMILIES, rows=[1, 3])
def test_whatever_is_decided_the_greedy_text_is_transformers_own(family: str, rows: int, dice: Dice) -> None:
    model, options = families.cached(family), {"max_new_tokens": 64}
    prompts, expected = references(family, rows, **options)
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
    output: Any = decode(model, prompts, everything(model, truncated("llama")), **options)
    assert_same_texts(model, prompts, expected, output, options)
    assert output.stats.accepted > 0


def test_the_store_is_that_of_plain_decoding_after_every_step(dice: Dice) -> None:
    raw = llama()
    method, requests = everything(raw, near(raw, 0.3)), [Request(prompt(9), 40), Request(prompt(5, 1), 40)]
    decode_rows(method, ModelRunner(raw), requests, check=True)


@pytest.mark.parametrize("count", [4, 2])
def test_rows_come_and_go_between_steps_and_of_two_requests_one_row_is_never_taken(count: int) -> None:
    raw = llama()
    runner, requests = ModelRunner(raw), [Request(prompt(9, seed), 18 + 6 * seed) for seed in range(count)]
    texts, _ = serve(everything(raw, near(raw, 0.3)), runner, requests)
    assert texts == [decode_rows(Autoregressive(), runner, [request])[0][0] for request in requests]


@pytest.mark.usefixtures("no_gradients")
@pytest.mark.parametrize("kind", ["exit", "draft model"])
def test_a_replay_has_the_logits_of_the_drafter(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for explored in ("next_replay", "_explore"):  # a draft model has read nothing of the text yet
        monkeypatch.setattr(Policy, explored, lambda *_: None)
    raw: Any = llama()
    second = near(raw, 0.3)
    decoder, text = running(raw, Auto((LayerSkip(2) if kind == "exit" else Speculative(second),)), new=200, steps=30)
    session: Any = decoder.session.drafter
    (candidate,) = session.candidates.values()
    session._settle()
    found = candidate.drafter.replay_tokens(0, text[-13:].tolist())
    if kind == "exit":
        expected = raw.lm_head(raw.model.norm(raw(text[None, :-1], output_hidden_states=True).hidden_states[2]))
    else:
        expected = second(text[None, :-1]).logits
    torch.testing.assert_close(found, expected[0, -12:], atol=1e-4, rtol=1e-4)
    decoder.session.check(0, text)


REPLAY = 0.5
"""Milliseconds of a replay."""


class Clocked:
    """Steps take the time of a table: a plain one a millisecond. drafts: milliseconds of a draft step, by drafter."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, drafts: dict[str, float], token: float = 0.03) -> None:
        self.total, self.tokens = 0.0, 0
        own, replays = AutoDrafter.observe_step, AutoDrafter._replay

        def clocked(session: AutoDrafter, step: Step) -> None:
            step.seconds_draft = drafts.get(session._decision.kind, 0.0) * max(step.draft_steps, default=0) / 1000
            step.seconds_score = (1 + token * step.verified_nodes) / 1000
            step.seconds_other = step.seconds_search = 0.0
            self.total += step.seconds
            self.tokens += len(step.tokens[0])
            own(session, step)

        def replayed(session: AutoDrafter, *given: Any) -> None:
            self.total += REPLAY / 1000
            replays(session, *given)

        monkeypatch.setattr(AutoDrafter, "observe_step", clocked)
        monkeypatch.setattr(AutoDrafter, "_replay", replayed)
        monkeypatch.setattr(speculative, "size_ratio", lambda *models: 0.1)
        monkeypatch.setattr(AutoDrafter, "replay_seconds", lambda session, began: REPLAY / 1000)
        monkeypatch.setattr(AutoDrafter, "policy_seconds", lambda session, began: 0.0)
        monkeypatch.setattr(AutoDrafter, "setup_seconds", lambda session, began: 0.0)

    @property
    def rate(self) -> float:
        """Tokens a plain step."""
        return self.tokens / (1000 * self.total)


def texts_of(raw: Any, method: Any, count: int = 6, tokens: int = 150) -> Any:
    """The last output."""
    return [skipstone.generate(raw, prompt(12, seed)[None], method, max_new_tokens=tokens) for seed in range(count)][-1]


def test_a_draft_model_that_is_right_is_found_and_pays(monkeypatch: pytest.MonkeyPatch) -> None:
    """In a later request at once."""
    raw = llama()
    clock = Clocked(monkeypatch, {"speculative": 0.1, "layerskip, exit 1": 0.3})
    method = Auto((Speculative(near(raw, 0.02)), LayerSkip(1)))
    texts_of(raw, method, count=4)
    before, time = clock.tokens, clock.total
    stats = texts_of(raw, method).stats
    known = method.report(raw)
    assert known["current"] == "speculative"
    assert known["draft_steps"]["speculative"] == pytest.approx(0.1, abs=0.01)
    assert known["draft_setups"]["speculative"] < 0.02
    assert (clock.tokens - before) / (1000 * (clock.total - time)) > 1.5
    assert stats.mean_acceptance_length > 2
    assert stats.drafting > 0.7 * stats.steps


def test_where_nothing_is_right_it_stays_plain_and_loses_next_to_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    raw = llama(head=1.0)
    clock = Clocked(monkeypatch, {"speculative": 0.3, "layerskip, exit 1": 0.3})
    method = Auto((Speculative(llama(seed=9, layers=2)), LayerSkip(1)))
    texts_of(raw, method)
    assert clock.rate > 0.98
    assert method.report(raw)["current"] is None


def test_the_time_of_the_policy_is_charged_and_ends_drafts_that_gain_less(monkeypatch: pytest.MonkeyPatch) -> None:
    Clocked(monkeypatch, {"speculative": 0.1})
    monkeypatch.setattr(AutoDrafter, "policy_seconds", lambda self, _: 0.01 if self._decision.kind != PLAIN else 0.0)
    raw = llama()
    method = Auto((Speculative(near(raw, 0.02)),))
    texts_of(raw, method, count=6)
    assert 1 <= method.report(raw)["kinds"]["speculative"] <= 5


def test_accepted_tokens_of_a_prediction_are_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a model that never repeats itself: nothing but the prediction can be looked up."""
    raw, asked = llama(head=1.0), prompt(12, 3)
    ((plain,), _, _) = decode_rows(Autoregressive(), ModelRunner(raw), [Request(asked, 120)])
    clock, edited = Clocked(monkeypatch, {}), [*plain[:60], 1, 2, *plain[62:]]
    decoder = start(Auto((PromptLookup(),)), ModelRunner(raw), [Request(asked, 120, prediction=edited)])
    assert [token for step in run(decoder) for token in step.tokens[0]] == plain
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
    plain = skipstone.generate(raw, prompt(9), "autoregressive", **wish).new_tokens
    for method in (Speculative(second, guard=True), AdaSD(second, relaxed=False, guard=True)):
        assert skipstone.generate(raw, prompt(9), method, **wish).new_tokens == plain


def test_candidates_are_spelled_and_read_and_the_models_own_method_is_one() -> None:
    method = resolve('auto candidates="prompt_lookup;layerskip exit_layer=2"')
    assert isinstance(method, Auto)
    assert method.candidates == (PromptLookup(), LayerSkip(2))
    assert resolve(skipstone.methods.spell(method)) == method
    assert resolve({"method": "auto", "candidates": ["prompt_lookup", {"method": "layerskip", "exit_layer": 2}]}) == method
    own: Any = resolve("auto", {"method": "layerskip", "exit_layer": 3})
    runner = ModelRunner(llama())
    names = [one.name for one in own.methods(runner)]
    assert names == ["prompt_lookup", "recycle", "layerskip"]
    runner.in_fewer_bits("int4")
    assert SelfSpeculative(draft_quantize="int4") in own.methods(runner), "a copy that is there"


def test_every_decision_of_a_log_is_made_again_without_a_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    raw, file = llama(), tmp_path / "steps.jsonl"
    Clocked(monkeypatch, {"layerskip, exit 2": 0.3})
    texts_of(raw, Auto((PromptLookup(), Recycle(), LayerSkip(2)), log=str(file)), count=4)
    found = list(replay_decisions(file, time.perf_counter))
    assert len({one.again.kind for one in found}) >= 3
    assert all(one.is_same for one in found)
    drafted = [one for one in found if one.again.kind == one.recorded.kind not in (PLAIN, PROBE) and one.position > 50]
    taken = [1000 * sum(step.seconds for step in one.results) - one.tokens for one in drafted]  # a plain step takes 1 ms
    counted = [one.lost == pytest.approx(own, abs=0.01) for one, own in zip(drafted, taken, strict=True)]
    assert sum(counted) >= 0.9 * len(counted) > 0, "but for stalls and first steps"
    file.write_text(file.read_text().replace('"tokens": 2.0', '"tokens": 1.0'))
    assert not all(one.is_same for one in replay_decisions(file, time.perf_counter)), "decisions rest on recorded values"
    for text in ("{}", "nothing", '{"state": 3}', '{"request": null}', '{"other": 1}'):
        file.write_text(text + "\n")
        with pytest.raises(ValueError, match="line 1: no record of auto's decisions"):
            list(replay_decisions(file, time.perf_counter))
