"""From measurements to figures, and from figures to the table that people read."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table

from skipstone.bench.measure import Measurement, Row
from skipstone.bench.prompts import Prompt, digest
from skipstone.bench.statistics import LOOPING, NGRAM, bootstrap_speedup, pooled, predicted_speedup, repeated_share
from skipstone.core.types import Stats

OURS, THEIRS, EARLY_EXIT = "autoregressive", "hf-generate", "hf-early-exit"
REFERENCES = {"speedup_autoregressive": OURS, "speedup_hf_generate": THEIRS, "speedup_hf_early_exit": EARLY_EXIT}

LEGEND = f"""\
x plain, x HF, x HF exit: speed-up over {OURS}, {THEIRS} (same temperature) and {EARLY_EXIT} at its best setting; total tokens
over total time, prefill included, with 95 % paired bootstrap intervals over prompts. Only the n prompts count whose text has a
share of repeated {NGRAM}-grams under {LOOPING} in all rows of that temperature; the last column takes all prompts.
ms a step: draft + scoring + other. predicted: plain seconds a token x tokens a step / (draft + scoring seconds a step), prefill
apart; reached: measured decode speed-up over predicted. equal: greedy texts identical to {THEIRS}. Sampled rows use the
settings tuned at greedy decoding."""


def named(base: str, temperature: float) -> str:
    """A row's name: rows that sample carry their temperature."""
    return f"{base} T={temperature:g}" if temperature else base


class Results:
    """All measurements of a run, by row and prompt, with the share of repeated n-grams of every text."""

    def __init__(self, rows: Sequence[Row], prompts: Sequence[Prompt], measurements: Sequence[Measurement], seed: int) -> None:
        self.rows, self.prompts, self.seed = list(rows), list(prompts), seed
        self.by_row: dict[str, dict[int, Measurement]] = {row.name: {} for row in rows}
        self.share: dict[tuple[str, int], float] = {}
        for m in measurements:
            self.by_row[m.row][m.prompt] = m
            self.share[m.row, m.prompt] = repeated_share(prompts[m.prompt].ids.tolist(), m.tokens)

    def every(self) -> list[int]:
        """All prompts."""
        return list(range(len(self.prompts)))

    def headline(self, temperature: float) -> list[int]:
        """Prompts on which no row of this temperature repeats itself: share < LOOPING in each."""
        names = [row.name for row in self.rows if row.temperature == temperature]
        return [i for i in self.every() if all(self.share[name, i] < LOOPING for name in names)]

    def figures(self, row: Row, prompts: Sequence[int]) -> dict[str, Any] | None:
        """One row's figures over some prompts as plain JSON values; None where there is no prompt."""
        if not prompts:
            return None
        mine = [self.by_row[row.name][i] for i in prompts]
        plain = self.by_row.get(named(OURS, row.temperature))
        figures: dict[str, Any] = {
            "prompts": len(prompts),
            "tokens": sum(len(m.tokens) for m in mine),
            "seconds": sum(m.seconds for m in mine),
            "tokens_per_second": pooled([len(m.tokens) for m in mine], [m.seconds for m in mine]),
            "repeated_share": sum(self.share[row.name, i] for i in prompts) / len(prompts),
        }
        for key, base in REFERENCES.items():
            reference = self.by_row.get(named(base, row.temperature))
            figures[key] = self._speedup(mine, [reference[i] for i in prompts]) if reference else None
        reference = self.by_row.get(THEIRS)
        if row.temperature == 0 and reference:
            figures["equal_to_hf_generate"] = sum(m.tokens == reference[m.prompt].tokens for m in mine)
        stats = [m.stats for m in mine if m.stats is not None]
        if stats:
            total = merged(stats)
            figures |= own_figures(total, sum(m.seconds for m in mine))
            if plain and total.draft_steps:
                figures |= expectation(total, mine, [plain[i] for i in prompts])
        return figures

    def _speedup(self, mine: Sequence[Measurement], base: Sequence[Measurement]) -> dict[str, float]:
        tokens, seconds = [len(m.tokens) for m in mine], [m.seconds for m in mine]
        base_tokens, base_seconds = [len(m.tokens) for m in base], [m.seconds for m in base]
        return asdict(bootstrap_speedup(tokens, seconds, base_tokens, base_seconds, self.seed))

    def per_row(self) -> list[dict[str, Any]]:
        """Every row's settings and figures, over the headline's prompts and over all."""
        return [
            {
                "name": row.name,
                "temperature": row.temperature,
                "settings": row.engine.settings,
                "headline": self.figures(row, self.headline(row.temperature)),
                "all_prompts": self.figures(row, self.every()),
            }
            for row in self.rows
        ]

    def per_prompt(self) -> list[dict[str, Any]]:
        """What was measured on every prompt."""
        return [
            {
                "source": prompt.source,
                "tokens": len(prompt.ids),
                "digest": prompt.digest,
                "rows": {name: self._one(name, index) for name in self.by_row},
            }
            for index, prompt in enumerate(self.prompts)
        ]

    def _one(self, name: str, index: int) -> dict[str, Any]:
        m = self.by_row[name][index]
        return {
            "tokens": len(m.tokens),
            "digest": digest(m.tokens),
            "seconds": m.seconds,
            "repeated_share": self.share[name, index],
            "stats": m.stats.summary() if m.stats else None,
        }


