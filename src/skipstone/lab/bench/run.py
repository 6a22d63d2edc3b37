"""A whole benchmark: models x methods x tasks, prompt by prompt, written to one file that a killed run resumes.

Settings are chosen on prompts that are not reported, by successive halving over a grid (Jamieson and Talwalkar, AISTATS 2016,
with prompts as the resource). The first two prompts see every candidate, the next two the fastest third, and so on; the last
three candidates share all remaining prompts. So the number of calls is known beforehand. Candidates take turns prompt by
prompt in shuffled order.
"""

import math
import random
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from skipstone.assets import BUNDLED
from skipstone.decoding.method_states import forget_states
from skipstone.decoding.stats import Stats
from skipstone.engines.exit_statistics import ExitTally, layer_states
from skipstone.engines.loading import expect_config
from skipstone.engines.mapped_loading import load_to_measure
from skipstone.engines.model_runner import ModelRunner
from skipstone.hf.generate_call import resolve_for
from skipstone.hf.generation_defaults import neutral_defaults
from skipstone.lab.bench import speedup_predictions
from skipstone.lab.bench.plan import BASELINE, BenchPlan, MethodEntry, create_entries, resolved
from skipstone.lab.bench.prompts import (
    AnsweredPrompt,
    BenchModel,
    PromptSplit,
    TaskRun,
    ask,
    conversations,
    fingerprint,
    is_calm,
    is_looping,
)
from skipstone.lab.bench.run_file import RunFile, check
from skipstone.lab.tasks import sandbox
from skipstone.lab.tasks.data_sets import Task
from skipstone.lab.tasks.dialogue import PromptBuilder, TaskConversation
from skipstone.lab.tasks.protocols import TaskSettings
from skipstone.lab.timing import machine
from skipstone.lab.timing.measure import WARM_UP_TOKENS, GenerationBackend, MethodBackend, measure, warm_up
from skipstone.lab.timing.measure_costs import costs_of
from skipstone.lab.timing.statistics import pooled
from skipstone.models.device_map import usable_device
from skipstone.utils.processor_watch import ProcessorWatch
from skipstone.utils.progress import progress_bar

Say = Callable[[str], None]  # reports progress to a user
PlannedPrompts = tuple[tuple[Task, TaskSettings], PromptSplit]  # a task, and its prompts
REDUCTION = 3  # one in so many candidates survives a rung
RUNG_PROMPTS = 2
MAX_TRIALS = 20  # best candidates with their speed in the file


def run(plan: BenchPlan, path: Path, argv: list[str], say: Say = print, fresh: bool = False) -> Path:
    """Measure what the file does not hold yet. Returns its path. fresh: overwrite the file.

    ValueError and OSError if the plan cannot be run, before the model in question is measured, and if the file holds another
    run.
    """
    if plan.threads is not None:
        torch.set_num_threads(plan.threads)
    tasks = resolved(plan)
    prompts = [conversations(task, settings, plan, plan.data_dir) for task, settings in tasks]
    check_scores(plan, [task for task, _ in tasks], say)
    is_placed = plan.device_map is not None
    device = "cpu" if is_placed and plan.device == "auto" else str(usable_device(plan.device))
    header = {
        **plan.model_dump(mode="json"),
        "device": plan.device if is_placed else device,
        "asked": [fingerprint(split) for split in prompts],
    }
    for name in plan.models:
        expect_config(name)
    with RunFile(path, header, machine.provenance(argv, plan.seed), fresh) as journal:
        check(path, journal.lines)
        if (commit := journal.other_commit()) is not None:
            say(f"skipstone: warning: {path} was begun with other code (commit {commit[:12]}); --fresh begins anew")
        for name in plan.models or (None,):
            measure_model(name, device, plan, list(zip(tasks, prompts, strict=True)), journal, say)
    return path


def measure_model(
    name: str | None, device: str, plan: BenchPlan, tasks: Sequence[PlannedPrompts], journal: RunFile, say: Say
) -> None:
    """Run all tasks on one model. It is loaded here, so that its memory is free for the next one."""
    options = {"dtype": plan.dtype, "device": device, "engine": plan.engine, "quantize": plan.quantize}
    model, tokenizer = load_to_measure(name, device_map=plan.device_map, **options)
    subject = BenchModel(name or BUNDLED, model, tokenizer)
    for quantize in plan.copies:
        ModelRunner(model).copy_in(quantize)
    entries = enter(journal, subject, plan, say)
    for number, ((task, settings), split) in enumerate(tasks):
        free = ModelRunner(model).max_positions - settings.max_new_tokens
        max_prompt_tokens = min(free, settings.prompt_tokens or free)
        if max_prompt_tokens < 1:
            raise ValueError(f"{task.name}: {settings.max_new_tokens} new tokens a turn leave no room for a prompt")
        builder = PromptBuilder(tokenizer, settings.chat, max_prompt_tokens)
        task_run = TaskRun(subject, number, task, settings, builder, plan, journal)
        measure_task(task_run, entries, split, say)
        if plan.perplexity:
            measured = sorted({line["index"] for line in task_run.lines("prompt")})
            measure_exits(task_run, [split[1][index] for index in measured], say)


