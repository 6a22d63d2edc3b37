"""How likely texts are, and how well exits predict answers: against transformers, models cut there, and through a whole run."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from skipstone.bench.perplexity import at_every_exit, log_likelihood
from skipstone.bench.plan import read
from skipstone.bench.report import report
from skipstone.bench.run import run
from skipstone.loading import load
from tests.helpers import families, support
from tests.helpers.machine import prompt


@pytest.mark.parametrize("name", ["llama", "gemma2"])
def test_perplexity_and_agreement_are_those_of_models_cut_there(name: str) -> None:
    """By transformers' own forward of the first E layers, over the answers alone."""
    model = families.build(name)
    pairs = [(prompt(9, vocab=50), prompt(4, vocab=50, seed=1)), (prompt(3, vocab=50, seed=2), prompt(7, vocab=50, seed=3))]
    found = at_every_exit(model, pairs)
    assert found.tokens == 11
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
        assert found.perplexity[depth - 1] == pytest.approx(torch.tensor(nats / 11).exp().item(), rel=1e-4)
        assert found.agreement[depth - 1] == pytest.approx(same / 11)
    assert found.agreement[3] == 1


def test_without_an_answer_there_is_nothing_to_measure() -> None:
    with pytest.raises(ValueError, match="there is no answer to measure"):
        at_every_exit(families.cached("llama"), [])


@pytest.mark.parametrize("family", ["llama", "gemma2", "opt_projected"])
def test_the_likelihood_of_a_text_is_transformers(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("skipstone.bench.perplexity.CHUNK", 3)
    model, asked, answer = families.cached(family), prompt(6, vocab=50), prompt(8, 1, vocab=50).tolist()
    said = model(torch.cat([asked, torch.tensor(answer)])[None]).logits[0, 5:-1].double().log_softmax(-1)
    expected = said.gather(1, torch.tensor(answer)[:, None]).sum()
    assert log_likelihood(model, asked, answer) == pytest.approx(float(expected), rel=1e-5)
    assert log_likelihood(model, asked, []) == 0


def test_a_run_measures_the_answers_of_what_it_reports(tmp_path: Path) -> None:
    """One line a task that has answers, in every format of the report; a task without says so."""
    model = families.build("llama", max_position_embeddings=128)
    model.save_pretrained(tmp_path / "model")
    support.tokenizer().save_pretrained(tmp_path / "model")
    asked = [{"prompt": "abc" * n, "reference": " the stop", "category": "even" if n % 2 else "odd"} for n in range(1, 5)]
    without = [{"prompt": "ab"}, {"turns": ["a", "b"], "reference": "c"}]
    for name, records in (("mine", asked), ("bare", without)):
        (tmp_path / f"{name}.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    said: list[str] = []
    settings: dict[str, Any] = {"models": [str(tmp_path / "model")], "methods": ["autoregressive", "layerskip exit_layer=1"]}
    tasks = [str(tmp_path / f"{name}.jsonl") for name in ("mine", "bare")]
    plan = read(None, {**settings, "tasks": tasks, "max_new_tokens": 4, "perplexity": True})
    out = run(plan, tmp_path / "out.jsonl", [], said.append)
    lines, (mine, bare) = report.load([out])
    assert said[1:] == ["bare: no perplexity, its records hold no answers"]
    assert bare.exits is None
    (line,) = (line for line in lines if line["kind"] == "exits")
    network, tokenizer = load(tmp_path / "model")
    answer = torch.tensor(tokenizer(" the stop", add_special_tokens=False)["input_ids"])
    pairs = [(torch.tensor(tokenizer(one["prompt"])["input_ids"]), answer) for one in asked]
    wanted = at_every_exit(network, pairs)
    assert (line["prompts"], line["tokens"]) == (4, wanted.tokens)
    assert line["perplexity"] == pytest.approx(wanted.perplexity)
    assert mine.exits == line
    text = report.report([out], "md")
    assert f"| 4 | {wanted.perplexity[3]:.2f} | 1.00 |" in text
    assert "x plain by category" in text
    assert json.loads(report.report([out], "json"))["groups"][0]["exits"]["agreement"][3] == 1
    assert "What every exit knows" in report.report([out], "html")
    before = len(lines)
    run(plan, out, [], said.append)
    assert len(report.load([out])[0]) == before + 1, "it is not measured twice"
