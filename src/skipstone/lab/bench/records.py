"""Stored results: one record for each row of a run, small enough to be kept with the source.

A row is a method on a task at a temperature on a model. A record says what is needed to measure its row again, but for the
files that the row reads: of these it has hashes. The first line of a file holds what all its records share, every further line
the rest of a record.
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from copy import deepcopy
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np

from skipstone.assets import BUNDLED
from skipstone.lab.bench import run_file
from skipstone.lab.bench.plan import BASELINE, BenchPlan, PlannedTask, TaskOptions, label
from skipstone.lab.bench.report.aggregate import MeasurementGroup, groups
from skipstone.lab.bench.report.tables import COLUMNS, EXIT_FIGURES, NONE, Table, cells_of, fill
from skipstone.lab.bench.run_file import CELL, Line
from skipstone.lab.timing.statistics import IntervalEstimate, PooledRate, rate
from skipstone.methods.auto.auto import Auto
from skipstone.utils.files import digest, file_digest, json_line, read_lines, write_whole
from skipstone.utils.processor_watch import was_busy

Record = dict[str, Any]
DIGITS = 4  # significant digits of measured values
ENGINE = ("dtype", "device", "engine", "instructions", "quantize")  # of a model's line
PLAN = ("dtype", "device", "device_map", "engine", "quantize", "copies", "stream", "seed", "ignore_eos")  # of the plan
STORED_PACKAGES = ("torch", "transformers")  # their versions are in a record
UNSTORED_FIGURES = (
    "acceptance_histogram",
    "untimed_share",
    "drafts_per_step",
    "plain_ms_per_token",
    "tokens_per_step",
    "probes",
)
"""Figures of a run that records leave out, because no table of stored results shows them."""
CHOOSES_PROMPTS = ("num_prompts", "skip_looping", "places")
ROW = ("model", "weights", *ENGINE, "task", "temperature", "label", "method", "settings", "files", "plan", "cpu", "threads")
"""What all runs of a row share, next to the task's settings."""
KEYS = (
    *("model", "weights", *ENGINE, "task", "temperature", "asked", "label", "method", "spec", "settings", "files", "lossless"),
    *("plan", "cpu", "threads", "bandwidth", "packages", "commits", "time"),
    *("prompts", "texts", "places", "categories", "left_out", "busy", "tokens", "seconds", "figures", "exits", "runs"),
)
"""Keys of a record.

weights: a hash of samples of the parameters (`models/fingerprint.py`). asked, spec: the task and the method as the plan names
them. files: path -> hash of what the method's settings name. plan: PLAN as the plan has it. bandwidth: GB/s of the memory when
the run began. prompts, texts: hashes. places, categories, tokens, seconds: of every prompt that counts. left_out: number of
prompts that were tried and do not count, because a text repeats itself. busy: prompts that were measured while other programs
used the processor. exits: in the row of plain decoding, figure -> its value at every exit, if they were measured. runs: later
runs of the row, each with its speed-up over plain decoding and the interval over its prompts. A machine's memory is not equally
fast at all times, and speed-ups follow it, so the intervals of the speed-ups in figures reach from the lowest to the highest
bound of all runs.
"""


def records_of(path: Path, every_prompt: bool = False) -> list[Record]:
    """The records of a run's file. every_prompt: prompts with repetitive texts count, too.

    ValueError for another file, and for a model without a hash of its weights.
    """
    lines = run_file.read(path)
    run_file.check(path, lines)
    if not (measured := groups(lines)):
        raise ValueError(f"{path} holds no measured prompt yet")
    begun = [line for line in lines if line["kind"] in ("run", "resumed")]
    looping = Counter(tuple(line[name] for name in CELL) for line in lines if line["kind"] == "looping")
    found = []
    for group in measured:
        skipped = looping[group.model, group.number, group.task, group.temperature, group.question]
        found += [_record(begun, group, name, skipped, every_prompt) for name in group.labels]
    return found


def pooled(records: Sequence[Record]) -> list[Record]:
    """The first record of each row. Later ones widen its intervals and stay in it as runs."""
    rows: dict[str, Record] = {}
    for one in records:
        asked = {key: value for key, value in one["asked"].items() if key not in CHOOSES_PROMPTS}
        first = rows.setdefault(digest([asked, *(one[key] for key in ROW)]), one)
        if first is not one:
            run = {key: one[key] for key in ("time", "commits", "busy", "bandwidth")} | {"prompts": len(one["places"])}
            own, other = first["figures"]["speedups"], one["figures"]["speedups"]
            first["runs"].append({**run, "speedup": other.get(BASELINE)})
            own |= {reference: _covering(own[reference], other[reference]) for reference in own if reference in other}
    return [*rows.values()]