def check_scores(plan: BenchPlan, tasks: Sequence[Task], say: Say) -> None:
    """Check that every task can be scored.

    ValueError if code may run and no task runs any; ImportError if a score's package is missing; OSError without a working
    sandbox. Tasks that would run code without permission are measured, not scored.
    """
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
        reach = "the model's code runs under limits alone and could reach the network and your files"
        say(f"skipstone: warning: this system allows no namespaces, so {reach}")


def enter(journal: RunFile, subject: BenchModel, plan: BenchPlan, say: Say) -> list[MethodEntry]:
    """The methods that take part on a model. Writes the model's line if the file has none."""
    entries, refused = create_entries(plan.methods, subject.model, plan.tune)
    if not entries:
        raise ValueError(f"no method is left to measure on {subject.name}: {'; '.join(refused.values())}")
    if not any(line["model"] == subject.name for line in journal.lines_of("model")):
        config, runner = subject.model.config, ModelRunner(subject.model)
        ceiling = machine.ceiling(subject.model, 256)
        say(machine.describe_ceiling(subject.name, ceiling))
        journal.add(
            {
                "kind": "model",
                "model": subject.name,
                "weights": runner.fingerprint,
                "type": config.model_type,
                "layers": config.num_hidden_layers,
                "dtype": str(subject.model.dtype).removeprefix("torch."),
                "device": str(subject.model.device),
                "engine": runner.engine.name,
                "engine_reason": runner.engine_reason,
                "instructions": getattr(runner.engine, "level", None),
                "quantize": runner.engine.quantize,
                "ceiling": ceiling,
                "synthetic": subject.synthetic,
                "refused": refused,
                "methods": {entry.label: entry.about() for entry in entries},
                **measure_prices(entries, runner, say),
            }
        )
    return entries


def measure_prices(entries: Sequence[MethodEntry], runner: ModelRunner, say: Say) -> dict[str, Any]:
    """Costs of steps and passes, and the drafter of every candidate, as the model's line holds them.

    Empty if costs predict no candidate's speed-up, or cannot be measured.
    """
    ours = {entry.label: [one.method for one in entry.candidates if isinstance(one, MethodBackend)] for entry in entries}
    drafters = {label: [speedup_predictions.described(one, runner) for one in own] for label, own in ours.items()}
    drafters = {label: own for label, own in drafters.items() if any(own)}
    if not drafters:
        return {}
    models = (speedup_predictions.draft_model(method, runner) for own in ours.values() for method in own)
    try:
        found = costs_of(runner, (1,), [*{id(one): one for one in models if one is not None}.values()])
    except ValueError as error:
        say(f"costs are not measured: {error}")
        return {}
    say(f"costs of steps and passes: {'measured' if found.fresh else 'known'}, {found.seconds:.1f} s of {found.measured}")
    return {"costs": asdict(found.costs.at(1)), "drafters": drafters}


def measure_task(task_run: TaskRun, entries: Sequence[MethodEntry], prompts: PromptSplit, say: Say) -> None:
    """Run one task on one model: choose open settings, then measure all methods prompt by prompt."""
    (spare, report), settings, model = prompts, task_run.settings, task_run.model
    lines = task_run.lines("prompt")
    done = {line["index"] for line in [*lines, *task_run.lines("looping")]}
    methods = {entry.label: entry.method for entry in entries}
    counted = sum(is_calm(line, methods) for line in lines) if settings.skip_looping else len(lines)
    wanted = task_run.num_wanted(len(report))
    if counted >= wanted:
        return
    taking = [entry for entry in entries if entry.sampled or not settings.temperature]
    if absent := [entry.label for entry in entries if entry not in taking]:
        say(f"{task_run.task.name}, T = {settings.temperature:g}: without {', '.join(absent)}, measured greedily only")
    if not taking:
        return
    with neutral_defaults(model, not task_run.plan.ignore_eos):
        _measure_first_requests(task_run, taking, task_run.builder.ids(report[0]))
        engines = {entry.label: _choose(task_run, entry, spare) for entry in taking}
        longest = max((task_run.builder.ids(one) for one in report[:wanted]), key=len)
        _warm_up(task_run, engines.values(), longest)
        plain = MethodBackend(resolve_for(model, {"method": BASELINE}))
        with progress_bar(task_run.title, wanted - counted, announce=True) as step:
            for index, one in enumerate(report):
                if counted == wanted:
                    return
                if index in done:
                    continue
                if settings.skip_looping and is_looping(plain, one, index, task_run):
                    continue
                line = ask(engines, one, index, task_run)
                if not settings.skip_looping or is_calm(line, methods):
                    counted += 1
                    step()
    if counted < wanted:
        say(f"{task_run.task.name}: a method repeats itself on all prompts but {counted}, {wanted} are asked for")


