"""How the figures of skipstone-nano are counted: every exit's quality, exact match, what parses, which prompts."""

import importlib.util
import json
import math
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F

import skipstone
from skipstone.decoding.stats import Stats
from skipstone.train.data.documents import Document, collect, split
from skipstone.train.layerskip.arguments import read
from skipstone.train.layerskip.run import run
from tests.helpers.training import recipe

pytestmark = pytest.mark.slow

FILE = Path(__file__).parents[2] / "recipes" / "measure" / "nano_results.py"


@pytest.fixture(scope="module")
def results() -> Any:
    spec = importlib.util.spec_from_file_location("nano_results", FILE)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    before = [*sys.path]
    sys.modules["nano_results"] = module  # its dataclasses look themselves up
    spec.loader.exec_module(module)
    sys.path[:] = before
    return module


GOOD = {
    "a line being written is left out": "    return x\n    foo(ba",
    "a string left open": '    y = 1\n    """All about\nnothing',
    "nested blocks without a body": "    for y in x:\n        if y:\n            pass\n    while x:\n        if x:\n",
    "a decorator": "    return x\n\n\n@cache\n",
}
BAD = {
    "a mistake in the middle": "    y = = 1\n    z = 2\n    w = 3\n    v = 4\n    u = 5\n    t = 6\n",
    "an unindent that matches nothing": "    if x:\n        y = 1\n      z = 2\n    return y\n",
    "nothing complete": '    """All about',
    "nothing new at all": "",
}


def test_python_parses_up_to_the_last_full_statement(results: Any) -> None:
    parsed = {name for name, text in (GOOD | BAD).items() if results.nano_python.parses("def f(x):", "\n" + text)}
    assert parsed == GOOD.keys()


def test_beginnings_of_definitions_end_before_their_line_break(results: Any) -> None:
    """...which the rest begins with; neither is indented, and the two are the definition."""
    body = "".join(f"        y{n} = {n}\n" for n in range(9))
    text = "import os\n\x0c\nclass A:\n    def f(self):\n" + body + "\n    def short(self):\n        pass\n"
    found = dict(results.nano_python.beginnings([Document(text, "code", "a.py")], 2, seed=0))
    outer, inner = (
        "class A:\n    def f(self):\n        y0 = 0\n        y1 = 1",
        "def f(self):\n    y0 = 0\n    y1 = 1\n    y2 = 2",
    )
    assert found.keys() == {outer, inner}
    assert outer + found[outer] == text[text.index("class A") :]
    assert found[inner] == "".join(f"\n    y{n} = {n}" for n in range(3, 9)) + "\n"
    assert all(results.nano_python.parses(*both) for both in found.items())
    with pytest.raises(ValueError, match="2 functions and classes long enough, 3 are needed"):
        results.nano_python.beginnings([Document(text, "code", "a.py")], 3, seed=0)


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The recipe of a run on functions of ten lines and a data set of the hub that lies beside it."""
    hub = {"kind": "hub", "path": "nobody/sums", "split": "train", "file": "sums.jsonl"}
    own = {"code": {"kind": "jsonl", "path": "code.jsonl"}, "sums": hub}
    sources = [{"name": name, "template": "{text}", **source} for name, source in own.items()]
    path = recipe(tmp_path_factory.mktemp("results"), training__max_steps=2, data__held_out=0.2, data__sources=sources)
    functions = [f"def f{i}(x):\n" + "".join(f"    x += {i * n}\n" for n in range(9)) for i in range(40)]
    (path.parent / "code.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in functions))
    run(path, data_dir=path.parent, say=lambda _: None)
    return path


@pytest.fixture
def model(trained: Path) -> str:
    return str(trained.parent / "out" / "model")


def documents(trained: Path) -> dict[str, list[Document]]:
    """What the training held out."""
    _, out = split(collect(read(trained, trained.parent).data.sources, trained.parent), 0.2, 0)
    return {name: [one for one in out if one.source == name] for name in ("code", "sums")}


@pytest.mark.slow
def test_quality_of_exits_is_that_of_their_own_logits(
    results: Any, trained: Path, model: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Perplexity and bits per byte by hand, over rows whose predicted text is decoded; a twin has rows of its own."""
    twin = tmp_path / "twin"
    twin.symlink_to(model)
    monkeypatch.setattr(results, "called", lambda folder: Path(folder).name)
    found = results.exits([model, str(twin)], trained, trained.parent, 2)
    network, tokenizer = skipstone.load(model)
    for source, own in documents(trained).items():
        assert found[source]["twin"] == found[source]["model"]
        (rows,) = {tuple(map(tuple, results.pack(own, tokenizer, 16, 0, tokenizer.eos_token_id)[:2].tolist()))}
        ids = torch.tensor(rows)
        with torch.no_grad():
            logits = network(ids).logits[:, :-1]
        nats = F.cross_entropy(logits.flatten(0, 1).double(), ids[:, 1:].flatten(), reduction="sum").item()
        text = "".join(tokenizer.decode(row[1:], skip_special_tokens=True) for row in ids)
        values = found[source]["model"]
        assert values["tokens"] == 2 * 15
        assert values["perplexity"][3] == pytest.approx(math.exp(nats / 30), rel=1e-5)
        assert values["bits_per_byte"] == pytest.approx(nats / math.log(2) / len(text.encode()), rel=1e-5)
        assert values["agreement"][3] == 1
    lines = [line for line in capsys.readouterr().out.splitlines() if line.startswith("| code")]
    perplexity = f"{found['code']['model']['perplexity'][3]:.2f}"
    assert lines == [f"| code | {name} | {perplexity} (1.00) |" for name in ("model", "twin")]


