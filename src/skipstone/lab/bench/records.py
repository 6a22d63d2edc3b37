"""Stored results: one record for each row of a run, small enough to be kept with the source.

A row is a method on a task at a temperature on a model. A file has one record on each line. A record says all that is needed
to measure its row again.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from skipstone.assets import BUNDLED
from skipstone.lab.bench import run_file
from skipstone.lab.bench.plan import BASELINE, BenchPlan, PlannedTask, TaskOptions, label
from skipstone.lab.bench.prompts import is_calm
from skipstone.lab.bench.report.aggregate import MeasurementGroup, groups
from skipstone.lab.bench.report.tables import COLUMNS, EXIT_FIGURES, NONE, Table, cells_of, fill
from skipstone.lab.bench.run_file import Line
from skipstone.lab.timing.statistics import IntervalEstimate, PooledRate, rate
from skipstone.utils.files import digest, json_line, read_lines, write_whole
from skipstone.utils.processor_watch import was_busy

Record = dict[str, Any]
DIGITS = 4  # significant digits of measured values
ENGINE = ("dtype", "device", "engine", "instructions", "quantize")  # of a model's line
PLAN = ("dtype", "device", "device_map", "engine", "quantize", "seed", "ignore_eos")  # of the plan
CHOOSES_PROMPTS = ("num_prompts", "skip_looping", "places")
KEYS = (
    *("model", "weights", *ENGINE, "task", "temperature", "asked", "label", "method", "spec", "settings", "lossless"),
    *("plan", "cpu", "threads", "packages", "commits", "time"),
    *("prompts", "texts", "places", "categories", "looping", "busy", "tokens", "seconds", "first_seconds", "figures", "exits"),
)
"""Keys of a record.

asked: the task as the plan names it. spec: the method as the plan names it. plan: PLAN as the plan has it. prompts, texts:
hashes. places, categories, tokens, seconds: of every prompt. looping: places of the prompts that `figures` leaves out because a
text repeats itself. busy: prompts that were measured while other programs used the processor. first_seconds: the model's first
request with this method, None if the machine was busy. exits: in the row of plain decoding, figure -> its value at every exit,
if they were measured.
"""


def records_of(path: Path) -> list[Record]:
    """The records of a run's file. ValueError for another file, and for a model whose weights no hash identifies."""
    lines = run_file.read(path)
    run_file.check(path, lines)
    if not (measured := groups(lines)):
        raise ValueError(f"{path} holds no measured prompt yet")
    begun = [line for line in lines if line["kind"] in ("run", "resumed")]
    return [_record(begun, group, label) for group in measured for label in group.labels]


def _record(begun: Sequence[Line], group: MeasurementGroup, name: str) -> Record:
    plan, provenance = begun[0]["plan"], begun[0]["provenance"]
    if "weights" not in group.about:
        raise ValueError(f"{group.model}: this run was made before runs had a hash of the weights; measure it again")
    lines = [line for line in group.lines if name in line["rows"]]
    rows = [line["rows"][name] for line in lines]
    figures = group.figures(name, [line for line in lines if is_calm(line)] or lines)
    assert figures is not None
    categories = [line.get("category") for line in lines]
    task = {key: value for key, value in plan["tasks"][group.number].items() if value is not None}
    commits = [one["provenance"]["git"] for one in begun]
    return {
        "model": group.model,
        "weights": group.about["weights"],
        **{key: group.about.get(key) for key in ENGINE},
        "task": group.task,
        "temperature": group.temperature,
        "asked": {key: plan[key] for key in TaskOptions.model_fields if plan.get(key) is not None} | task,
        "label": name,
        "method": group.about["methods"][name]["method"],
        "spec": _spec(plan, group, name),
        "settings": {key: value for key, value in group.settings(name).items() if key != "python"},
        "lossless": group.about["methods"][name]["lossless"],
        "plan": {key: plan[key] for key in PLAN if key in plan},
        **{key: provenance[key] for key in ("cpu", "threads", "packages", "time")},
        "commits": [*dict.fromkeys(f"{one['sha'][:12]}{' changed' if one['dirty'] else ''}" for one in commits if one)],
        "prompts": digest([line["digest"] for line in lines]),
        "texts": digest([row["digests"] for row in rows]),
        "places": [line["place"] for line in lines],
        "categories": categories if len({*categories}) > 1 else None,
        "looping": [line["place"] for line in lines if not is_calm(line)],
        "busy": sum(was_busy(line.get("waited_share")) for line in lines),
        "tokens": [row["tokens"] for row in rows],
        "seconds": rounded([row["seconds"] for row in rows]),
        "first_seconds": _first_seconds(group.first.get(name)),
        "figures": rounded(figures),
        "exits": _exits(group) if name == group.label_of(BASELINE) else None,
    }


def _spec(plan: Line, group: MeasurementGroup, name: str) -> dict[str, Any]:
    """The method as the plan names it, with the settings that a measurement chose."""
    spec = next(dict(one) for one in plan["methods"] if label(one) == name)
    if name in group.tuned:
        spec |= group.tuned[name]["chosen"]
    return spec