def merged(stats: Sequence[Stats]) -> Stats:
    """The sum of several calls' figures."""
    total = Stats()
    for one in stats:
        for name in Stats.__dataclass_fields__:
            setattr(total, name, getattr(total, name) + getattr(one, name))
    return total


def own_figures(total: Stats, seconds: float) -> dict[str, Any]:
    """M, alpha and where the time of a step went. seconds: wall-clock of the calls; what no span covers is overhead."""
    turns = max(total.turns, 1)
    spans = total.seconds + total.seconds_prefill
    return {
        "mean_acceptance_length": total.mean_acceptance_length,
        "acceptance_rate": total.acceptance_rate if total.draft_steps else None,
        "steps": total.steps,
        "probes": total.probes,
        "draft_ms_per_step": 1000 * total.seconds_draft / turns,
        "score_ms_per_step": 1000 * total.seconds_score / turns,
        "other_ms_per_step": 1000 * total.seconds_other / turns,
        "prefill_seconds": total.seconds_prefill,
        "untimed_share": max(0.0, 1 - spans / seconds),
        "acceptance_histogram": {str(k): total.histogram[k] for k in sorted(total.histogram)},
    }


def expectation(total: Stats, mine: Sequence[Measurement], plain: Sequence[Measurement]) -> dict[str, float]:
    """The speed-up that the row's own draft and scoring costs, M and alpha predict, and what decoding reached, prefill apart.

    predicted = plain seconds a token x tokens a step / (draft + scoring seconds a step); plain: our autoregressive on the same
    prompts. decode speed-up = the two rows' decode seconds a token, wall-clock less prefill. Probe steps are left out of the
    prediction, not of the measurement.
    """
    base, own = _decode_seconds_per_token(plain), _decode_seconds_per_token(mine)
    tokens_per_step = (total.tokens - total.probes) / total.steps if total.steps else 1.0
    step = (total.seconds_draft + total.seconds_score) / total.turns if total.turns else 0.0
    predicted = predicted_speedup(base, tokens_per_step, step)
    reached = base / own if own else math.nan
    return {
        "plain_ms_per_token": 1000 * base,
        "tokens_per_step": tokens_per_step,
        "predicted_speedup": predicted,
        "decode_speedup": reached,
        "measured_over_predicted": reached / predicted,
    }