def _warm_up(task_run: TaskRun, engines: Iterable[GenerationBackend], prompt: Tensor) -> None:
    """Run every engine once. Then methods forget what they have learnt, so that a task can be measured alone."""
    warm_up(task_run.model, engines, prompt, task_run.options(task_run.settings.max_new_tokens))
    if not task_run.plan.stream:
        forget_states(task_run.model)


def _measure_first_requests(task_run: TaskRun, entries: Sequence[MethodEntry], prompt: Tensor) -> None:
    """Time the first request of every method on a model, before anything is warmed up. prompt: [T] int64."""
    known = [line["method"] for line in task_run.journal.lines_of("first") if line["model"] == task_run.subject.name]
    options = task_run.options(min(WARM_UP_TOKENS, task_run.settings.max_new_tokens))
    for entry in entries:
        if entry.label not in known:
            with ProcessorWatch() as watch:
                found = measure(task_run.model, entry.candidates[0], prompt, options, task_run.plan.seed)
            setup, seconds = Stats(setup=dict(entry.setup)), found.seconds + sum(entry.setup.values())
            setup.merge(found.stats or Stats())
            about = {"model": task_run.subject.name, "method": entry.label, "tokens": len(found.tokens)}
            about["waited_share"] = watch.waited_share
            task_run.journal.add({"kind": "first", **about, "seconds": seconds, "setup": setup.setup})


def measure_exits(task_run: TaskRun, prompts: Sequence[TaskConversation], say: Say) -> None:
    """Measure how well every exit predicts the task's answers, if its records have answers."""
    if task_run.lines("exits"):
        return
    pairs = task_run.answers(prompts, ModelRunner(task_run.model).max_positions)
    if not pairs:
        say(f"{task_run.task.name}: no accuracy of exits, its records hold no answers that fit")
        return
    with progress_bar(f"{task_run.title}: accuracy of every exit", len(pairs), announce=True) as step:
        statistics = exit_statistics(task_run.model, pairs, step)
    task_run.add("exits", prompts=len(pairs), **statistics)


@torch.inference_mode()
def exit_statistics(model: PreTrainedModel, pairs: Sequence[AnsweredPrompt], done: Callable[[], None]) -> dict[str, Any]:
    """Figures of every exit on at least one prompt, teacher-forced: lists of L numbers that begin with layers[:1].

    perplexity, agreement: of the right answers' tokens (LayerSkip, Table 1), and of exit and last layer on their greedy tokens.
    last_word_accuracy: share of the right answers in which all tokens of the last word are the exit's greedy tokens (LAMBADA).
    choice_accuracy: share of the prompts whose right answer is the most likely choice (acc of lm-evaluation-harness), if all
    have choices. choice_accuracy_per_character: with each log-likelihood divided by its choice's length (acc_norm).
    done: called after each prompt.
    """
    runner = ModelRunner(model)
    exits = range(1, runner.depth + 1)
    tally = ExitTally(runner, exits)
    is_right: dict[str, list[Tensor]] = defaultdict(list)  # figure -> of every prompt: exits [L] bool
    for prompt, (right, *wrong) in pairs:
        nats, is_greedy = _add_answer(runner, tally, prompt, right.ids)  # [L, A] each
        is_right["last_word_accuracy"].append(is_greedy[:, right.last_word :].all(1))
        if wrong:
            scratch = ExitTally(runner, exits)
            others = torch.stack([_add_answer(runner, scratch, prompt, one.ids)[0].sum(1) for one in wrong])  # [C, L]
            lengths = others.new_tensor([one.characters for one in wrong])[:, None]
            is_right["choice_accuracy"].append((nats.sum(1) < others).all(0))
            is_right["choice_accuracy_per_character"].append((nats.sum(1) / right.characters < others / lengths).all(0))
        done()
    shares = {name: torch.stack(rows).double().mean(0).tolist() for name, rows in is_right.items() if len(rows) == len(pairs)}
    quality = {"perplexity": [*tally.perplexity().values()], "agreement": [*tally.agreement().values()]}
    return {"tokens": tally.tokens, **quality, **shares}