def _exits(group: MeasurementGroup) -> dict[str, Any] | None:
    if group.exits is None:
        return None
    return rounded({name: group.exits[name] for name in ("prompts", "tokens", *EXIT_FIGURES) if name in group.exits})


def _first_seconds(first: Line | None) -> float | None:
    """Seconds of a model's first request; None if there is none, or if other programs used the processor."""
    return None if first is None or was_busy(first.get("waited_share")) else rounded(first["seconds"])


def rounded(value: Any) -> Any:
    """A JSON value whose numbers have DIGITS significant digits. Entries of mappings that are None are left out."""
    if isinstance(value, Mapping):
        return {key: rounded(entry) for key, entry in value.items() if entry is not None}
    if isinstance(value, (list, tuple)):
        return [rounded(entry) for entry in value]
    return float(f"{value:.{DIGITS}g}") if isinstance(value, float) else value


def write(path: Path, records: Sequence[Record]) -> None:
    """Write a file of records."""
    write_whole(path, "".join(map(json_line, records)))


def read(path: Path) -> list[Record]:
    """The records of a file. ValueError for another file."""
    records = read_lines(path)
    for number, record in enumerate(records, 1):
        if missing := [key for key in KEYS if not isinstance(record, dict) or key not in record]:
            raise ValueError(f"{path}, line {number} is no record of a result: it has no {missing[0]!r}")
    return records


def select(records: Sequence[Record], task: str | None, name: str | None, temperature: float | None) -> Record:
    """The one record of a task, label and temperature. ValueError if there is none or several, or if it has no speed-up."""
    wanted = {"task": task, "label": name, "temperature": temperature}
    given = {key: value for key, value in wanted.items() if value is not None}
    found = [one for one in records if given.items() <= one.items()]
    if len(found) == 1 and found[0]["method"] != BASELINE:
        return found[0]
    if len(found) == 1:
        raise ValueError(f"{found[0]['label']} is plain decoding, which every repetition measures: name another method")
    listed = "; ".join(f"{one['task']}, T = {one['temperature']:g}, {one['label']}" for one in found or records)
    fault = "several records fit" if found else "no record fits"
    raise ValueError(f"{fault}: name --task, --method and --temperature. The records are: {listed}")


def cell(record: Record) -> tuple[Any, ...]:
    """All that the rows of one comparison share."""
    return tuple(str(record[key]) for key in ("model", "weights", *ENGINE, "task", "temperature", "asked", "places"))


def baseline(record: Record, records: Sequence[Record]) -> Record:
    """The row of plain decoding in a record's comparison. ValueError if there is none."""
    same = (one for one in records if one["method"] == BASELINE and cell(one) == cell(record))
    if (found := next(same, None)) is None:
        raise ValueError(f"{record['task']}, {record['label']}: no record of plain decoding on the same prompts")
    return found


def speedup(record: Record, plain: Record, category: str | None = None) -> IntervalEstimate:
    """Speed-up over plain decoding on the prompts that do not loop, with its interval. category: on the prompts of one."""
    where = [place for place in range(len(record["places"])) if category is None or record["categories"][place] == category]
    counted = [place for place in where if record["places"][place] not in record["looping"]] or where

    def speed(one: Record) -> PooledRate:
        return rate(*(np.take(one[name], counted) for name in ("tokens", "seconds")), seed=one["plan"]["seed"])

    return (speed(record) / speed(plain)).estimate()


def repeat_plan(record: Record, plain: Record, model: str | None, data_dir: Path | None, threads: int | None) -> BenchPlan:
    """The plan that measures a row and plain decoding again, on the same prompts.

    model: a folder with the same weights, if it is not where the record says. threads: None for those of the record.
    """
    asked = {key: value for key, value in record["asked"].items() if key not in CHOOSES_PROMPTS}
    name = model or record["model"]
    return BenchPlan(
        models=() if name == BUNDLED else (name,),
        methods=(plain["spec"], record["spec"]),
        tasks=(PlannedTask(**asked, places=tuple(record["places"])),),
        threads=threads or record["threads"],
        data_dir=data_dir,
        **record["plan"],
    )


def compare(stored: tuple[Record, Record], again: tuple[Record, Record]) -> Table:
    """A row next to the same measured again. Both are (row, plain decoding).

    ValueError if the weights or the prompts are others.
    """
    for key, what in (("weights", "the model's weights"), ("prompts", "the prompts")):
        if stored[0][key] != again[0][key]:
            raise ValueError(f"{what} are not those of the record ({stored[0][key]} there, {again[0][key]} here)")
    own = [cells_of("", {}, one["figures"]) for one, _ in (stored, again)]
    rows = [(name, *(fill(COLUMNS[name], one) for one in own)) for name in ("x plain", "tokens/s", "M", "alpha", "n")]
    rows.append(("plain tokens/s", *(f"{one['figures']['tokens_per_second']:.1f}" for _, one in (stored, again))))
    rows.append(("texts", NONE, "the same" if stored[0]["texts"] == again[0]["texts"] else "others"))
    machine = "{cpu}, {instructions}, {threads} threads"
    rows.append(("processor", *(machine.format_map(one) for one, _ in (stored, again))))
    return Table(f"{stored[0]['model']}, {stored[0]['task']}: {stored[0]['label']}", ("", "stored", "now"), rows)
