"""Stored results: what a record holds, and that it is enough to measure its row again."""

import json
import random
from pathlib import Path
from typing import Any

import pytest

from skipstone.lab.bench import records
from skipstone.lab.bench.plan import read
from skipstone.lab.bench.records import baseline, compare, pooled, records_of, repeat_plan, rounded, select, speedup
from skipstone.lab.bench.run import run
from tests.helpers import families, support
from tests.helpers.commandline import run as command
from tests.helpers.results import CELL, lines, stats, written

PLAN = {
    "seed": 0,
    "dtype": "float32",
    "device": "cpu",
    "device_map": None,
    "engine": "auto",
    "quantize": "none",
    "ignore_eos": True,
    "num_prompts": 3,
    "tasks": [{"task": "sums", "max_new_tokens": None}],
    "methods": [{"method": name} for name in ("hf-generate", "autoregressive", "layerskip")],
}


def by_hand(path: Path, found: list[dict[str, Any]] | None = None) -> list[records.Record]:
    """The records of the run of tests/helpers/results.py."""
    written(path, found or lines())
    first, *others = path.read_text().splitlines(keepends=True)
    head = json.loads(first)
    head["plan"], head["provenance"]["time"] = PLAN, "now"
    path.write_text(json.dumps(head) + "\n" + "".join(others))
    return records_of(path)


def test_a_record_holds_the_figures_and_every_prompt(tmp_path: Path) -> None:
    looping = {"kind": "looping", **CELL, "index": 3, "digest": "d3", "repeated_share": 0.9}
    found = by_hand(tmp_path / "a.jsonl", [*lines(), looping])
    assert [one["label"] for one in found] == ["hf-generate", "autoregressive", "layerskip"]
    own, plain = found[2], found[1]
    expected = {
        "weights": "w",
        "bandwidth": 10.0,
        "places": [10, 11],
        "left_out": 2,
        "tokens": [101] * 2,
        "seconds": [0.55] * 2,
        "asked": {"num_prompts": 3, "task": "sums"},
        "spec": {"method": "layerskip", "exit_layer": 2},
        "plan": {key: PLAN[key] for key in records.PLAN if PLAN.get(key) is not None},
    }
    assert {key: own[key] for key in expected} == expected
    figures = {
        "mean_acceptance_length": 2.0,
        "acceptance_rate": 0.5,
        "draft_step_cost": 0.15,
        "scoring_cost": 0.5,
        "prompts": 2,
    }
    assert {key: own["figures"][key] for key in figures} == pytest.approx(figures)
    assert own["figures"]["speedups"]["autoregressive"]["value"] == pytest.approx(2)
    assert "acceptance_histogram" not in own["figures"]
    assert baseline(own, found) is plain
    records.write(tmp_path / "b.jsonl", found)
    assert records.read(tmp_path / "b.jsonl") == found
    every = records_of(tmp_path / "a.jsonl", every_prompt=True)[2]
    assert (every["places"], every["left_out"]) == ([10, 11, 12], 1)


def test_the_speed_up_follows_from_the_seconds_of_the_prompts_that_do_not_loop(tmp_path: Path) -> None:
    """Plain decoding takes 1.1 s for every prompt, layerskip .55, .275 and, on the one where it loops, .1 s."""
    changed = lines()
    for line, seconds in zip((line for line in changed if "rows" in line), (0.55, 0.275, 0.1), strict=True):
        line["rows"]["layerskip"]["seconds"] = seconds
        line["category"] = "odd" if line["index"] == 1 else "even"
    found = by_hand(tmp_path / "a.jsonl", changed)
    own, plain = found[2], found[1]
    result = speedup(own, plain)
    assert result.value == pytest.approx(2.2 / 0.825)
    assert (result.low, result.high) == pytest.approx((2, 4))
    assert [speedup(own, plain, name).value for name in ("even", "odd")] == pytest.approx([2, 4])
    assert rounded(vars(result)) == own["figures"]["speedups"]["autoregressive"]


def test_intervals_cover_all_runs_of_a_row(tmp_path: Path) -> None:
    """layerskip is 2 x as fast as plain decoding in the first run, 1.6 to 2.5 x in the second. The third is another model's."""
    runs = [by_hand(tmp_path / "a.jsonl")]
    changed = lines()
    for line, seconds in zip((line for line in changed if "rows" in line), (0.44, 0.6875, 0.1), strict=True):
        line["rows"]["layerskip"]["seconds"] = seconds
    runs.append(by_hand(tmp_path / "b.jsonl", changed))
    changed[0]["weights"] = "others"
    runs.append(by_hand(tmp_path / "c.jsonl", changed))
    runs[0][2]["files"], runs[1][2]["files"] = {"a": "1", "b": "2"}, {"b": "2", "a": "1"}
    found = pooled([one for rows in runs for one in rows])
    own, plain = found[2], found[1]
    assert [len(one["runs"]) for one in found] == [1, 1, 1, 0, 0, 0]
    assert own["figures"]["speedups"]["autoregressive"] == pytest.approx({"value": 2, "low": 1.6, "high": 2.5})
    assert vars(speedup(own, plain)) == pytest.approx({"value": 2, "low": 1.6, "high": 2.5})
    assert own["seconds"] == [0.55] * 2, "the first run's"


