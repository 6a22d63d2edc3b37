"""auto with heads that read hidden states: whatever drafts in between, a head reads all columns, and texts are plain ones."""

import math
from pathlib import Path
from typing import Any

import pytest

import skipstone
from skipstone import AdaDecode, Auto, Autoregressive, Eagle3, LayerSkip, Mtp, PromptLookup, Swift
from skipstone.decoding.loop import DecodingLoop
from skipstone.decoding.request import Request
from skipstone.decoding.sampling import Sampling
from skipstone.engines.model_runner import ModelRunner
from skipstone.engines.mtp_head import load_mtp
from skipstone.engines.native import library
from skipstone.methods.auto import auto
from skipstone.policy import choose_drafter
from skipstone.policy.choose_drafter import PLAIN, Decision, Policy
from tests.helpers import families
from tests.helpers.feature_heads import eagle3_folder
from tests.helpers.feature_loop import DraftRecorder, Expected, finish, of_eagle3, prompts, requests, start
from tests.helpers.feature_references import MtpReference
from tests.helpers.mtp_checkpoints import MtpOptions, add_mtp_layers, mtp_checkpoint, tiny_target
from tests.helpers.pairwise import slow_except
from tests.helpers.support import tokenizer

ENGINES = [
    "eager",
    pytest.param("native", marks=pytest.mark.skipif(library.missing() is not None, reason=str(library.missing()))),
]


def plan(patch: pytest.MonkeyPatch, *decisions: Decision) -> list[str]:
    """Let auto carry out these decisions, one after the other. Returns a list that gets the kind of each."""
    carried_out: list[str] = []

    def decide(*_: object) -> Decision:
        decision = decisions[len(carried_out) % len(decisions)]
        carried_out.append(decision.kind)
        return decision

    patch.setattr(Policy, "decide", decide)
    patch.setattr(Policy, "next_replay", lambda *_: None)
    patch.setattr(choose_drafter, "STEADY", math.inf)  # plain decoding is timed in three steps, however long they take
    patch.setattr(auto.method_states, "method_state", lambda *given: given[-1]())  # each test learns by itself
    return carried_out


def chain(name: str, drafts: int = 3) -> Decision:
    return Decision(name, thresholds=(0.0,) * drafts)


def head_of(loop: DecodingLoop, name: str) -> Any:
    drafter: Any = loop.session.drafter
    return drafter.candidates[name].drafter