def _covering(first: dict[str, float], *later: dict[str, float]) -> dict[str, float]:
    """A speed-up with an interval that covers those of later runs, too."""
    every = first, *later
    return first | {"low": min(one["low"] for one in every), "high": max(one["high"] for one in every)}


def _record(begun: Sequence[Line], group: MeasurementGroup, name: str, skipped: int, every_prompt: bool) -> Record:
    plan, provenance = begun[0]["plan"], begun[0]["provenance"]
    if "weights" not in group.about:
        raise ValueError(f"{group.model}: this run was made before runs had a hash of the weights; measure it again")
    asked = [line for line in group.lines if name in line["rows"]]
    lines = asked if every_prompt else group.calm(asked) or asked
    rows = [line["rows"][name] for line in lines]
    figures = group.figures(name, lines)
    assert figures is not None
    if was_busy(group.first.get(name, {}).get("waited_share")):
        figures["first_request_seconds"] = None
    categories = [line.get("category") for line in lines]
    task = {key: value for key, value in plan["tasks"][group.number].items() if value is not None}
    commits = [one["provenance"]["git"] for one in begun]
    spec = _spec(plan, group, name)
    return {
        "model": group.model,
        "weights": group.about["weights"],
        **{key: group.about.get(key) for key in ENGINE},
        "task": group.task,
        "temperature": group.temperature,
        "asked": {key: plan[key] for key in TaskOptions.model_fields if plan.get(key) is not None} | task,
        "label": name,
        "method": group.about["methods"][name]["method"],
        "spec": spec,
        "settings": {key: value for key, value in group.settings(name).items() if key != "python"},
        "files": {value: hash_of(Path(value)) for key, value in spec.items() if key != "python" and _is_path(value)},
        "lossless": group.about["methods"][name]["lossless"],
        "plan": {key: plan[key] for key in PLAN if plan.get(key) is not None},
        **{key: provenance[key] for key in ("cpu", "threads", "time")},
        "packages": {package: provenance["packages"].get(package) for package in STORED_PACKAGES},
        "bandwidth": rounded(group.about["ceiling"]["bandwidth_gb_per_second"]),
        "commits": [*dict.fromkeys(f"{one['sha'][:12]}{' changed' if one['dirty'] else ''}" for one in commits if one)],
        "prompts": digest([line.get("asked", line["digest"]) for line in lines]),
        "texts": digest([row["digests"] for row in rows]),
        "places": [line["place"] for line in lines],
        "categories": categories if len({*categories}) > 1 else None,
        "left_out": skipped + len(asked) - len(lines),
        "busy": sum(was_busy(line.get("waited_share")) for line in lines),
        "tokens": [row["tokens"] for row in rows],
        "seconds": rounded([row["seconds"] for row in rows]),
        "figures": rounded({key: value for key, value in figures.items() if key not in UNSTORED_FIGURES}),
        "exits": _exits(group) if name == group.label_of(BASELINE) else None,
        "runs": [],
    }


def _is_path(value: Any) -> bool:
    return isinstance(value, str) and "/" in value and Path(value).exists()


def hash_of(path: Path) -> str:
    """A hash of a file, or of all files in a folder."""
    if path.is_file():
        return file_digest(path)[:16]
    return digest(sorted((str(one.relative_to(path)), file_digest(one)) for one in path.rglob("*") if one.is_file()))


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


def rounded(value: Any) -> Any:
    """A JSON value with DIGITS significant digits in its numbers. Entries of mappings that are None are left out."""
    if isinstance(value, Mapping):
        return {key: rounded(entry) for key, entry in value.items() if entry is not None}
    if isinstance(value, (list, tuple)):
        return [rounded(entry) for entry in value]
    return float(f"{value:.{DIGITS}g}") if isinstance(value, float) else value


def write(path: Path, records: Sequence[Record]) -> None:
    """Write a file of records, at least one."""
    shared = {key: value for key, value in records[0].items() if all(one[key] == value for one in records)}
    lines = [shared, *({key: value for key, value in one.items() if key not in shared} for one in records)]
    write_whole(path, "".join(json_line(one, dense=True) for one in lines))


