"""The whole benchmark command on a tiny model on disk, and synthetic models."""

import json
import random

import pytest
import torch

from skipstone.bench import prompts, run, surrogate, tuning
from skipstone.bench.__main__ import main
from skipstone.bench.report import markdown
from skipstone.bench.statistics import repeated_share
from tests import families, support

WORDS = ["stop", "abc", " the", "ab", "bc", "xst", *"defghijklm"]
QUICK = ["--num-prompts", "3", "--tune-prompts", "2", "--prompt-tokens", "12", "--max-new-tokens", "20", "--tune-tokens", "8"]
QUICK += ["--exit-layers", "1,2", "--lengths", "2", "--thresholds", "none,.4", "--peer-thresholds", "0"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A model with its tokenizer on disk, and a folder of texts."""
    place = tmp_path_factory.mktemp("bench")
    model = families.build("llama", max_position_embeddings=64)
    model.config.eos_token_id = model.generation_config.eos_token_id = 5
    model.save_pretrained(place / "model")
    support.tokenizer().save_pretrained(place / "model")
    (place / "texts").mkdir()
    rng = random.Random(0)
    for number in range(9):
        (place / "texts" / f"{number}.txt").write_text("".join(rng.choices(WORDS, k=60)))
    return place


def test_the_command_ends_with_one_json_document_of_everything(folder, tmp_path, capsys, monkeypatch):
    tuned_on, timed = set(), tuning.measure

    def watched(model, row, prompt, *others):
        tuned_on.add(prompts.digest(prompt.tolist()))
        return timed(model, row, prompt, *others)

    monkeypatch.setattr(tuning, "measure", watched)
    target = tmp_path / "result.json"
    argv = [str(folder / "model"), "--prompts", str(folder / "texts"), "--json", str(target), *QUICK]
    assert main(argv) == 0
    document = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert document == json.loads(target.read_text())
    rows = {row["name"]: row for row in document["rows"]}
    greedy = ["hf-generate", "hf-early-exit", "hf-prompt-lookup", "autoregressive", "layerskip"]
    assert list(rows) == [*greedy, "hf-generate T=0.8", "autoregressive T=0.8", "layerskip T=0.8"]
    for name, row in rows.items():
        assert row["all_prompts"]["tokens"] == 3 * 20, "EOS is ignored, every row emits the same number of tokens"
        assert row["all_prompts"].get("equal_to_hf_generate") == (3 if name in greedy else None)
    check_figures(document, rows)
    reported = {prompt["digest"] for prompt in document["prompts"]}
    assert {prompt["digest"] for prompt in document["tuning_prompts"]} == tuned_on
    assert len(reported) == 3
    assert not reported & tuned_on
    assert set(document["tuning"]) == {"hf-early-exit", "hf-prompt-lookup", "layerskip"}
    assert document["tuning"]["layerskip"]["chosen"] == rows["layerskip"]["settings"] == rows["layerskip T=0.8"]["settings"]
    assert (document["synthetic"], document["refused"]) == (False, {})
    assert document["provenance"]["argv"] == argv
    assert document["settings"]["seed"] == 0
    lines = markdown(document).splitlines()
    assert [line.split(" | ")[0].strip("| ") for line in lines] == ["row", "---", *rows]
    assert {line.count(" | ") for line in lines} == {13}
    assert f"{rows['layerskip']['all_prompts']['speedup_autoregressive']['value']:.2f} |" in lines[6]


def check_figures(document, rows):
    """The table's figures follow from what is recorded of every prompt."""
    single = [prompt["rows"] for prompt in document["prompts"]]
    plain_rate = 60 / sum(one["autoregressive"]["seconds"] for one in single)
    for name, row in rows.items():
        rate = sum(one[name]["tokens"] for one in single) / sum(one[name]["seconds"] for one in single)
        assert row["all_prompts"]["tokens_per_second"] == pytest.approx(rate)
        if row["temperature"] == 0:
            assert row["all_prompts"]["speedup_autoregressive"]["value"] == pytest.approx(rate / plain_rate)
    own = rows["layerskip"]["all_prompts"]
    stats = [one["layerskip"]["stats"] for one in single]
    assert own["acceptance_rate"] == pytest.approx(sum(s["accepted"] for s in stats) / sum(s["draft_steps"] for s in stats))
    assert own["mean_acceptance_length"] == pytest.approx(
        1 + sum(s["accepted"] for s in stats) / sum(s["steps"] for s in stats)
    )
    assert own["predicted_speedup"] > 0
    assert own["measured_over_predicted"] == pytest.approx(own["decode_speedup"] / own["predicted_speedup"])
    assert document["ceiling"]["tokens_per_second"] > 0


def test_a_family_without_early_exit_in_transformers_gets_no_such_row_but_a_reason(tmp_path, folder, capsys):
    families.build("gpt2").save_pretrained(tmp_path / "gpt2")
    support.tokenizer().save_pretrained(tmp_path / "gpt2")
    chosen = ["--rows", "hf-generate,hf-early-exit,autoregressive", "--temperature", "0"]
    assert main([str(tmp_path / "gpt2"), "--prompts", str(folder / "texts"), *QUICK, *chosen]) == 0
    out = capsys.readouterr().out
    document = json.loads(out.splitlines()[-1])
    assert [row["name"] for row in document["rows"]] == ["hf-generate", "autoregressive"]
    assert "config.num_hidden_layers" in document["refused"]["hf-early-exit"]
    assert "hf-early-exit: no row" in out


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["/nowhere/model"], "/nowhere/model"),
        (["MODEL", "--surrogate", "llama-1b"], "give either a model"),
        (["MODEL", "--rows", "layerskip,warp"], "unknown row 'warp'"),
        (["MODEL", "--num-prompts", "0"], "num_prompts must be at least 1, found 0"),
        (["MODEL", "--threads", "0"], "threads must be at least 1, found 0"),
        (["MODEL", "--lengths", "4,0"], "lengths must be draft lengths of at least 1"),
        (["MODEL", "--thresholds", "none,2"], "thresholds must lie between 0 and 1, found 2.0"),
        (["MODEL", "--peer-thresholds", "-1"], "peer_thresholds must lie between 0 and 1"),
        (["MODEL", "--prompts", "/nowhere"], "no text file found at /nowhere"),
        (["MODEL", "--prompts", "TEXTS", "--max-new-tokens", "60"], "is more than the model's 64 positions"),
        (
            ["MODEL", "--prompts", "TEXTS", "--max-new-tokens", "8", "--exit-layers", "4"],
            "exit layers must lie between 1 and 3",
        ),
        (["MODEL", "--json", "/nowhere/at/all.json"], "there is no folder /nowhere/at"),
        (["--surrogate", "layers=4,hidden=64,exit=4,agreement=.8"], "exit must lie between 1 and 3"),
        (["--surrogate", "layers=4,hidden=64"], "lacks exit, agreement"),
        (["--surrogate", "layers=4,depth=3"], "found 'depth=3'"),
        (["--surrogate", "layers=4,hidden=64,exit=2,agreement=1.5"], "agreement must lie between 0 and 1"),
        (["--surrogate", "llama-1b", "--prompts", "TEXTS"], "prompts are sampled ids"),
    ],
)
def test_mistakes_are_one_sentence_and_an_exit_code(folder, capsys, arguments, message):
    places = {"MODEL": str(folder / "model"), "TEXTS": str(folder / "texts")}
    given = [places.get(argument, argument) for argument in arguments]
    small = [] if "--num-prompts" in given else ["--num-prompts", "2"]
    assert main([*given, *small, "--tune-prompts", "1", "--prompt-tokens", "12"]) == 2
    captured = capsys.readouterr()
    assert message in captured.err
    assert captured.err.startswith("error: ")
    assert captured.err.count("\n") == 1
    assert captured.out == ""


