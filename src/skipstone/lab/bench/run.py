"""A whole benchmark: models x methods x tasks, prompt by prompt, into one file that a killed run goes on with.

Settings are chosen on other prompts than those reported: a grid under successive halving. The first two prompts see every
candidate, the next two the fastest third of them, and so on (Jamieson and Talwalkar, AISTATS 2016, with prompts as the
resource); the last three share all prompts that are left. So the budget in calls is known beforehand. Candidates take turns
prompt by prompt in shuffled order.
"""

import math
import random
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from skipstone.engines.exit_statistics import ExitTally, layer_states
from skipstone.engines.loading import BUNDLED, load, look_up, usable
from skipstone.engines.model_runner import ModelRunner
from skipstone.hf.api import resolve_for
from skipstone.hf.generation_defaults import neutral_defaults
from skipstone.lab.bench import speedup_predictions
from skipstone.lab.bench.plan import BASELINE, BenchPlan, MethodEntry, line_up, resolved
from skipstone.lab.bench.prompts import Both, TaskRun, ask, conversations, fingerprint, is_calm, looping
from skipstone.lab.bench.run_file import RunFile, check
from skipstone.lab.tasks import sandbox
from skipstone.lab.tasks.dialogue import PromptBuilder, TaskConversation
from skipstone.lab.tasks.task import Task
from skipstone.lab.timing import machine
from skipstone.lab.timing.measure import GenerationBackend, MethodBackend, measure, warm_up
from skipstone.lab.timing.measure_costs import costs_of
from skipstone.lab.timing.statistics import pooled

Say = Callable[[str], None]  # tells a user what is being done
KEPT = 3  # one in so many candidates survives a rung
RUNG = 2  # prompts a rung
MOST_TRIALS = 20  # best candidates whose speeds are written down


@dataclass
class BenchModel:
    """A model under test."""

    name: str
    model: PreTrainedModel
    tokenizer: PreTrainedTokenizerBase | None  # None for one without words
    synthetic: dict[str, Any] | None = None  # what is synthetic of it


def run(plan: BenchPlan, path: Path, argv: list[str], say: Say = print, fresh: bool = False) -> Path:
    """Measure what is not in the file yet. Returns its path. fresh: whatever the file holds.

    ValueError and OSError where the plan cannot be run, before anything of the model in question is measured, and where the
    file holds another run.
    """
    if plan.threads is not None:
        torch.set_num_threads(plan.threads)
    tasks = resolved(plan)
    data = None if plan.data_dir is None else Path(plan.data_dir)
    asked = [conversations(task, settings, plan, data) for task, settings in tasks]
    check_scores(plan, [task for task, _ in tasks], say)
    device = usable(plan.device)
    kept = {**plan.model_dump(mode="json"), "device": str(device), "asked": [fingerprint(both) for both in asked]}
    for name in plan.models:
        look_up(name)
    with RunFile(path, kept, machine.provenance(argv, plan.seed), fresh) as journal:
        check(path, journal.lines)
        if (begun := journal.other_code()) is not None:
            say(f"skipstone: warning: {path} was begun with other code (commit {begun[:12]}); --fresh begins anew")
        for name in plan.models or (None,):
            subject = BenchModel(
                name or BUNDLED, *load(name, dtype=plan.dtype, device=device, engine=plan.engine, quantize=plan.quantize)
            )
            entrants = enter(journal, subject, plan, say)
            for number, ((task, settings), both) in enumerate(zip(tasks, asked, strict=True)):
                room = ModelRunner(subject.model).max_positions - settings.max_new_tokens
                limit = min(room, settings.prompt_tokens or room)
                if limit < 1:
                    raise ValueError(f"{task.name}: {settings.max_new_tokens} new tokens a turn leave no room for a prompt")
                reader = PromptBuilder(subject.tokenizer, settings.chat, limit)
                task_run = TaskRun(subject.name, number, task, settings, reader, plan)
                measure_task(journal, subject.model, task_run, entrants, both, say)
                if plan.perplexity:
                    asked_of = sorted({line["index"] for line in task_run.lines(journal, "prompt")})
                    measure_exits(journal, subject.model, task_run, [both[1][index] for index in asked_of], say)
    return path


