"""Runs that begin as another model, or learn from one: continued, adapted, shortened, distilled."""

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from transformers import AutoModelForCausalLM

import skipstone
from skipstone.hf.generate_call import resolve_for
from skipstone.methods import LayerSkip
from skipstone.train.data.tokenizer import train_bpe
from skipstone.train.layerskip.objective import LayerSkipObjective
from skipstone.train.layerskip.run import run
from tests.helpers.training import DECODING, Interrupted, finished_run, losses, quiet, recipe, stop_at, tiny


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The recipe of a finished run; the run is in `out` beside it. Nothing here changes it."""
    return finished_run(tmp_path_factory.mktemp("finished"))


@pytest.mark.slow
def test_continual_training_starts_where_the_model_stopped(finished: Path, tmp_path: Path) -> None:
    shutil.copytree(finished.parent / "out" / "model", tmp_path / "start")
    own = {"model": {"pretrained": "start"}, "tokenizer": ..., "training__learning_rate": 0.0}
    path = recipe(tmp_path, **own)  # the folder is beside the recipe
    folder = run(path, say=quiet)
    before, after = (AutoModelForCausalLM.from_pretrained(one).state_dict() for one in (tmp_path / "start", folder))
    assert all(torch.equal(before[name], value) for name, value in after.items())
    assert skipstone.load(folder)[0].generation_config.skipstone == DECODING, "kept from the model"
    misfit = {"model": {"pretrained": str(folder)}, "tokenizer": {"pretrained": str(tmp_path / "words")}}
    train_bpe([" ".join(str(i) + chr(97 + i % 26) * (i % 7) for i in range(999))] * 2, 300).save_pretrained(tmp_path / "words")
    with pytest.raises(ValueError, match=r"gives ids up to \d+, the model's vocab_size is 270"):
        run(recipe(tmp_path / "misfit", **misfit), say=quiet)


@pytest.mark.slow
def test_lora_trains_adapters_only_and_leaves_a_model_that_decodes(
    finished: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    peft = pytest.importorskip("peft")
    base = finished.parent / "out" / "model"
    lora = {"r": 4, "lora_dropout": 0.1, "target_modules": ["q_proj", "down_proj"]}
    own = {"model": {"pretrained": str(base), "lora": lora}, "tokenizer": ..., "training__learning_rate": 0.05}
    said: list[str] = []
    whole = run(recipe(tmp_path / "whole", decoding=DECODING, **own), say=said.append)
    assert "0.0 M parameters to train" in said
    with monkeypatch.context() as patch:
        stop_at(patch, 3)
        with pytest.raises(Interrupted):
            run(recipe(tmp_path / "run", decoding=DECODING, **own), say=quiet)
    resumed = run(tmp_path / "run" / "recipe.yaml", say=quiet)
    assert (whole / "model.safetensors").read_bytes() == (resumed / "model.safetensors").read_bytes()

    before, after = (AutoModelForCausalLM.from_pretrained(one).state_dict() for one in (base, whole))
    changed = {name.split(".")[-2] for name, value in after.items() if not torch.equal(before[name], value)}
    assert changed == {"q_proj", "down_proj"}
    model, tokenizer = skipstone.load(whole)
    assert resolve_for(model, None) == LayerSkip(exit_layer=2, num_speculative_tokens=3)
    adapted = peft.PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(base), whole / "adapter").eval()
    ids = torch.tensor([tokenizer("def f3(x)")["input_ids"]])
    torch.testing.assert_close(adapted(ids).logits, model(ids).logits, rtol=1e-4, atol=1e-4)
    other = {**own, "model": {"pretrained": str(base), "lora": {**lora, "r": 8}}}
    with pytest.raises(ValueError, match=r"lora.r differ \(lora.r: the checkpoint has 4, this run 8"):
        run(recipe(tmp_path / "run", decoding=DECODING, **other), say=quiet)
    moved = tmp_path / "base"  # the same path, other weights under the adapters
    shutil.copytree(base, moved)
    elsewhere = {**own, "model": {"pretrained": str(moved), "lora": lora}}
    run(recipe(tmp_path / "moved", **elsewhere), say=quiet)
    network = AutoModelForCausalLM.from_pretrained(moved)
    network.model.layers[1].mlp.up_proj.weight.data[0, 3] += 1e-3
    network.save_pretrained(moved)
    with pytest.raises(ValueError, match="belongs to another run, frozen differ"):
        run(tmp_path / "moved" / "recipe.yaml", say=quiet)


@pytest.mark.slow
def test_a_recipe_goes_on_from_another_ones_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One command: the first part is trained, or taken as it is where it is finished."""
    first = recipe(tmp_path)
    second = tmp_path / "second.yaml"
    own = {**yaml.safe_load(first.read_text()), "output": str(tmp_path / "second"), "model": {"recipe": "recipe.yaml"}}
    del own["tokenizer"]
    second.write_text(yaml.safe_dump({**own, "training": {**own["training"], "learning_rate": 0.0}}))
    monkeypatch.chdir(tmp_path)
    said: list[str] = []
    folder = run(second, say=said.append)
    assert folder == tmp_path / "second" / "model"
    before, after = (AutoModelForCausalLM.from_pretrained(one).state_dict() for one in (tmp_path / "out" / "model", folder))
    assert all(torch.equal(before[name], value) for name, value in after.items())
    said.clear()
    run(second, say=said.append)
    assert [line.endswith("nothing is left to train") for line in said if "finished" in line] == [True, True]