SMALL = surrogate.Shape(layers=4, hidden=64, exit=2, agreement=0.8, vocab=256)


def test_surrogate_agrees_at_the_wanted_rate_and_is_reproducible():
    made = surrogate.calibrate(SMALL, seed=0, sequences=48, length=48)
    assert made.agreement.low - 0.03 <= 0.8 <= made.agreement.high + 0.03
    assert made.agreement.high - made.agreement.low < 0.1
    assert 0 < made.factor < 1
    again = surrogate.calibrate(SMALL, seed=0, sequences=48, length=48)
    assert again.factor == made.factor
    assert torch.equal(again.model.lm_head.weight, made.model.lm_head.weight)
    fresh = surrogate.contexts(made.model, 32, 48, seed=77)
    text = fresh[:, surrogate.START :]
    with torch.no_grad():
        late = made.model(text).logits.argmax(-1)
        made.model.config.num_hidden_layers = 2  # the model cut down to its first layers
        early = made.model(text).logits.argmax(-1)
        made.model.config.num_hidden_layers = 4
    counted = (early == late).float().mean().item()
    assert surrogate.measure_agreement(made.model, 2, fresh)[0].value == pytest.approx(counted)
    assert counted == pytest.approx(0.8, abs=0.06)
    assert made.report()["synthetic"] is True