def check_scores(plan: BenchPlan, tasks: Sequence[Task], say: Say) -> None:
    """ValueError where code is allowed to run and no task does; ImportError for a score whose package is missing. Tasks that
    would run code without leave are measured, not scored."""
    for task in tasks:
        if task.score is not None:
            task.score.ready()
    executed = [task.name for task in tasks if task.score is not None and task.score.executes]
    if not plan.allow_code_execution:
        if executed:
            say(f"{', '.join(executed)}: no score, programs run under --allow-code-execution only")
        return
    if not executed:
        raise ValueError("--allow-code-execution has no effect: no task of this run is scored by running code")
    probe = sandbox.run("pass")
    if not probe.passed:
        raise OSError(f"the sandbox does not work here, every program would fail: {probe.reason}")
    if not probe.isolated:
        say(
            "skipstone: warning: this system allows no namespaces, so the model's code runs under limits alone and could reach "
            "the network and your files"
        )


def enter(journal: RunFile, subject: BenchModel, plan: BenchPlan, say: Say) -> list[MethodEntry]:
    """Who takes part on a model; a line about the model, where the file has none, after its ceiling was said."""
    entrants, refused = line_up(plan.methods, subject.model, plan.tune)
    if not entrants:
        raise ValueError(f"no method is left to measure on {subject.name}: {'; '.join(refused.values())}")
    if not any(line["model"] == subject.name for line in journal.lines_of("model")):
        config, runner = subject.model.config, ModelRunner(subject.model)
        ceiling = machine.ceiling(subject.model, 256)
        say(machine.told(subject.name, ceiling))
        journal.add(
            {
                "kind": "model",
                "model": subject.name,
                "type": config.model_type,
                "layers": config.num_hidden_layers,
                "dtype": str(subject.model.dtype).removeprefix("torch."),
                "device": str(subject.model.device),
                "engine": runner.engine.name,
                "engine_reason": runner.engine_reason,
                "quantize": runner.engine.quantize,
                "ceiling": ceiling,
                "synthetic": subject.synthetic,
                "refused": refused,
                "methods": {entrant.label: entrant.about() for entrant in entrants},
                **priced(entrants, runner, say),
            }
        )
    return entrants


def priced(entrants: Sequence[MethodEntry], runner: ModelRunner, say: Say) -> dict[str, Any]:
    """What decoding costs on the model, and every candidate's drafter, as the model's line says it; nothing where no
    candidate's speed-up follows from costs, or none can be measured."""
    ours = {entrant.label: [one.method for one in entrant.candidates if isinstance(one, MethodBackend)] for entrant in entrants}
    drafters = {label: [speedup_predictions.described(one, runner) for one in own] for label, own in ours.items()}
    drafters = {label: own for label, own in drafters.items() if any(own)}
    if not drafters:
        return {}
    every = (speedup_predictions.draft_model(method, runner) for own in ours.values() for method in own)
    models = {id(one): one for one in every if one is not None}
    try:
        found = costs_of(runner, (1,), [*models.values()])
    except ValueError as error:
        say(f"costs are not measured: {error}")
        return {}
    say(f"costs of steps and passes: {'measured' if found.fresh else 'known'}, {found.seconds:.1f} s of {found.measured}")
    return {"costs": asdict(found.costs.at(1)), "drafters": drafters}