def test_other_documents_than_those_of_the_training_are_refused(
    results: Any, trained: Path, model: str, tmp_path: Path
) -> None:
    account = json.loads((Path(model) / "data.json").read_text())
    account["sources"]["code"]["held_out"]["bytes"] += 1
    (tmp_path / "data.json").write_text(json.dumps(account))
    calls: tuple[Callable[[], Any], ...] = (
        lambda: results.exits([str(tmp_path)], trained, trained.parent, 2),
        lambda: results.parse(str(tmp_path), trained, trained.parent, 2, [0.2]),
        lambda: results.prompts(str(tmp_path), tmp_path / "to", trained, trained.parent, 2),
    )
    for call in calls:
        with pytest.raises(ValueError, match=r"the held-out part of 'code' is .* here and was .* in training"):
            call()
    assert not (tmp_path / "to").exists()


def test_exact_match_is_counted_for_every_method_on_requests_of_the_test_split(
    results: Any, model: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    _, tokenizer = skipstone.load(model)
    answers = {one.prompt: one.answer for one in results.commands.examples("test", 4, 0)}
    first = next(iter(answers))

    def generate(_: Any, ids: torch.Tensor, method: Any, **options: Any) -> Any:
        prompt = tokenizer.decode(ids[0], skip_special_tokens=True)
        knows = method.name == "layerskip" or (method.name == "autoregressive" and prompt != first)
        text = answers.get(prompt, "") if knows else "{}"
        stats = Stats(accepted=3, drafted=9, draft_steps=4)
        return SimpleNamespace(new_tokens=[tokenizer.encode(text, add_special_tokens=False)], stats=stats)

    monkeypatch.setattr(skipstone, "generate", generate)
    control = tmp_path / "without"
    control.symlink_to(model)
    monkeypatch.setattr(results, "called", lambda folder: Path(folder).name)
    found = results.requests([model], 4, [1, 2], 5, control=str(control))
    rows = found["rows"]
    assert {name: row["exact_match"] for name, row in rows.items()} == {
        "model, autoregressive": 0.75,
        "model, early exit, E = 1": 0,
        "model, early exit, E = 2": 0,
        "model, LayerSkip, E = 1": 1,
        "model, LayerSkip, E = 2": 1,
        "without, autoregressive": 0.75,
    }
    assert [row["same_text"] for row in rows.values()] == [4, 1, 1, 3, 3, 4], "texts are held against the same model's"
    assert {row["acceptance"] for row in rows.values()} == {0.75}
    assert rows["model, autoregressive"]["speed_up"] == rows["without, autoregressive"]["speed_up"] == 1
    assert "| model, LayerSkip, E = 2 | 100.0 | 75.0 % |" in capsys.readouterr().out


def test_prompts_come_from_what_training_never_saw(results: Any, trained: Path, model: str, tmp_path: Path) -> None:
    counts = results.prompts(model, tmp_path / "to", trained, trained.parent, 2)
    assert counts == {"commands": 2, "code": 2}
    records = {
        name: [json.loads(line) for line in (tmp_path / "to" / f"{name}.jsonl").read_text().splitlines()] for name in counts
    }
    read_back = {name: [record["prompt"] for record in found] for name, found in records.items()}
    held_out = [one.text for one in documents(trained)["code"]]
    assert all(any(text.startswith(prompt) for text in held_out) for prompt in read_back["code"])
    answers = {one.prompt: one.answer for one in results.commands.examples("test", 2, 1)}
    assert {record["prompt"]: record["reference"] for record in records["commands"]} == answers
    trained_on = {one.prompt for one in results.commands.examples("train", 2000, 0)}
    assert not trained_on & {*read_back["commands"]}