def test_surrogate_text_does_not_loop_and_its_prompts_repeat_with_the_seed():
    model = surrogate.build(SMALL, seed=1)
    chosen = surrogate.sampled_prompts(model, 4, 40, seed=5)
    again, other = (surrogate.sampled_prompts(model, 4, 40, seed=seed) for seed in (5, 6))
    assert [p.digest for p in chosen] == [p.digest for p in again] != [p.digest for p in other]
    assert max(repeated_share([], prompt.ids.tolist()) for prompt in chosen) < 0.2
    with torch.no_grad():
        model.lm_head.weight.mul_(1000)  # the next token is certain, and depends on little
        for layer in model.model.layers:
            layer.self_attn.o_proj.weight.zero_()
    with pytest.raises(ValueError, match="sampled text loops"):
        surrogate.sampled_prompts(model, 4, 200, seed=5)


def test_a_surrogate_run_is_labelled_synthetic_throughout(capsys, monkeypatch):
    monkeypatch.setattr(surrogate, "TOLERANCE", 0.05)
    spec = "layers=4,hidden=64,exit=2,agreement=.8,vocab=256"
    assert main(["--surrogate", spec, *QUICK, "--rows", "hf-generate,autoregressive,layerskip", "--temperature", "0"]) == 0
    out = capsys.readouterr().out
    document = json.loads(out.splitlines()[-1])
    assert document["synthetic"] is True
    assert document["surrogate"]["synthetic"] is True
    assert abs(document["surrogate"]["realised_agreement"]["value"] - 0.8) < 0.1
    assert out.startswith("SYNTHETIC MODEL")
    row = document["rows"][-1]
    assert (row["name"], row["all_prompts"]["equal_to_hf_generate"]) == ("layerskip", 3)


def test_the_1b_surrogate_is_measured_in_plain_decoding_only(capsys, monkeypatch):
    def small(seed, dtype, device):
        assert dtype == torch.bfloat16
        return families.build("llama").to(dtype)

    monkeypatch.setattr(surrogate, "llama_1b", small)
    assert main(["--surrogate", "llama-1b", "--num-prompts", "1", "--prompt-tokens", "8", "--max-new-tokens", "4"]) == 0
    document = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert [row["name"] for row in document["rows"]] == ["hf-generate", "autoregressive"]
    assert document["synthetic"] is True
    assert document["tuning"] == {}


def test_documents_hold_no_number_that_json_does_not_know():
    assert run.plain({"a": (1, float("nan")), 2: [float("inf"), "x"]}) == {"a": [1, None], "2": [None, "x"]}