def measure_task(
    journal: RunFile, model: PreTrainedModel, task_run: TaskRun, entrants: Sequence[MethodEntry], both: Both, say: Say
) -> None:
    """One task on one model: choose what is open, then ask everybody prompt by prompt."""
    (spare, report), settings = both, task_run.settings
    counts = is_calm if settings.skip_looping else lambda line: True
    lines = task_run.lines(journal, "prompt")
    done = {line["index"] for line in [*lines, *task_run.lines(journal, "looping")]}
    counted, wanted = sum(map(counts, lines)), task_run.wanted(len(report))
    if counted >= wanted:
        return
    taking = [entrant for entrant in entrants if entrant.sampled or not settings.temperature]
    if absent := [entrant.label for entrant in entrants if entrant not in taking]:
        say(f"{task_run.task.name}, T = {settings.temperature:g}: without {', '.join(absent)}, measured greedily only")
    if not taking:
        return
    with neutral_defaults(model, not task_run.plan.ignore_eos):
        engines = {entrant.label: _chosen(journal, model, task_run, entrant, spare) for entrant in taking}
        longest = max((task_run.reader.ids(one) for one in report[:wanted]), key=len)
        warm_up(model, engines.values(), longest, task_run.options(settings.max_new_tokens))
        plain = MethodBackend(resolve_for(model, {"method": BASELINE}))
        with progress(f"{task_run.model}, {task_run.task.name}", wanted - counted) as step:
            for index, one in enumerate(report):
                if counted == wanted:
                    return
                if index in done:
                    continue
                if settings.skip_looping and (loop := looping(model, plain, one, index, task_run)) is not None:
                    journal.add(loop)
                    continue
                line = ask(model, engines, one, index, task_run)
                journal.add(line)
                if counts(line):
                    counted += 1
                    step()
    if counted < wanted:
        say(f"{task_run.task.name}: a method repeats itself on all prompts but {counted}, {wanted} are asked for")


def measure_exits(
    journal: RunFile, model: PreTrainedModel, task_run: TaskRun, report: Sequence[TaskConversation], say: Say
) -> None:
    """How well every exit predicts the task's answers, where it has answers; one line."""
    if task_run.lines(journal, "exits"):
        return
    pairs = task_run.answers(report, ModelRunner(model).max_positions)
    if not pairs:
        say(f"{task_run.task.name}: no perplexity, its records hold no answers")
        return
    with progress(f"{task_run.model}, {task_run.task.name}: every exit's perplexity", len(pairs)) as step:
        found = at_every_exit(model, pairs, step)
    journal.add({"kind": "exits", **task_run.key(), "prompts": len(pairs), **found})


@torch.inference_mode()
def at_every_exit(model: PreTrainedModel, pairs: Sequence[tuple[Tensor, Tensor]], done: Callable[[], None]) -> dict[str, Any]:
    """What every exit knows of answers (LayerSkip, Table 1), as their line says it: the perplexity of a token, teacher-forced,
    and the share of tokens at which an exit's best one is the last layer's; lists of L layers, layers[:1] first.

    pairs: (prompt [T], answer [A]) int64, T and A at least 1, one or more. done: called after each.
    """
    runner = ModelRunner(model)
    tally = ExitTally(runner, range(1, runner.depth + 1))
    for prompt, answer in pairs:
        span = slice(len(prompt) - 1, len(prompt) + len(answer) - 1)
        states = layer_states(runner, torch.cat([prompt, answer]))  # L + 1 of [1, T, d]
        tally.add({exit: states[exit][0, span] for exit in tally.exits}, answer.to(model.device))
        done()
    known = {"perplexity": tally.perplexity(), "agreement": tally.agreement()}
    return {"tokens": tally.tokens, **{name: [*by_exit.values()] for name, by_exit in known.items()}}