def _add_answer(runner: ModelRunner, tally: ExitTally, prompt: Tensor, answer: Tensor) -> tuple[Tensor, Tensor]:
    """Count an answer [A] int64 after a prompt [T] int64. Returns what `ExitTally.add` does."""
    states = layer_states(runner, torch.cat([prompt, answer]))  # L + 1 of [1, T + A, d]
    span = slice(len(prompt) - 1, len(prompt) + len(answer) - 1)
    return tally.add({exit: states[exit][0, span] for exit in tally.exits}, answer.to(runner.model.device))


def _choose(task_run: TaskRun, entry: MethodEntry, spare: Sequence[TaskConversation]) -> GenerationBackend:
    """An entry's best candidate, as the file says or measured now on spare prompts."""
    if len(entry.candidates) == 1:
        return entry.candidates[0]
    kinds = "trial", "tuned"
    trials, earlier = ([line for line in task_run.lines(kind) if line["method"] == entry.label] for kind in kinds)
    if earlier:
        return entry.candidates[earlier[0]["candidate"]]
    ids = [task_run.builder.ids(one) for one in spare]
    calls = sum(count * len(span) for count, span in rungs(len(entry.candidates), len(ids)))
    known = {(line["candidate"], line["prompt"]): (line["tokens"], line["seconds"]) for line in trials}
    options = task_run.options(task_run.plan.tune_tokens)
    model = task_run.model
    warm_up(model, entry.candidates[:1], ids[0], options)
    title = f"{task_run.title}: choosing settings of {entry.label}"
    with progress_bar(title, calls - len(known), announce=True) as step:

        def call(candidate: int, prompt: int) -> tuple[int, float]:
            if (candidate, prompt) not in known:
                found = measure(model, entry.candidates[candidate], ids[prompt], options, task_run.plan.seed + prompt)
                tokens, seconds = known[candidate, prompt] = len(found.tokens), found.seconds
                measured = {"candidate": candidate, "prompt": prompt, "tokens": tokens, "seconds": seconds}
                task_run.add("trial", method=entry.label, **measured)
                step()
            return known[candidate, prompt]

        tried = tune(entry.candidates, len(ids), task_run.plan.seed, call)
    best = tried[0]
    chosen = {"candidate": best.number, "chosen": best.engine.settings, "candidates": len(tried), "calls": calls}
    task_run.add("tuned", method=entry.label, **chosen, trials=[trial.report() for trial in tried[:MAX_TRIALS]])
    return best.engine


@dataclass
class CandidateRun:
    """One candidate and its calls so far."""

    number: int
    engine: GenerationBackend
    tokens: list[int] = field(default_factory=list)
    seconds: list[float] = field(default_factory=list)

    @property
    def speed(self) -> float:
        """Tokens per second over all of its prompts."""
        return pooled(self.tokens, self.seconds)

    def report(self) -> dict[str, Any]:
        """Plain JSON values."""
        return {"settings": self.engine.settings, "prompts": len(self.tokens), "tokens_per_second": self.speed}


def rungs(candidates: int, prompts: int) -> list[tuple[int, range]]:
    """(number of remaining candidates, their prompts) per rung. Empty for a single candidate."""
    plan, left, start = [], candidates, 0
    while left > 1 and start < prompts:
        stop = prompts if left <= REDUCTION else min(start + RUNG_PROMPTS, prompts)
        plan.append((left, range(start, stop)))
        left, start = math.ceil(left / REDUCTION), stop
    return plan


def tune(
    candidates: Sequence[GenerationBackend], prompts: int, seed: int, call: Callable[[int, int], tuple[int, float]]
) -> list[CandidateRun]:
    """All candidates, best first: the fastest of those with the most prompts. A single one is not tried.

    call: (number of a candidate, number of a prompt) -> (tokens, seconds).
    """
    rng = random.Random(seed)
    trials = [CandidateRun(number, engine) for number, engine in enumerate(candidates)]
    for count, span in rungs(len(trials), prompts):
        for index in span:
            for trial in rng.sample(trials[:count], count):
                tokens, seconds = call(trial.number, index)
                trial.tokens.append(tokens)
                trial.seconds.append(seconds)
        trials.sort(key=lambda trial: (-len(trial.tokens), -trial.speed if trial.tokens else 0.0))
    return trials
