"""Synthetic models: the wanted agreement, no loops, and the word SYNTHETIC wherever they show."""

import json

import pytest
import torch

from skipstone.engines.kv_cache import KVCache
from skipstone.engines.model_runner import ModelRunner
from skipstone.lab.bench import run_file
from skipstone.lab.bench.plan import read
from skipstone.lab.bench.report.report import report
from skipstone.lab.synthetic import surrogate
from skipstone.lab.synthetic.surrogate import run_surrogate
from skipstone.lab.timing.statistics import repeated_share
from skipstone.models.passes import Pass

SMALL = surrogate.parse("layers=4,hidden=64,vocab=256", 2, 0.8)


@pytest.mark.slow
def test_surrogate_agrees_at_the_wanted_rate_and_is_reproducible():
    made = surrogate.calibrate(SMALL, seed=0, sequences=48, length=48)
    assert made.agreement.low - 0.03 <= 0.8 <= made.agreement.high + 0.03
    assert made.agreement.high - made.agreement.low < 0.1
    assert 0 < made.factor < 1
    again = surrogate.calibrate(SMALL, seed=0, sequences=48, length=48)
    assert again.factor == made.factor
    assert torch.equal(again.model.lm_head.weight, made.model.lm_head.weight)
    fresh = surrogate.contexts(made.model, 32, 48, seed=77)
    with torch.no_grad():
        late = made.model(fresh).logits.argmax(-1)
        made.model.config.num_hidden_layers = 2  # the model cut down to its first layers
        early = made.model(fresh).logits.argmax(-1)
        made.model.config.num_hidden_layers = 4
    counted = (early == late)[:, surrogate.OPENING :].float().mean().item()
    assert surrogate.measure_agreement(made.model, SMALL.rest, fresh)[0].value == pytest.approx(counted)
    assert counted == pytest.approx(0.8, abs=0.06)
    assert made.report()["realised_agreement"]["value"] == made.agreement.value


@pytest.mark.slow
def test_a_layer_set_may_be_what_agrees():
    """Counted with the engine's own skipping, which the calibration does not use."""
    wide = surrogate.parse("layers=6,hidden=64,vocab=256", None, 0.8, 0.5)
    made = surrogate.calibrate(wide, seed=0, sequences=48, length=48)
    assert made.agreement.low - 0.03 <= 0.8 <= made.agreement.high + 0.03
    assert (len(wide.rest.attention), len(wide.rest.mlp)) == (2, 2)
    fresh = surrogate.contexts(made.model, 1, 100, seed=78)
    model = ModelRunner(made.model)
    places = torch.arange(100)[None]
    found = []
    for skip in (None, wide.rest):
        store = KVCache(1, 6, 128)
        store.reserve(100)
        at = Pass(places, places, None, slice(0, 1), 100, 0)
        with torch.inference_mode():
            logits = model.logits(model.run(model.embed(fresh, places), at, store, range(6), skip))
        found.append(logits[0].argmax(-1))
    counted = (found[0] == found[1])[surrogate.OPENING :].double().mean().item()
    assert surrogate.measure_agreement(made.model, wide.rest, fresh)[0].value == pytest.approx(counted)
    assert counted < 1


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


def plan(**more):
    usual = {"models": ["surrogate small"], "num_prompts": 2, "tune_prompts": 2, "prompt_tokens": 12, "max_new_tokens": 12}
    usual |= {"tune_tokens": 8, "ignore_eos": True, "dtype": "float32", "device": "cpu"}
    choice = any("," in method for method in more["methods"])
    left_out = () if choice else ("tune_prompts", "tune_tokens")
    return read(None, {key: value for key, value in {**usual, **more}.items() if key not in left_out})


def quickly(*shape, **more):
    return CALIBRATE(*shape, **{**more, "sequences": 32, "length": 48})


CALIBRATE = surrogate.calibrate


