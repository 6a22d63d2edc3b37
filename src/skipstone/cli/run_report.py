"""The figures of a run: lines of --stats, the table of --explain, the document of --json."""

from itertools import groupby
from typing import Any

from rich.table import Table

from skipstone import __version__
from skipstone.cli.compare_with_plain import RunComparison
from skipstone.cli.timed_run import Run, RunInput
from skipstone.decoding.draft import Step
from skipstone.decoding.method import Method
from skipstone.engines.model_runner import ModelRunner
from skipstone.methods import spell


def figure_lines(job: RunInput, method: Method, run: Run) -> list[str]:
    """The run in three or more lines."""
    stats, report = run.stats, method.report(job.model)
    rate = len(run.tokens) / run.seconds if run.seconds else 0.0
    lines = [
        f"{spell(method)}: {'' if method.lossless else 'lossy, '}"
        f"{job.ids.shape[1]} prompt tokens, {len(run.tokens)} new in {run.seconds:.2f} s ({stats.seconds_prefill:.2f} s of it "
        f"prefill), {rate:.1f} tokens/s, ended by {run.finish_reason(job)}"
    ]
    drafts = ""
    if stats.draft_steps:
        drafts = (
            f": M {stats.mean_acceptance_length:.2f} tokens a step, alpha {stats.acceptance_rate:.2f} "
            f"({stats.accepted} of {stats.draft_steps} drafts accepted)"
        )
    parts = [f"{name} {ms:.2f}" for name, ms in stats.step_milliseconds().items() if name != "search" or ms]
    lines.append(f"{stats.steps} steps{drafts}; ms a step: {', '.join(parts)}")
    if stats.drafters:
        drafters = ", ".join(f"{name} {count}" for name, count in stats.drafters.most_common())
        lines.append(f"turns by what drafted: {drafters}{_speed_up_clause(run, report)}")
    if not method.lossless and stats.drafted:
        distances = ", ".join(f"{name} {value:.3f}" for name, value in mean_distances(report).items())
        lines.append(
            f"{stats.overruled} of {len(run.tokens)} tokens overruled the model"
            f"{'; mean JS distance: ' if distances else ''}{distances}"
        )
    runner = ModelRunner(job.model)
    reason = "" if runner.engine_reason is None else f" (not native: {runner.engine_reason})"
    kv_dtype = "" if runner.kv_dtype is None else f", keys and values kept in {runner.engine_options.kv_dtype}"
    lines.append(f"engine {runner.engine.name}: {runner.engine.detail}{kv_dtype}{reason}")
    if job.is_sampled:
        lines.append(f"seed {job.seed}")
    return lines


def _speed_up_clause(run: Run, report: dict[str, Any]) -> str:
    """How fast a run of `auto` was, compared with plain decoding."""
    stats = run.stats
    if not stats.seconds or not report:
        return ""
    low, high = (stats.tokens * seconds / stats.seconds for seconds in report["plain_interval"])
    plain_seconds = report["plain_seconds"]
    return (
        f"; {stats.tokens * plain_seconds / stats.seconds:.2f} x plain decoding ({low:.2f} to {high:.2f}), whose step takes "
        f"{1000 * plain_seconds:.2f} ms; {100 * stats.seconds_search / stats.seconds:.1f} % of the time for offline evaluation"
    )


def decision_table(steps: list[Step]) -> Table:
    """Why every step drafted as it did. Neighbouring steps with the same reason share a row."""
    table = Table("at token", "steps", "drafter", "drafted", "accepted", "because", title="decisions")
    position = 0
    for (drafter, reason), group in groupby((step for step in steps if step.drafter), lambda step: (step.drafter, step.reason)):
        members = list(group)
        drafted, accepted = sum(sum(step.drafted) for step in members), sum(sum(step.accepted) for step in members)
        table.add_row(str(position), str(len(members)), drafter, str(drafted), str(accepted), reason)
        position += sum(len(step.tokens[0]) for step in members)
    return table


def mean_distances(report: dict[str, Any]) -> dict[str, float]:
    """Mean Jensen-Shannon distances of accepted and rejected drafts, if the method's report has them."""
    means = report.get("means", {})
    figures = {name: means.get(f"distance_{name}", {}) for name in ("accepted", "rejected")}
    return {name: figure["sum"] / figure["count"] for name, figure in figures.items() if figure.get("count")}


def run_document(
    model: str | None, job: RunInput, method: Method, run: Run, comparison: RunComparison | None
) -> dict[str, Any]:
    """The JSON document of --json."""
    runner = ModelRunner(job.model)
    return {
        "skipstone": __version__,
        "model": model,
        "dtype": job.dtype_name,
        "device": str(job.ids.device),
        "engine": runner.engine.name,
        "engine_reason": runner.engine_reason,
        "quantize": runner.engine.quantize,
        "kv_dtype": runner.engine_options.kv_dtype,
        "method": {"method": method.name, **method.settings},
        "lossless": method.lossless,
        **({} if method.lossless else {"mean_js_distance": mean_distances(method.report(job.model))}),
        "decoding": {**job.options, "seed": job.seed if job.is_sampled else None},
        "prompt_tokens": job.ids.shape[1],
        "text": job.text(run.tokens),
        "tokens": run.tokens,
        "origin": run.origin,
        "finish_reason": run.finish_reason(job),
        "seconds": run.seconds,
        "stats": run.stats.summary(),
        "comparison": None if comparison is None else comparison.document(),
    }