def _decode_seconds_per_token(measurements: Sequence[Measurement]) -> float:
    pairs = [(m, m.stats) for m in measurements if m.stats is not None]
    seconds = [m.seconds - stats.seconds_prefill for m, stats in pairs]
    return pooled(seconds, [len(m.tokens) - stats.prefill_tokens for m, stats in pairs])


def print_report(document: Mapping[str, Any], console: Console) -> None:
    """The table and what surrounds it."""
    ceiling = document["ceiling"]
    mark = "SYNTHETIC MODEL (random weights): " if document["synthetic"] else ""
    console.print(
        f"{mark}{document['model']['name']}, {document['settings']['dtype']}, {document['provenance']['threads']} threads; "
        f"memory {ceiling['bandwidth_gb_per_second']:.1f} GB/s, so at most {ceiling['tokens_per_second']:.0f} tokens/s plain",
        highlight=False,
    )
    if document["surrogate"]:
        console.print(f"surrogate: {document['surrogate']}", highlight=False)
    for name, tuned in document["tuning"].items():
        console.print(f"{name}: {tuned['chosen']} (best of {tuned['candidates']}, {tuned['calls']} calls)", highlight=False)
    for name, reason in document["refused"].items():
        console.print(f"{name}: no row, {reason}", highlight=False)
    console.print(_table(document))
    console.print(LEGEND, highlight=False)


def _table(document: Mapping[str, Any]) -> Table:
    table = Table(title="SYNTHETIC" if document["synthetic"] else None, box=box.SIMPLE_HEAD, padding=(0, 1), pad_edge=False)
    table.add_column("row", no_wrap=True)
    titles = ["n", "tokens/s", "x plain", "x HF", "x HF exit", "M", "alpha", "ms a step", "predicted", "reached", "equal"]
    for title in [*titles, "repeats", "x plain, all"]:
        table.add_column(title, justify="right", overflow="fold")
    for row in document["rows"]:
        table.add_row(row["name"], *_cells(row["headline"], row["all_prompts"]))
    return table


def _cells(figures: Mapping[str, Any] | None, every: Mapping[str, Any]) -> list[str]:
    overall = _interval(every["speedup_autoregressive"], short=True)
    if figures is None:
        return ["0", *["-"] * 10, _number(every["repeated_share"]), overall]
    times = [figures.get(f"{part}_ms_per_step") for part in ("draft", "score", "other")]
    return [
        str(figures["prompts"]),
        f"{figures['tokens_per_second']:.1f}",
        _interval(figures["speedup_autoregressive"]),
        _interval(figures["speedup_hf_generate"]),
        _interval(figures["speedup_hf_early_exit"]),
        _number(figures.get("mean_acceptance_length")),
        _number(figures.get("acceptance_rate")),
        "+".join(f"{t:.1f}" for t in times if t is not None) or "-",
        _number(figures.get("predicted_speedup")),
        _number(figures.get("measured_over_predicted")),
        f"{figures['equal_to_hf_generate']}/{figures['prompts']}" if "equal_to_hf_generate" in figures else "-",
        _number(figures["repeated_share"]),
        overall,
    ]


def markdown(document: Mapping[str, Any]) -> str:
    """The table as documents have it."""
    titles = ["row", "prompts", "tokens/s", "x plain (95 %)", "x HF (95 %)", "x HF exit (95 %)", "M", "alpha", "ms a step"]
    titles += ["predicted", "reached", "equal", "repeats", "x plain, all prompts"]
    rows = [titles, ["---"] * len(titles)]
    rows += [[row["name"], *_cells(row["headline"], row["all_prompts"])] for row in document["rows"]]
    return "".join(f"| {' | '.join(row)} |\n" for row in rows)


def _interval(value: Mapping[str, float] | None, short: bool = False) -> str:
    if value is None:
        return "-"
    text = f"{value['value']:.2f}"
    exact = value["low"] == value["high"]  # a row beside itself, or a single prompt
    return text if short or exact else f"{text} ({value['low']:.2f}-{value['high']:.2f})"


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.2f}"