def read(path: Path) -> list[Record]:
    """The records of a file. ValueError for another file."""
    lines = [line if isinstance(line, dict) else {} for line in read_lines(path)]
    records = [deepcopy(lines[0]) | line for line in lines[1:]]
    if not records:
        raise ValueError(f"{path} holds no record of a result")
    for number, record in enumerate(records, 2):
        if missing := [key for key in KEYS if key not in record]:
            raise ValueError(f"{path}, line {number} is no record of a result: it has no {missing[0]!r}")
    return records


def select(records: Sequence[Record], task: str | None, name: str | None, temperature: float, model: str | None) -> Record:
    """The one record of a task, label, temperature and model, as far as they are given.

    ValueError if there is none or several, or if it has no speed-up.
    """
    wanted = {"task": task, "label": name, "temperature": temperature, "model": model}
    given = {key: value for key, value in wanted.items() if value is not None}
    found = [one for one in records if given.items() <= one.items()]
    if len(found) == 1 and found[0]["method"] != BASELINE:
        return found[0]
    if len(found) == 1:
        raise ValueError(f"{found[0]['label']} is plain decoding, which every repetition measures: name another method")
    template = "{model}, {task}, T = {temperature:g}, {label}"
    listed = "; ".join(template.format_map(one) for one in found or records)
    fault = "several records fit" if found else "no record fits"
    raise ValueError(f"{fault}: name --task, --method, --temperature and --model. The records are: {listed}")


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
    """Speed-up over plain decoding, with the interval that covers all runs. category: on the first run's prompts of one."""
    chosen = [place for place, kind in enumerate(record["categories"] or record["places"]) if category in (None, kind)]

    def speed(one: Record) -> PooledRate:
        return rate(*(np.take(one[name], chosen) for name in ("tokens", "seconds")), seed=one["plan"]["seed"])

    later = [] if category else [one["speedup"] for one in record["runs"] if one["speedup"]]
    return IntervalEstimate(**_covering(asdict((speed(record) / speed(plain)).estimate()), *later))


def repeat_plan(record: Record, plain: Record, folder: str | None, data_dir: Path | None, threads: int | None) -> BenchPlan:
    """The plan that measures a row and plain decoding again, on the same prompts.

    folder: the model's folder or hub id, if it is not where the record says. threads: None for those of the record.
    """
    asked = {key: value for key, value in record["asked"].items() if key not in CHOOSES_PROMPTS}
    name = folder or record["model"]
    no_profile = {"use_profile": False} if record["method"] == Auto.name else {}  # stored runs read no saved profile
    return BenchPlan(
        models=() if name == BUNDLED else (name,),
        methods=(plain["spec"], record["spec"] | no_profile),
        tasks=(PlannedTask(**asked, places=tuple(record["places"])),),
        threads=threads or record["threads"],
        data_dir=data_dir,
        **record["plan"] | ({} if record["method"] == Auto.name else {"copies": ()}),
    )


def compare(stored: tuple[Record, Record], again: tuple[Record, Record]) -> Table:
    """A row next to the same measured again. Both are (row, plain decoding). ValueError if the prompts are others."""
    if stored[0]["prompts"] != again[0]["prompts"]:
        raise ValueError("the prompts are not those of the record: the files of the data set differ")
    own = [cells_of("", {}, one["figures"]) for one, _ in (stored, again)]
    rows = [(name, *(fill(COLUMNS[name], one) for one in own)) for name in ("x plain", "tokens/s", "M", "alpha", "n")]
    rows.append(("plain tokens/s", *(f"{one['figures']['tokens_per_second']:.1f}" for _, one in (stored, again))))
    speeds = [one["bandwidth"] for one in (stored[0], *stored[0]["runs"])]
    rows.append(("memory, GB/s", f"{min(speeds):.0f} to {max(speeds):.0f}", f"{again[0]['bandwidth']:.0f}"))
    for key, name in (("weights", "weights"), ("files", "files of the method"), ("texts", "texts")):
        rows.append((name, NONE, "the same" if stored[0][key] == again[0][key] else "others"))
    machine = "{cpu}, {threads} threads; {engine} {instructions}, {dtype}, {quantize}"
    rows.append(("processor and engine", *(machine.format_map(one) for one, _ in (stored, again))))
    return Table(f"{stored[0]['model']}, {stored[0]['task']}: {stored[0]['label']}", ("", "stored", "now"), rows)