def _chosen(
    journal: RunFile, model: PreTrainedModel, task_run: TaskRun, entrant: MethodEntry, spare: Sequence[TaskConversation]
) -> GenerationBackend:
    """An entrant with its settings: as the file has them, or chosen now, on spare prompts."""
    if len(entrant.candidates) == 1:
        return entrant.candidates[0]
    trials, earlier = (
        [line for line in task_run.lines(journal, kind) if line["method"] == entrant.label] for kind in ("trial", "tuned")
    )
    if earlier:
        return entrant.candidates[earlier[0]["candidate"]]
    ids = [task_run.reader.ids(one) for one in spare]
    calls = sum(count * len(span) for count, span in rungs(len(entrant.candidates), len(ids)))
    key = {**task_run.key(), "method": entrant.label}
    known = {(line["candidate"], line["prompt"]): (line["tokens"], line["seconds"]) for line in trials}
    options = task_run.options(task_run.plan.tune_tokens)
    warm_up(model, entrant.candidates[:1], ids[0], options)
    with progress(f"{task_run.model}, {task_run.task.name}: choosing settings of {entrant.label}", calls - len(known)) as step:

        def call(candidate: int, prompt: int) -> tuple[int, float]:
            if (candidate, prompt) not in known:
                found = measure(model, entrant.candidates[candidate], ids[prompt], options, task_run.plan.seed + prompt)
                tokens, seconds = known[candidate, prompt] = len(found.tokens), found.seconds
                told = {"candidate": candidate, "prompt": prompt, "tokens": tokens, "seconds": seconds}
                journal.add({"kind": "trial", **key, **told})
                step()
            return known[candidate, prompt]

        tried = tune(entrant.candidates, len(ids), task_run.plan.seed, call)
    best = tried[0]
    chosen = {"candidate": best.number, "chosen": best.engine.settings, "candidates": len(tried), "calls": calls}
    journal.add({"kind": "tuned", **key, **chosen, "trials": [trial.report() for trial in tried[:MOST_TRIALS]]})
    return best.engine


@dataclass
class CandidateRun:
    """One candidate and what it has done so far."""

    number: int
    engine: GenerationBackend
    tokens: list[int] = field(default_factory=list)
    seconds: list[float] = field(default_factory=list)

    @property
    def speed(self) -> float:
        """Tokens a second over all prompts it has seen."""
        return pooled(self.tokens, self.seconds)

    def report(self) -> dict[str, Any]:
        """Plain JSON values."""
        return {"settings": self.engine.settings, "prompts": len(self.tokens), "tokens_per_second": self.speed}


def rungs(candidates: int, prompts: int) -> list[tuple[int, range]]:
    """The plan: (candidates still in, prompts they run on) per rung. Nothing is run for a single candidate."""
    plan, left, start = [], candidates, 0
    while left > 1 and start < prompts:
        stop = prompts if left <= KEPT else min(start + RUNG, prompts)
        plan.append((left, range(start, stop)))
        left, start = math.ceil(left / KEPT), stop
    return plan


def tune(
    candidates: Sequence[GenerationBackend], prompts: int, seed: int, call: Callable[[int, int], tuple[int, float]]
) -> list[CandidateRun]:
    """All candidates, best first: the fastest of those that saw the most prompts. A single one is left untried. call: of a
    candidate's number and a prompt's, gives tokens and seconds."""
    rng = random.Random(seed)
    trials = [CandidateRun(number, engine) for number, engine in enumerate(candidates)]
    for count, span in rungs(len(trials), prompts):
        running = trials[:count]
        for index in span:
            for trial in rng.sample(running, len(running)):
                tokens, seconds = call(trial.number, index)
                trial.tokens.append(tokens)
                trial.seconds.append(seconds)
        trials.sort(key=lambda trial: (-len(trial.tokens), -trial.speed if trial.tokens else 0.0))
    return trials


@contextmanager
def progress(title: str, total: int) -> Iterator[Callable[[], None]]:
    """What is being done, on stderr: a bar with the remaining time on a terminal, one line elsewhere.

    total: pieces of work, 0 says nothing. Yields what to call after every piece.
    """
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    console = Console(stderr=True)
    if total and not console.is_terminal:
        console.print(f"{title}: {total}", highlight=False)
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal or not total) as bar:
        task = bar.add_task(title, total=total)
        yield lambda: bar.advance(task)