OTHERS: dict[str, Any] = {
    "layerskip, exit 2": LayerSkip(2),
    "layerskip, exit 4": LayerSkip(4),
    "adadecode": AdaDecode("original", 0.3, 3, exit_layers=(2, 5)),
    "swift": Swift(skip_ratio=0.5, context_window=6),
}


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("other", slow_except([*OTHERS][:3], OTHERS))
def test_a_head_reads_the_columns_of_other_drafters_steps(
    other: str, engine: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    model: Any = families.build("llama", layers=8)
    folder, runner = eagle3_folder(tmp_path, model.config), ModelRunner(model, engine)
    asked = requests((9, 80, 3), (60, 50, 40))
    plain = finish(start(Autoregressive(), runner, asked), asked).texts
    method = Auto((Eagle3(str(folder)), OTHERS[other]), use_profile=False)
    probe: Any = method.start(runner, 1, 64).drafter
    name = next(name for name in probe.candidates if name != "eagle3")
    plan(monkeypatch, chain(name), chain(name), chain("eagle3"), Decision(PLAIN, steps=5))
    loop = start(method, runner, asked)
    recorder = DraftRecorder(head_of(loop, "eagle3"), plain)
    run = finish(loop, asked)
    assert run.texts == plain
    assert {"eagle3", name} <= {step.drafter for step in run.steps if any(step.drafted)}
    counts = of_eagle3(model, folder, (2, 4, 5)).assert_logits(recorder.records)
    assert len(counts) == 3
    assert counts[0] > 5


def both_heads(tmp_path: Path) -> tuple[Any, Path, Any]:
    """A target with an MTP layer, its folder, and an EAGLE-3 head that reads other states."""
    model: Any = tiny_target("glm4_moe", layers=8)
    model.config.name_or_path = str(add_mtp_layers(tmp_path / "target", model, MtpOptions(layers=8)))
    return model, eagle3_folder(tmp_path / "head", model.config), (2, 4, 5)


@pytest.mark.parametrize("sampling", [Sampling(), Sampling(temperature=1.2, seed=3)], ids=["greedy", "sampled"])
def test_two_heads_with_different_depths_in_one_session(
    sampling: Sampling, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    model, folder, depths = both_heads(tmp_path)
    runner, asked = ModelRunner(model, "eager"), requests((9, 80, 3), (50, 40, 30), sampling=sampling)
    plain = finish(start(Autoregressive(), runner, asked), asked).texts
    plan(monkeypatch, chain("mtp"), Decision(PLAIN, steps=3), chain("eagle3"), chain("mtp"), Decision(PLAIN, steps=7))
    loop = start(Auto((Eagle3(str(folder)), Mtp()), use_profile=False), runner, asked)
    recorders = {name: DraftRecorder(head_of(loop, name), plain) for name in ("eagle3", "mtp")}
    assert loop.session.drafter.feature_depths == (2, 4, 5, 8)
    assert finish(loop, asked).texts == plain
    expected = {"eagle3": of_eagle3(model, folder, depths), "mtp": Expected(model, MtpReference(tmp_path / "target"))}
    for name, recorder in recorders.items():
        counts = expected[name].assert_logits(recorder.records)
        assert len(counts) == 3
        assert counts[0] > 5


def test_heads_are_replayed_and_reuse_prefixes(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Replays come before drafts. Rows are used again with a prefix of other rows."""
    model, folder, depths = both_heads(tmp_path)
    runner, replayed = ModelRunner(model, "eager"), list[str]()
    plan(monkeypatch, Decision(PLAIN, steps=40), chain("eagle3"), chain("mtp"))

    def next_replay(*_: object) -> str:
        replayed.append(("eagle3", "mtp")[len(replayed) % 2])
        return replayed[-1]

    monkeypatch.setattr(Policy, "next_replay", next_replay)
    loop = DecodingLoop(Auto((Eagle3(str(folder)), Mtp()), use_profile=False).start(runner, 3, 300), chunk=16)
    recorders = {name: DraftRecorder(head_of(loop, name)) for name in ("eagle3", "mtp")}
    texts, wanted, reused = dict[int, list[int]](), dict[int, list[int]](), list[int]()

    def admit(row: int, prompt: Any, new: int, *cached: int) -> None:
        request = Request(prompt, new)
        wanted[row] = finish(start(Autoregressive(), runner, [request]), [request]).texts[0]
        texts[row] = prompt.tolist()
        reused.append(loop.admit(row, request, *cached))

    long, short = prompts((90, 12), seed=7)
    admit(0, long, 120)
    admit(1, short, 100)
    steps = 0
    while loop.busy:
        for row, tokens in enumerate(loop.step().tokens):
            if tokens:
                texts[row] += tokens
        steps += 1
        if steps == 60:
            admit(2, long[:85], 60, 80, 0)
    assert texts == wanted
    assert reused[2] == 79
    assert {"eagle3", "mtp"} <= {*replayed}
    expected = {"eagle3": of_eagle3(model, folder, depths), "mtp": Expected(model, MtpReference(tmp_path / "target"))}
    for name, recorder in recorders.items():
        assert expected[name].assert_logits(recorder.records)[0] > 3


def test_a_layer_that_is_read_while_a_session_runs_is_no_candidate_of_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The session has recorded no states for it."""
    model: Any = tiny_target("glm4_moe")
    model.config.name_or_path = str(add_mtp_layers(tmp_path, model, MtpOptions()))
    runner, (first, second) = ModelRunner(model, "eager"), requests((9, 12), (30, 20))
    loop = DecodingLoop(Auto(use_profile=False).start(runner, 2, 64))
    loop.admit(0, first)
    for _ in range(5):
        loop.step()
    load_mtp(runner)
    loop.admit(1, second)
    drafter: Any = loop.session.drafter
    assert "mtp" not in drafter.candidates
    later: Any = Auto(use_profile=False).start(runner, 2, 64).drafter
    assert "mtp" in later.candidates
    monkeypatch.setattr(type(drafter.learned.policy), "is_timed", True)
    monkeypatch.setattr(type(drafter.learned.policy), "next_replay", lambda policy, lag: "mtp")
    while loop.busy:
        loop.step()


@pytest.mark.parametrize("kind", slow_except(["qwen3_5_text"], ["deepseek_v3", "qwen3_next", "qwen3_5_text"]))
def test_a_checkpoint_s_layer_drafts_without_any_setting(kind: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    mtp_checkpoint(tmp_path, kind)
    tokenizer().save_pretrained(tmp_path)
    model = skipstone.load(tmp_path)[0]
    carried_out = plan(monkeypatch, chain("mtp"), Decision(PLAIN, steps=3))
    inputs: Any = families.padded(prompts((9, 3)))
    for options in ({}, {"do_sample": True, "seed": 3}):
        plain = skipstone.generate(model, inputs, Autoregressive(), max_new_tokens=30, **options)
        output: Any = skipstone.generate(model, inputs, Auto(use_profile=False), max_new_tokens=30, **options)
        assert output.new_tokens == plain.new_tokens
        assert output.stats.drafted > 10
    assert "mtp" in carried_out


def test_auto_s_default_candidates_have_no_head_that_nobody_named() -> None:
    drafter: Any = Auto((PromptLookup(),)).start(ModelRunner(families.cached("llama")), 1, 64).drafter
    assert drafter.feature_depths == ()
