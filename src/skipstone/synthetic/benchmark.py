"""A whole benchmark of a synthetic model, on contexts that it sampled itself."""

from pathlib import Path
from typing import Any

import torch

from skipstone.bench.journal import Journal
from skipstone.bench.plan import Plan, resolved
from skipstone.bench.prompts import TaskRun
from skipstone.bench.report.report import calibrated
from skipstone.bench.run import Say, Subject, enter, measure_task
from skipstone.decoding.method import OWN_FIELD
from skipstone.loading import usable
from skipstone.synthetic import surrogate
from skipstone.synthetic.surrogate import Shape
from skipstone.tasks.dialogue import Reader
from skipstone.tasks.task import Source, Task
from skipstone.timing import machine

CONTEXTS = 128  # sampled texts of a measurement while calibrating


def run_surrogate(
    shape: Shape, plan: Plan, path: Path, argv: list[str], say: Say = print, fresh: bool = False, contexts: int = CONTEXTS
) -> Path:
    """Measure what is not in the file yet. The calibrated part is its method's default. contexts: of a measurement while
    calibrating. ValueError where the file holds another run, or the wanted agreement cannot be had."""
    if plan.threads is not None:
        torch.set_num_threads(plan.threads)
    ((_, settings),) = resolved(plan)
    assert settings.num_prompts is not None
    assert settings.prompt_tokens is not None
    wanted: dict[str, Any] = {"shape": shape.name, "exit_layer": shape.exit_layer, "agreement": shape.agreement}
    counted = shape.agreement is not None and contexts != CONTEXTS
    more = {"skip_ratio": shape.skip_ratio, "sure": shape.sure or None, "contexts": contexts if counted else None}
    wanted |= {name: value for name, value in more.items() if value is not None}
    kept = {**plan.model_dump(mode="json"), "surrogate": wanted}
    with Journal(path, kept, machine.provenance(argv, plan.seed), fresh) as journal:
        model, about = _made(journal, shape, plan, say, contexts)
        count = plan.tune_prompts + settings.num_prompts
        if shape.agreement is None:
            prompts = surrogate.random_prompts(model.config.vocab_size, count, settings.prompt_tokens, plan.seed)
        else:
            prompts = surrogate.sampled_prompts(model, count, settings.prompt_tokens, plan.seed + 1)
        entrants = enter(journal, Subject(plan.models[0], model, None, about), plan, say)
        task = Task("synthetic", Source(None, ""), (), "none", lambda record: [])
        task_run = TaskRun(plan.models[0], 0, task, settings, Reader(None, False, settings.prompt_tokens), plan)
        measure_task(journal, model, task_run, entrants, (prompts[: plan.tune_prompts], prompts[plan.tune_prompts :]), say)
    return path


def _made(journal: Journal, shape: Shape, plan: Plan, say: Say, contexts: int) -> tuple[Any, dict[str, Any]]:
    """(the model, what is said of it): calibrated, as the file says or now."""
    dtype = torch.float32 if plan.dtype == "auto" else getattr(torch, plan.dtype)
    device = usable(plan.device)
    if shape.agreement is None:
        return surrogate.plain(shape, plan.seed, dtype, device), {"shape": shape.name, "contexts": "random ids"}
    known = next(journal.lines_of("calibrated"), None)
    if known is None:
        say(f"calibrating {shape.name}: {shape.part} are to agree with all at {shape.agreement}")
        made = surrogate.calibrate(shape, plan.seed, sequences=contexts, dtype=dtype, device=device, say=say)
        model, about = made.model, made.report()
        journal.add({"kind": "calibrated", "model": plan.models[0], "factor": made.factor, "about": about})
    else:
        model, about = surrogate.scaled(shape, plan.seed, known["factor"], dtype, device), known["about"]
    setattr(model.generation_config, OWN_FIELD, shape.method)
    say(calibrated(about))
    return model, about