@pytest.mark.slow
def test_a_surrogate_run_is_labelled_synthetic_throughout(tmp_path, monkeypatch):
    monkeypatch.setattr(surrogate, "TOLERANCE", 0.05)
    said = []
    methods = ["hf-generate", "hf-early-exit num_assistant_tokens=2", "autoregressive", "layerskip num_speculative_tokens=2,3"]
    monkeypatch.setattr(surrogate, "calibrate", quickly)
    out = run_surrogate(SMALL, plan(methods=methods), tmp_path / "s.jsonl", ["x"], said.append)
    lines = run_file.read(out)
    about = next(line for line in lines if line["kind"] == "model")["synthetic"]
    assert abs(about["realised_agreement"]["value"] - 0.8) < 0.1
    assert any("agree with all at" in text and "0.8 was wanted" in text for text in said)
    prompts = [line for line in lines if line["kind"] == "prompt"]
    assert len(prompts) == 2
    assert all(len({str(row["digests"]) for row in line["rows"].values()}) == 1 for line in prompts)
    assert "### SYNTHETIC MODEL: " in report([out], "md")
    assert "agree with all at" in report([out], "md")
    assert "SYNTHETIC MODEL: random weights" in report([out], "html")
    tuned = next(line for line in lines if line["kind"] == "tuned")
    assert tuned["chosen"]["exit_layer"] == 2, "the exit that was calibrated"
    # a killed run takes the calibration from its file, and measures the same model
    kept = [line for line in lines if line["kind"] != "prompt" or line["index"] == 0]
    out.write_text("".join(json.dumps(line) + "\n" for line in kept))
    monkeypatch.setattr(surrogate, "calibrate", None)
    run_surrogate(SMALL, plan(methods=methods), out, ["x"], said.append)
    again = [line for line in run_file.read(out) if line["kind"] == "prompt"]
    assert [line["index"] for line in again] == [0, 1]
    assert [line["digest"] for line in again] == [line["digest"] for line in prompts]
    assert again[1]["rows"]["layerskip"]["digests"] == prompts[1]["rows"]["layerskip"]["digests"]
    with pytest.raises(ValueError, match="holds another run: surrogate differ"):
        run_surrogate(surrogate.parse("layers=4,hidden=64,vocab=256", 2, 0.7), plan(methods=methods), out, ["x"])


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("layers=4,hidden=64", 4, 0.8), "must lie between 1 and 3"),
        (("layers=4,hidden=64", 2, None), "goes with --exit-layer or --skip-ratio"),
        (("layers=4,hidden=64", 2, 0.8, 0.5), "either --exit-layer or --skip-ratio"),
        (("layers=4,hidden=64", None, 0.8, 1.0), "--skip-ratio must leave out some"),
        (("layers=4,hidden=64", 2, 0.8, None, 1.5), r"--sure must lie in \[0, 1\)"),
        (("layers=4",), "lacks hidden"),
        (("layers=4,depth=3",), "found 'layers=4,depth=3'"),
        (("llama-9b",), "one of llama-3.2-1b, "),
    ],
)
def test_impossible_shapes_are_refused(arguments, message):
    with pytest.raises(ValueError, match=message):
        surrogate.parse(*arguments)


def test_a_config_file_is_a_shape(tmp_path):
    path = tmp_path / "config.json"
    surrogate.LlamaConfig(**SMALL.config).to_json_file(path, use_diff=False)
    assert surrogate.build(surrogate.parse(str(path)), 0).config.hidden_size == 64
    written = json.loads(path.read_text())
    path.write_text(json.dumps({**written, "dtype": "bfloat16", "torch_dtype": "bfloat16"}))
    made = surrogate.build(surrogate.parse(str(path)), 0)
    assert (made.dtype, made.config.hidden_size) == (torch.float32, 64)
    path.write_text("{")
    with pytest.raises(ValueError, match=r"config.json is no JSON"):
        surrogate.parse(str(path))
    path.write_text('{"model_type": "mamba", "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 1}')
    with pytest.raises(ValueError, match="a surrogate is a Llama, found model_type 'mamba'"):
        surrogate.parse(str(path))