@pytest.mark.slow
def test_a_draft_model_learns_from_its_target(finished: Path, tmp_path: Path) -> None:
    """A recipe with a teacher: the student comes nearer to it; a run with another teacher does not resume; a teacher of another
    vocabulary is refused."""
    target = finished.parent / "out" / "model"
    vocabulary = {"pretrained": str(target)}
    training = {"max_steps": 60, "per_device_train_batch_size": 8, "logging_steps": 20, "save_steps": 60, "learning_rate": 0.02}
    path = recipe(
        tmp_path,
        teacher=str(target),
        tokenizer=vocabulary,
        training=training,
        exits={"e_scale": 0.0, "curriculum": "none"},
        dropout={"p_max": 0.0},
    )
    run(path, say=quiet)
    found = losses(tmp_path / "out")
    assert found[-1] < 0.5 * found[0], "in nats from the teacher, not from the text"
    student = AutoModelForCausalLM.from_pretrained(tmp_path / "out" / "model")
    teacher = AutoModelForCausalLM.from_pretrained(target)
    ids = torch.randint(1, 200, (4, 16), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        p, q = (model(ids).logits.log_softmax(-1) for model in (teacher, student))
    assert float((p.exp() * (p - q)).sum(-1).mean()) < 0.5
    values = yaml.safe_load(path.read_text())
    path.write_text(yaml.safe_dump({**values, "teacher": str(tmp_path / "out" / "model")}))
    with pytest.raises(ValueError, match="teacher"):
        run(path, say=quiet)
    own = recipe(tmp_path / "own", teacher=str(target), tokenizer={"vocab_size": 300})
    with pytest.raises(ValueError, match="has another vocabulary: its distributions mean nothing to this model"):
        run(own, say=quiet)


@pytest.mark.slow
def test_a_vocabulary_to_learn_over_is_read_beside_the_recipe_and_is_part_of_the_run(
    finished: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    target, still = finished.parent / "out" / "model", {"max_steps": 2, "save_steps": 1, "learning_rate": 0.0}
    start, ids = {"pretrained": str(target), "layers": 2}, tmp_path / "ids.json"
    wish = {
        "model": start,
        "tokenizer": ...,
        "training": still,
        "exits": {"dilation": 1},
        "distillation_vocabulary": "ids.json",
    }
    path = recipe(tmp_path, teacher=str(target), **wish)
    with pytest.raises(OSError, match=r"ids\.json"):
        run(path, say=quiet)
    ids.write_text("[4, 5, 100000]")
    with pytest.raises(ValueError, match=r"distillation_vocabulary: .*ids\.json must name ids from 0 to .*, found 100000"):
        run(path, say=quiet)
    ids.write_text("[9, 4, 5, 4]")
    learnt: list[Any] = []
    own = LayerSkipObjective.__init__
    monkeypatch.setattr(LayerSkipObjective, "__init__", lambda self, *given: own(self, *given) or learnt.append(self.shortlist))
    run(path, say=quiet)
    assert [one.tolist() for one in learnt] == [[4, 5, 9]]
    ids.write_text("[4, 5, 9]")
    run(path, say=quiet)  # the same ones
    ids.write_text("[4, 5]")
    with pytest.raises(ValueError, match="distillation_vocabulary"):
        run(path, say=quiet)
    with pytest.raises(ValueError, match=r"distillation_vocabulary says over which tokens .*: name a teacher"):
        run(recipe(tmp_path / "alone", **wish), say=quiet)
    (tmp_path / "exits" / "ids.json").parent.mkdir()
    (tmp_path / "exits" / "ids.json").write_text("[7, 8]")
    towards_last = {**wish, "exits": {"kl_weight": 1.0, "exit_layers": [1], "curriculum": "none"}}
    run(recipe(tmp_path / "exits", **towards_last), say=quiet)
    assert learnt[-1].tolist() == [7, 8]


@pytest.mark.slow
def test_a_draft_model_begins_as_its_targets_first_layers(tmp_path: Path) -> None:
    target = tmp_path / "target"
    tiny(vocab_size=300).save_pretrained(target)
    train_bpe(["def f1(x):\n    return x + 1\n"] * 2, 270).save_pretrained(target)
    still = {"max_steps": 2, "per_device_train_batch_size": 2, "save_steps": 2, "learning_rate": 0.0}
    start = {"pretrained": str(target), "layers": 2}
    path = recipe(tmp_path, model=start, tokenizer=..., teacher=str(target), training=still, exits={"dilation": 1})
    made = AutoModelForCausalLM.from_pretrained(run(path, say=quiet))
    whole = AutoModelForCausalLM.from_pretrained(target)
    assert made.config.num_hidden_layers == len(made.model.layers) == 2
    expected = {name: value for name, value in whole.state_dict().items() if ".layers.2." not in name}
    assert made.state_dict().keys() == expected.keys()
    assert all(torch.equal(value, expected[name]) for name, value in made.state_dict().items())
    for layers, said in ((3, "must be less than the model's 3 layers, found 3"), (0, "greater than or equal to 1")):
        wrong = recipe(tmp_path / str(layers), model={"pretrained": str(target), "layers": layers}, tokenizer=...)
        with pytest.raises(ValueError, match=said):
            run(wrong, say=quiet)
    scratch = recipe(tmp_path / "scratch", model__layers=2)
    with pytest.raises(ValueError, match="a config says num_hidden_layers itself"):
        run(scratch, say=quiet)