def test_what_exits_know_is_in_the_row_of_plain_decoding(tmp_path: Path) -> None:
    known = {"prompts": 3, "tokens": 9, "perplexity": [30.25, 2.00004], "agreement": [0.5, 1.0]}
    found = by_hand(tmp_path / "a.jsonl", [*lines(), {"kind": "exits", **CELL, **known}])
    assert [one["exits"] for one in found] == [None, {**known, "perplexity": [30.25, 2.0]}, None]


def test_a_first_request_on_a_busy_machine_has_no_time(tmp_path: Path) -> None:
    model, *others = lines()
    first = {"kind": "first", "model": "m", "tokens": 16, "seconds": 0.25, "setup": {}}
    requests = [{**first, "method": "autoregressive", "waited_share": 0.01}]
    requests.append({**first, "method": "layerskip", "waited_share": 0.5})
    found = by_hand(tmp_path / "a.jsonl", [model, *requests, *others])
    assert [one["figures"].get("first_request_seconds") for one in found] == [None, 0.25, None]


def test_measured_values_have_four_digits() -> None:
    value = {"a": 0.000123456, "b": [12345.678, 7], "c": None, "d": {"e": True, "f": "x"}}
    assert rounded(value) == {"a": 0.0001235, "b": [12350.0, 7], "d": {"e": True, "f": "x"}}


def test_a_run_without_a_hash_of_the_weights_gives_no_records(tmp_path: Path) -> None:
    found = lines()
    del found[0]["weights"]
    with pytest.raises(ValueError, match="measure it again"):
        by_hand(tmp_path / "a.jsonl", found)


def test_other_files_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text('{"label": "x"}\n{"model": "y"}\n')
    with pytest.raises(ValueError, match="line 2 is no record of a result: it has no 'weights'"):
        records.read(path)
    for text in ("", '{"label": "x"}\n'):
        path.write_text(text)
        with pytest.raises(ValueError, match="holds no record of a result"):
            records.read(path)


def test_a_row_is_named_by_task_label_and_temperature(tmp_path: Path) -> None:
    found = by_hand(tmp_path / "a.jsonl")
    several = [*found, {**found[2], "temperature": 1.0}, {**found[2], "model": "n"}]
    assert select(several, "sums", "layerskip", 0.0, "m") is found[2]
    assert select(several, None, None, 1.0, None) is several[3]
    with pytest.raises(ValueError, match=r"several records fit.*n, sums, T = 0, layerskip"):
        select(several, "sums", "layerskip", 0.0, None)
    with pytest.raises(ValueError, match=r"no record fits.*hf-generate"):
        select(found, None, "swift", 0.0, None)
    with pytest.raises(ValueError, match="which every repetition measures"):
        select(found, None, "autoregressive", 0.0, None)
    with pytest.raises(ValueError, match="no record of plain decoding"):
        baseline({**found[2], "weights": "others"}, found)


def test_other_prompts_are_no_repetition_and_other_weights_are_shown(tmp_path: Path) -> None:
    found = by_hand(tmp_path / "a.jsonl")
    stored = found[2], found[1]
    with pytest.raises(ValueError, match="the prompts are not those of the record"):
        compare(stored, ({**found[2], "prompts": "x"}, found[1]))
    stored[0]["runs"].append({"bandwidth": 15.0})
    rows = compare(stored, ({**found[2], "weights": "x", "bandwidth": 20.0}, found[1])).rows
    assert ("memory, GB/s", "10 to 15", "20") in rows
    cells = {name: now for name, _, now in rows}
    assert (cells["x plain"], cells["M"], cells["texts"], cells["weights"]) == ("2.00", "2.00", "the same", "others")


