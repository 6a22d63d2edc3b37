"""Whole benchmarks on a tiny model: what is written of every prompt, what follows from it, and what a kill leaves."""

import json
import random
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from skipstone.engines.loading import load
from skipstone.engines.model_runner import ModelRunner
from skipstone.lab.bench import prompts, run_file
from skipstone.lab.bench import run as running
from skipstone.lab.bench.peers.hf import HFPromptLookup
from skipstone.lab.bench.plan import BenchPlan, read
from skipstone.lab.bench.prompts import PromptAnswers, TaskRun, _score, add_counts, log_likelihood
from skipstone.lab.bench.report import report
from skipstone.lab.bench.report.aggregate import groups
from skipstone.lab.bench.run import exit_statistics, run, tune
from skipstone.lab.bench.run_file import RunFile
from skipstone.lab.tasks.data_sets import DatasetLocation, ScoreRule, Task
from skipstone.lab.tasks.dialogue import AnswerTokens, PromptBuilder, TaskConversation
from skipstone.lab.tasks.protocols import TaskSettings
from skipstone.lab.tasks.sandbox import SandboxOutcome
from skipstone.lab.timing.measure import MethodBackend, growth
from tests.helpers import families, support
from tests.helpers.machine import prompt

WORDS = ["stop", "abc", " the", "ab", "bc", "xst", *"defghijklm"]
METHODS = [
    "hf-generate",
    "hf-early-exit exit_layer=1,2 num_assistant_tokens=2 confidence_threshold=0.0",
    "hf-prompt-lookup",
    "autoregressive",
    "layerskip exit_layer=1,2 num_speculative_tokens=2,3",
    "early_exit exit_layer=2",
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    place = tmp_path_factory.mktemp("bench")
    model = families.build("llama", max_position_embeddings=128)
    model.config.eos_token_id = model.generation_config.eos_token_id = 5
    model.save_pretrained(place / "model")
    support.tokenizer().save_pretrained(place / "model")
    dice = random.Random(0)
    records = [{"prompt": "".join(dice.choices(WORDS, k=12)), "reference": "x"} for _ in range(9)]
    records[0] = {"turns": ["abc the stop", "ab bc"]}
    (place / "mine.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    return place


def plan(folder: Path, **more: Any) -> BenchPlan:
    choice = any("," in method for method in more.get("methods", METHODS))
    usual = {
        "models": [str(folder / "model")],
        "methods": METHODS,
        "tasks": [str(folder / "mine.jsonl")],
        "num_prompts": 4,
        **({"tune_prompts": 2, "tune_tokens": 8} if choice else {}),
        "max_new_tokens": 20,
        "ignore_eos": True,
        "seed": 3,
    }
    return read(None, {**usual, **more})


def quiet(text: str) -> None:
    """Says nothing."""


@pytest.fixture(scope="module")
def results(folder: Path) -> Path:
    return run(plan(folder), folder / "results.jsonl", ["skipstone", "bench", "run"], quiet)


def test_every_prompt_has_a_line_with_all_methods(results: Path) -> None:
    lines = run_file.read(results)
    prompts = [line for line in lines if line["kind"] == "prompt"]
    assert [line["index"] for line in prompts] == list(range(4))
    labels = [text.split()[0] for text in METHODS]
    for line in prompts:
        assert sorted(line["rows"]) == sorted(labels)
        calls = len(line["prompt_tokens"])
        for name, row in line["rows"].items():
            assert row["tokens"] == 20 * calls, "EOS is ignored, every row emits the same number of tokens"
            assert row["calls"] == calls
            assert 0 < row["first_seconds"] < row["seconds"]
            assert (row["stats"] is None) == name.startswith("hf-") == (row["setup_seconds"] == 0)
            assert row["memory"] is None or row["memory"] > 10_000_000
    lossless = [name for name in labels if name != "early_exit"]
    same = [len({json.dumps(line["rows"][name]["digests"]) for name in lossless}) for line in prompts]
    assert same == [1] * 4
    assert any(line["rows"]["early_exit"]["digests"] != line["rows"]["autoregressive"]["digests"] for line in prompts)
    (model,) = (line for line in lines if line["kind"] == "model")
    assert [name for name, about in model["methods"].items() if not about["lossless"]] == ["early_exit"]
    assert model["methods"]["early_exit"]["settings"] == {"exit_layer": 2}
    assert model["drafters"] == {"layerskip": [{"exit_layer": exit} for exit in (1, 1, 2, 2)]}
    assert model["costs"]["batch"] == 1
    assert {line["method"] for line in lines if line["kind"] == "tuned"} == {"hf-early-exit", "layerskip"}
    first = {line["method"]: line for line in lines if line["kind"] == "first"}
    assert list(first) == labels
    assert lines.index(first[labels[-1]]) < min(lines.index(line) for line in lines if line["kind"] == "trial")
    assert all((one["tokens"], one["seconds"] > sum(one["setup"].values())) == (16, True) for one in first.values())
    assert first["layerskip"]["setup"]["drafters"] > 0
    assert [group.over_all("layerskip")["first_request_seconds"] for group in groups(lines)] == [first["layerskip"]["seconds"]]


def test_programs_that_were_asked_for_with_tabs_are_scored_with_spaces(folder: Path) -> None:
    seen = []

    def score(record: Any, text: str) -> dict[str, float]:
        seen.append(text)
        return {"good": 1.0}

    task = Task("t", DatasetLocation(None, ""), (), "", lambda record: [record["prompt"]], ScoreRule(score))
    one = TaskConversation("t 0", ("ab",), record={"prompt": "ab"})
    for tabs in (False, True):
        run_ = TaskRun(Any, 0, task, TaskSettings(tabs=tabs), PromptBuilder(None, False, 9), plan(folder), Any)
        _score({"plain": PromptAnswers(texts=["\treturn 1"])}, one, run_)
    assert seen == ["\treturn 1", "    return 1"]


@pytest.mark.slow
def test_rows_take_turns_with_seeds_of_their_own_at_a_temperature(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[tuple[str, int, int]] = []
    real = prompts.measure

    def measured(model: Any, engine: Any, ids: Any, options: Any, seed: int) -> Any:
        asked.append((engine.method.name if isinstance(engine, MethodBackend) else engine.name, seed, len(ids)))
        assert options == {"max_new_tokens": 20, "do_sample": True, "temperature": 0.7, "top_k": 0, "top_p": 0.9}
        return real(model, engine, ids, options, seed)

    monkeypatch.setattr(prompts, "measure", measured)
    methods = ["hf-generate", "autoregressive", "layerskip exit_layer=1", "hf-early-exit exit_layer=1"]
    sampled = {"num_prompts": 3, "samples": 2, "temperature": 0.7, "top_p": 0.9, "seed": 0}
    said: list[str] = []
    out = run(plan(folder, methods=methods, **sampled), tmp_path / "results.jsonl", [], said.append)
    assert any("without hf-early-exit, measured greedily only" in text for text in said)
    lines = [line for line in run_file.read(out) if line["kind"] == "prompt"]
    order = ["hf-generate", "autoregressive", "layerskip"]
    expected = []
    for line in lines:
        turns = len(line["prompt_tokens"]) // 2
        for sample in range(2):
            for turn in range(turns):
                first = (line["index"] + sample + turn) % 3
                seed, length = 1000 * line["place"] + sample, line["prompt_tokens"][sample * turns + turn]
                expected += [(name, seed, length) for name in order[first:] + order[:first]]
    assert asked == expected
    assert any(row["digests"][0] != row["digests"][-1] for line in lines for row in line["rows"].values())


@pytest.mark.slow
def test_a_second_turn_follows_plain_decodings_answer(folder: Path, tmp_path: Path) -> None:
    methods = ["early_exit exit_layer=1", "autoregressive"]
    out = run(plan(folder, num_prompts=9, methods=methods), tmp_path / "a.jsonl", [], quiet)
    (line,) = (line for line in run_file.read(out) if line["kind"] == "prompt" and len(line["prompt_tokens"]) == 2)
    first = line["rows"]["autoregressive"]["texts"][0]
    assert first != line["rows"]["early_exit"]["texts"][0]
    _, tokenizer = load(folder / "model")
    assert line["prompt_tokens"][1] == len(tokenizer(f"abc the stop{first}\n\nab bc")["input_ids"])


@pytest.mark.slow
def test_programs_are_run_with_leave_alone(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    data = {
        "tasks": ["humaneval"],
        "data_dir": str(Path(__file__).parents[2] / "helpers" / "records"),
        "methods": ["autoregressive"],
    }
    said: list[str] = []
    out = run(plan(folder, **data, num_prompts=1), tmp_path / "a.jsonl", [], said.append)
    assert any("humaneval: no score, programs run under --allow-code-execution only" in text for text in said)
    allowed = plan(folder, **data, num_prompts=1, allow_code_execution=True)
    scored = run(allowed, tmp_path / "b.jsonl", [], quiet)
    for path, wanted in ((out, []), (scored, [{"pass": 0.0}])):
        (line,) = (line for line in run_file.read(path) if line["kind"] == "prompt")
        assert line["rows"]["autoregressive"]["scores"] == wanted
    monkeypatch.setattr(
        "skipstone.lab.bench.run.sandbox.run", lambda _: SandboxOutcome(False, "ValueError: no limits here", True)
    )
    with pytest.raises(OSError, match="every program would fail: ValueError: no limits here"):
        run(allowed, tmp_path / "c.jsonl", [], quiet)


def test_a_run_that_is_refused_leaves_no_file_in_the_way(folder: Path, tmp_path: Path) -> None:
    out, missing = tmp_path / "results.jsonl", str(tmp_path / "nothing")
    with pytest.raises(FileNotFoundError, match="nothing"):
        run(plan(folder, models=[str(folder / "model"), missing]), out, [], quiet)
    assert not out.exists()
    for wrong in ({"methods": ["layerskip exit_layer=99"]}, {"max_new_tokens": 100_000}):
        with pytest.raises(ValueError, match=r"between 1 and 3|leave no room"):
            run(plan(folder, **wrong), out, [], quiet)
    run(plan(folder, methods=["autoregressive"], num_prompts=1), out, [], quiet)
    assert [line["kind"] for line in run_file.read(out)] == ["run", "model", "first", "prompt"]


@pytest.mark.parametrize("engine", ["auto", "eager"])
def test_a_model_is_gone_before_the_next_one_is_loaded(
    engine: str, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    earlier: list[weakref.ref[Any]] = []
    real = running.load_to_measure

    def loaded(*given: Any, **more: Any) -> Any:
        assert [one() for one in earlier] == [None] * len(earlier)
        model, tokenizer = real(*given, **more)
        earlier.extend(map(weakref.ref, (model, model.model.layers[0].mlp)))
        return model, tokenizer

    monkeypatch.setattr(running, "load_to_measure", loaded)
    drafts = f"speculative draft_model={folder / 'model'}"
    methods = ["hf-generate", "autoregressive", "layerskip exit_layer=1", "swift", "adadecode heads=original", drafts]
    run(plan(folder, models=[str(folder / "model")] * 2, methods=methods, engine=engine), tmp_path / "a.jsonl", [], quiet)
    assert len(earlier) == 4


class Stopped(BaseException):
    """Nothing catches it."""


@pytest.mark.slow
def test_stopped_again_and_again_it_measures_every_prompt_once(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real, timed, out = RunFile.add, running.measure, tmp_path / "results.jsonl"
    left = [0]

    def counted(call: Any) -> Any:
        def called(*given: Any) -> Any:
            left[0] -= 1
            if left[0] == 0:
                raise Stopped
            return call(*given)

        return called

    monkeypatch.setattr(RunFile, "add", counted(real))
    monkeypatch.setattr(running, "measure", counted(timed))
    asked = plan(folder, methods=["autoregressive", "layerskip exit_layer=1,2"])
    reached: list[list[str]] = [[]]
    for left[0] in (1, 6, 7, 8, 5):
        with pytest.raises(Stopped):
            run(asked, out, ["x"], quiet)
        reached.append([line["kind"] for line in run_file.read(out)])
        assert reached[-1][: len(reached[-2])] == reached[-2], "nothing that was written is lost"
    assert any(kinds.count("trial") and not kinds.count("tuned") for kinds in reached), "while settings were chosen"
    assert any(0 < kinds.count("prompt") < 4 for kinds in reached), "between prompts"
    run(asked, out, ["x"], quiet)
    lines = run_file.read(out)
    trials = [(line["candidate"], line["prompt"]) for line in lines if line["kind"] == "trial"]
    assert len(trials) == len(set(trials)) == 4
    assert [line["index"] for line in lines if line["kind"] == "prompt"] == list(range(4))
    assert [sum(line["kind"] == kind for line in lines) for kind in ("tuned", "model", "first")] == [1, 1, 2]
    before = out.read_bytes()
    run(asked, out, ["x"], quiet)
    assert out.read_bytes().startswith(before)
    assert len(run_file.read(out)) == len(lines) + 1, "nothing is left to measure"


def test_counts_grow_and_add_up_at_any_depth() -> None:
    """Rows of the same settings share a state, and a run that is gone on with begins with a new one: growth is of one call."""
    before = {"steps": 3, "pays": False, "threshold": 0.5, "exits": {"2": {"tests": 1, "rate": 0.5}}, "passes": [[1, 2]]}
    after = {
        "steps": 5,
        "pays": True,
        "threshold": 0.7,
        "exits": {"2": {"tests": 4, "rate": 0.1}, "4": {"tests": 2}},
        "passes": [],
    }
    one = growth(before, after)
    assert one == {"steps": 2, "exits": {"2": {"tests": 3}, "4": {"tests": 2}}}
    assert growth({}, after) == {"steps": 5, "exits": {"2": {"tests": 4}, "4": {"tests": 2}}}
    assert add_counts([one, one, {"steps": 1}]) == {"steps": 5, "exits": {"2": {"tests": 6}, "4": {"tests": 4}}}
    assert add_counts([]) is None


@pytest.mark.parametrize("name", ["llama", "gemma2"])
def test_perplexity_and_agreement_are_those_of_models_cut_there(name: str) -> None:
    """By transformers' own forward of the first E layers, over the answers alone."""
    model = families.build(name)
    pairs = [(prompt(9, vocab=50), prompt(4, vocab=50, seed=1)), (prompt(3, vocab=50, seed=2), prompt(7, vocab=50, seed=3))]
    found = exit_statistics(model, [(before, [AnswerTokens(answer, 0, 1)]) for before, answer in pairs], lambda: None)
    assert found.keys() == {"tokens", "perplexity", "agreement", "last_word_accuracy"}
    assert found["tokens"] == 11
    best = {}
    for depth in (4, 3, 2, 1):
        model.config.num_hidden_layers = depth
        nats, same = 0.0, 0
        for number, (before, answer) in enumerate(pairs):
            with torch.no_grad():
                logits = model(torch.cat([before, answer])[None]).logits[0, len(before) - 1 : -1]
            nats += F.cross_entropy(logits.double(), answer, reduction="sum").item()
            chosen = logits.argmax(-1)
            same += int((chosen == best.setdefault(number, chosen)).sum())
        assert found["perplexity"][depth - 1] == pytest.approx(torch.tensor(nats / 11).exp().item(), rel=1e-4)
        assert found["agreement"][depth - 1] == pytest.approx(same / 11)
    assert found["agreement"][3] == 1


@torch.no_grad()
def test_last_words_and_choices_are_those_of_models_cut_there() -> None:
    """By transformers' forward of the first E layers. The last two tokens of a right answer are the greedy ones of one exit."""
    model = families.build("llama")
    questions = []
    for number in range(12):
        before, ids = prompt(8, number, vocab=50), prompt(3, 90 + number, vocab=50)
        model.config.num_hidden_layers = 1 + number % 4
        for _ in range(2):
            ids = torch.cat([ids, model(torch.cat([before, ids])[None]).logits[0, -1:].argmax(-1)])
        wrong = [AnswerTokens(prompt(4 + other, 30 + 3 * number + other, vocab=50), 0, 9 + 5 * other) for other in range(2)]
        questions.append((before, [AnswerTokens(ids, 3, 11 + number), *wrong]))
    found = exit_statistics(model, questions, lambda: None)
    assert found["tokens"] == 60, "wrong choices do not count"
    for depth in (1, 2, 3, 4):
        model.config.num_hidden_layers = depth
        words, choices, per_character = 0, 0, 0
        for before, answers in questions:
            chances = []
            for one in answers:
                logits = model(torch.cat([before, one.ids])[None]).logits[0, len(before) - 1 : -1].double()
                chances.append(logits.log_softmax(-1)[range(len(one.ids)), one.ids].sum().item())
                words += one.last_word == 3 and logits.argmax(-1)[3:].equal(one.ids[3:])
            choices += chances[0] == max(chances)
            densities = [chance / one.characters for chance, one in zip(chances, answers, strict=True)]
            per_character += densities[0] == max(densities)
        assert found["last_word_accuracy"][depth - 1] == pytest.approx(words / 12)
        assert found["choice_accuracy"][depth - 1] == pytest.approx(choices / 12)
        assert found["choice_accuracy_per_character"][depth - 1] == pytest.approx(per_character / 12)
    assert len({*found["last_word_accuracy"]}) > 2
    assert found["choice_accuracy"] != found["choice_accuracy_per_character"]


@pytest.mark.parametrize("family", ["llama", "gemma2", "opt_projected"])
def test_the_likelihood_of_a_text_is_transformers(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("skipstone.lab.bench.prompts.CHUNK", 3)
    model, asked, answer = families.cached(family), prompt(6, vocab=50), prompt(8, 1, vocab=50).tolist()
    said = model(torch.cat([asked, torch.tensor(answer)])[None]).logits[0, 5:-1].double().log_softmax(-1)
    expected = said.gather(1, torch.tensor(answer)[:, None]).sum()
    assert log_likelihood(model, asked, answer) == pytest.approx(float(expected), rel=1e-5)
    assert log_likelihood(model, asked, []) == 0


def test_a_run_measures_the_answers_of_what_it_reports(folder: Path, tmp_path: Path) -> None:
    asked = [{"prompt": "abc" * n, "reference": " the stop", "choices": ["ab", " the stop", "bc x"]} for n in (1, 2)]
    bare = [{"prompt": "ab", "reference": "c" * 128}, {"turns": ["a", "b"], "reference": "c"}]
    for name, records in (("mine", asked), ("bare", bare)):
        (tmp_path / f"{name}.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    said: list[str] = []
    tasks = [str(tmp_path / f"{name}.jsonl") for name in ("mine", "bare")]
    wish = {"methods": ["autoregressive"], "tasks": tasks, "num_prompts": 2, "max_new_tokens": 4, "perplexity": True}
    out = run(plan(folder, **wish), tmp_path / "out.jsonl", [], said.append)
    lines, (mine, bare) = report.load([out])
    assert said[-1] == "bare: no accuracy of exits, its records hold no answers that fit"
    assert bare.exits is None
    (line,) = (line for line in lines if line["kind"] == "exits")
    network, tokenizer = load(folder / "model")
    builder = PromptBuilder(tokenizer, False, 99)
    answers = [builder.answer(text) for text in (" the stop", "ab", "bc x")]
    pairs = [(torch.tensor(tokenizer(one["prompt"])["input_ids"]), answers) for one in asked]
    expected = exit_statistics(network, pairs, lambda: None)
    assert (line["prompts"], line["tokens"]) == (2, expected["tokens"])
    for name in ("perplexity", "last_word_accuracy", "choice_accuracy", "choice_accuracy_per_character"):
        assert line[name] == pytest.approx(expected[name])
    assert mine.exits == line
    shares = [f"{expected[name][3]:.2f}" for name in expected if name.endswith(("accuracy", "character"))]
    cells = " | ".join(["4", f"{expected['perplexity'][3]:.2f}", "1.00", *shares])
    assert f"| {cells} |" in report.report([out], "md")
    run(plan(folder, **wish), out, [], said.append)
    assert len(report.load([out])[0]) == len(lines) + 1, "it is not measured twice"


def test_tuning_finds_the_fastest_and_spends_its_budget() -> None:
    calls = []
    candidates = [HFPromptLookup(number) for number in range(1, 10)]

    def timed(candidate: int, prompt: int) -> tuple[int, float]:
        number = candidates[candidate].prompt_lookup_num_tokens
        calls.append((number, prompt))
        # number 4 is the fastest on every prompt but the first, where 7 has a lucky moment
        return 8, 0.5 if calls[-1] == (7, 0) else 1.0 + abs(number - 4) / 10

    trials = tune(candidates, 6, 0, timed)
    assert trials[0].engine == HFPromptLookup(4)
    assert len(calls) == 30
    assert sorted(len(trial.tokens) for trial in trials) == [2] * 6 + [6] * 3
    assert trials[0].speed == pytest.approx(8.0)
    first = [number for number, index in calls if index == 0]
    assert sorted(first) == list(range(1, 10)) != first  # everybody's turn, in shuffled order


@pytest.mark.slow
def test_prompts_on_which_plain_decoding_loops_make_room_for_others(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of eight prompts those are asked whose plain text repeats less than a fifth of itself. The model is random and does not
    loop by itself: here a text loops if its tokens have an odd sum."""
    monkeypatch.setattr(prompts, "repeated_share", lambda prompt, output: 0.2 * (sum(output) % 2))
    (tmp_path / "mine.jsonl").write_text("".join((folder / "mine.jsonl").read_text().splitlines(keepends=True)[1:]))
    tasks = [str(tmp_path / "mine.jsonl")]
    methods, out = ["autoregressive", "jacobi"], tmp_path / "a.jsonl"
    asked = plan(folder, methods=methods, tasks=tasks, num_prompts=8)
    every = run_file.read(run(asked, tmp_path / "every.jsonl", [], quiet))
    shares = {line["digest"]: line["rows"]["autoregressive"]["repeated_share"] for line in every if line["kind"] == "prompt"}
    calm = {digest for digest, share in shares.items() if share < 0.2}
    assert 1 < len(calm) < 8, "a test of both kinds"
    said: list[str] = []
    asked = plan(folder, methods=methods, tasks=tasks, num_prompts=len(calm) - 1, skip_looping=True)
    lines = run_file.read(run(asked, out, [], said.append))
    calmly, looping = ([line["digest"] for line in lines if line["kind"] == kind] for kind in ("prompt", "looping"))
    assert len(calmly) == len(calm) - 1
    assert {*calmly} < calm
    assert not {*looping} & calm
    (group,) = groups(lines)
    assert len(group.headline()) == len(calmly)
    assert not any("asked for" in text for text in said)

    rest = [line for line in lines if line["kind"] not in ("prompt", "looping")]
    out.write_text("".join(json.dumps(line) + "\n" for line in [*rest, *[x for x in lines if x not in rest][:2]]))
    again = run_file.read(run(asked, out, [], quiet))
    found = {kind: [line["digest"] for line in again if line["kind"] == kind] for kind in ("prompt", "looping")}
    assert found == {"prompt": calmly, "looping": looping}, "a killed run asks and leaves out the same"


PLAN = {"models": ["a"], "seed": 0, "lengths": (2, 4)}


def test_another_plan_another_version_or_another_file_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "results.jsonl"
    RunFile(path, {**PLAN, "seed": 7}, {}).__exit__(None, None, None)
    with RunFile(path, PLAN, {}) as file:  # nothing was measured yet: a corrected command begins anew
        assert [line["kind"] for line in file.lines] == ["run"]
        file.add({"kind": "prompt", "number": 0})
    content = path.read_bytes()
    with pytest.raises(ValueError, match=r"holds another run: extra, seed differ \(extra: None there, 1 here\)"):
        RunFile(path, {**PLAN, "seed": 1, "extra": 1}, {})
    assert path.read_bytes() == content
    with pytest.raises(ValueError, match=r"threads differ \(threads: None there, 9 here\)"):
        RunFile(path, PLAN, {"threads": 9})
    RunFile(path, {**PLAN, "seed": 1}, {}, fresh=True).__exit__(None, None, None)
    assert run_file.read(path)[0]["plan"]["seed"] == 1
    with RunFile(path, {**PLAN, "seed": 1}, {}), pytest.raises(ValueError, match="being written by another run"):
        RunFile(path, {**PLAN, "seed": 1}, {})
    path.write_text("notes of mine")
    with pytest.raises(ValueError, match="no file of results"):
        RunFile(path, PLAN, {})
    assert path.read_text() == "notes of mine"
    path.write_text('{"kind": "run", "version": 99, "plan": {}}\n')
    with pytest.raises(ValueError, match="version 99, this skipstone reads version 1"):
        run_file.read(path)


def test_methods_forget_between_tasks_unless_the_tasks_are_one_stream(folder: Path, tmp_path: Path) -> None:
    """The same prompts twice: what recycled tokens bring the second time shows whether they were remembered."""

    def accepted(stream: bool) -> list[int]:
        twice = {"tasks": [str(folder / "mine.jsonl")] * 2, "methods": ["autoregressive", "recycle"], "num_prompts": 2}
        path = run(plan(folder, stream=stream, **twice), tmp_path / f"{stream}.jsonl", [], quiet)
        rows = [line for line in run_file.read(path) if line["kind"] == "prompt"]
        return [sum(line["rows"]["recycle"]["stats"]["accepted"] for line in rows if line["number"] == one) for one in (0, 1)]

    first, second = accepted(stream=False)
    assert first == second
    first, second = accepted(stream=True)
    assert first < second


def test_copies_are_there_before_any_method(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[str] = []
    monkeypatch.setattr(ModelRunner, "copy_in", lambda self, quantize: made.append(quantize))

    def stop(*_: Any) -> None:
        made.append("methods")
        raise RuntimeError("stopped")

    monkeypatch.setattr(running, "enter", stop)
    with pytest.raises(RuntimeError, match="stopped"):
        run(plan(folder, copies=["int8", "int4"], methods=["autoregressive"]), tmp_path / "a.jsonl", [], quiet)
    assert made == ["int8", "int4", "methods"]