def test_files_of_a_method_have_hashes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "runs").mkdir()
    (tmp_path / "runs" / "list.json").write_text("[1]")
    spec = {"method": "layerskip", "draft_vocabulary": "runs/list.json", "python": "runs/list.json", "exit_layer": 2}
    monkeypatch.setitem(PLAN, "methods", [{"method": "hf-generate"}, {"method": "autoregressive"}, spec])
    before = by_hand(tmp_path / "a.jsonl")[2]["files"]
    assert [*before] == ["runs/list.json"]
    (tmp_path / "runs" / "list.json").write_text("[2]")
    assert by_hand(tmp_path / "a.jsonl")[2]["files"] != before


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny model, and nine prompts of two categories, one of them with two turns."""
    place = tmp_path_factory.mktemp("records")
    model = families.build("llama", max_position_embeddings=128)
    model.save_pretrained(place / "model")
    support.tokenizer().save_pretrained(place / "model")
    dice = random.Random(0)
    words = ["stop", "abc", " the", "ab", "bc", "xst", *"defghijklm"]
    asked = [{"prompt": "".join(dice.choices(words, k=12)), "category": "ab"[place % 2]} for place in range(9)]
    asked[4] = {"turns": ["abc the stop", "ab bc"], "category": "a"}
    (place / "mine.jsonl").write_text("".join(json.dumps(record) + "\n" for record in asked))
    return place


def measured(folder: Path, **more: Any) -> Path:
    usual: dict[str, Any] = {
        "models": [str(folder / "model")],
        "tasks": [str(folder / "mine.jsonl")],
        "num_prompts": 4,
        "seed": 3,
    }
    usual |= {"methods": ["early_exit exit_layer=1", "autoregressive", "layerskip exit_layer=1,2"], "tune_prompts": 2}
    plan = read(None, usual | {"tune_tokens": 8, "max_new_tokens": 12, "ignore_eos": True, "dtype": "float32"} | more)
    name = f"{more.get('temperature', 0)}-{more.get('skip_looping', False)}.jsonl"
    return run(plan, folder / name, ["skipstone"], lambda text: None, fresh=True)


@pytest.mark.parametrize("more", [{"skip_looping": True}, {"temperature": 1.0}], ids=["greedy", "sampled"])
def test_a_repetition_asks_the_same_prompts_and_writes_the_same_texts(folder: Path, more: dict[str, Any]) -> None:
    """Also where choices and loops took prompts away, at a temperature, with turns, and where a lossy row comes first."""
    stored = records_of(measured(folder, **more))
    own = select(stored, None, "layerskip", more.get("temperature", 0.0), None)
    plan = repeat_plan(own, baseline(own, stored), None, None, None)
    assert [dict(spec) for spec in plan.methods] == [{"method": "autoregressive"}, own["spec"]]
    assert own["spec"]["exit_layer"] in (1, 2), "the setting that the run chose"
    again = records_of(run(plan, folder / "again.jsonl", ["skipstone"], lambda text: None, fresh=True), every_prompt=True)
    for key in ("weights", "prompts", "places", "texts", "tokens", "settings", "plan", "categories"):
        assert [one[key] for one in again] == [one[key] for one in stored if one["label"] != "early_exit"], key


def test_the_command_stores_a_run_and_repeats_a_row(folder: Path) -> None:
    made, out = measured(folder), folder / "records.jsonl"
    assert command("bench", "record", made, "--out", out).exit_code == 0
    stored = records.read(out)
    assert stored == records_of(made)
    again = ("bench", "repeat", out, "--method", "layerskip", "--out", folder / "command.jsonl")
    own = select(stored, None, "layerskip", 0.0, None)
    for factor, inside in ((1e3, False), (1e-3, False)):  # no machine is a thousand times faster or slower
        other = {**own, "seconds": [factor * seconds for seconds in own["seconds"]]}
        records.write(out, [stored[1], other])
        result = command(*again)
        assert (result.exit_code == 0, "OUTSIDE the stored interval" in result.stdout) == (inside, not inside)
    factors = 1e-3, 1e-3, 1e3, 1e3  # one resample in sixteen takes the first two alone, another the last two
    wide = {**own, "seconds": [factor * seconds for factor, seconds in zip(factors, own["seconds"], strict=True)]}
    records.write(out, [stored[1], wide])
    result = command(*again)
    assert (result.exit_code, "inside the stored interval" in result.stdout) == (0, True)


def test_stats_are_those_of_the_prompts_that_do_not_loop(tmp_path: Path) -> None:
    """A looping prompt changes no figure, even if all of its drafts are accepted."""
    changed = lines()
    looping = next(line for line in changed if line.get("index") == 2)
    looping["rows"]["layerskip"]["stats"] = stats(101, 20, 80, 80, prefill=0.1, draft=0.1, score=0.1, other=0.01)
    assert by_hand(tmp_path / "a.jsonl", changed)[2]["figures"]["acceptance_rate"] == 0.5
