"""What is pushed: the files as they are, in one commit, with a card of what was recorded; or nothing, and a sentence."""

import contextlib
import hashlib
import io
import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import skipstone
from skipstone.engines.model_runner import ModelRunner
from skipstone.export.draft import DraftLayers, write_draft
from skipstone.export.hub.card import MARK
from skipstone.utils.files import read_lines
from tests.helpers.hub import Hub, Repo
from tests.helpers.parcels import draft_folder, everything, heads_folder, model_folder, profile_file, target, tuned_file
from tests.helpers.support import tokenizer
from tests.helpers.training import recipe

pytestmark = pytest.mark.slow


def pushed(repo: Repo) -> dict[str, bytes]:
    """The files of the main branch beside the card and what the hub itself makes."""
    return {name: content for name, content in repo.files.items() if name not in ("README.md", ".gitattributes")}


def card(repo: Repo) -> str:
    return repo.files["README.md"].decode()


MADE: dict[str, Callable[[Path], Path]] = {
    "heads": lambda folder: heads_folder(folder / "heads"),
    "model": lambda folder: model_folder(folder / "model"),
    "shards": lambda folder: model_folder(folder / "model", max_shard_size="20KB"),
    "draft": lambda folder: draft_folder(folder / "draft"),
    "profile": lambda folder: profile_file(folder / "found.json"),
}


@pytest.mark.parametrize("kind", MADE)
def test_the_files_come_as_they_are_in_one_commit_and_nothing_is_written_here(kind: str, hub: Hub, tmp_path: Path) -> None:
    (tmp_path / "made").mkdir()
    path = MADE[kind](tmp_path / "made")
    before = everything(tmp_path / "made")
    address = skipstone.push(path, "me/thing")
    repo = hub.repos["me/thing"]
    assert address == f"{hub.address}/me/thing/commit/{repo.branches['main']}"
    assert len(repo.messages) == 2, "the hub's first, and ours"
    wanted = {"profile.json": path.read_bytes()} if path.is_file() else everything(path)
    assert pushed(repo) == wanted
    assert kind != "shards" or len(wanted) > 6
    assert everything(tmp_path / "made") == before
    assert not (tmp_path / "hub-cache").exists(), "nor is anything fetched"
    rows = re.findall(r"^\| (\S+) \| ([\d,]+) \| ([0-9a-f]{64}) \|$", card(repo), re.M)
    assert {name: (int(size.replace(",", "")), sha) for name, size, sha in rows} == {
        name: (len(content), hashlib.sha256(content).hexdigest()) for name, content in wanted.items()
    }
    assert f"skipstone {skipstone.__version__}" in card(repo)
    assert not repo.private


def test_the_three_lines_of_a_card_decode_with_what_was_pushed(hub: Hub, tmp_path: Path) -> None:
    words = tokenizer()
    model_folder(tmp_path / "model")
    skipstone.push(tmp_path / "model", "me/target")
    skipstone.push(heads_folder(tmp_path / "heads", name="me/target"), "me/heads")
    skipstone.push(profile_file(tmp_path / "profile.json"), "me/set")
    skipstone.push(draft_folder(tmp_path / "draft"), "me/draft")
    plain = skipstone.generate(target().model, "def add(a, b):", "autoregressive", tokenizer=words, max_new_tokens=64).text
    for name, method in (("target", ""), ("heads", "adadecode"), ("set", "self_speculative"), ("draft", "speculative")):
        (code,) = re.findall(r"```python\n(.*?)```", card(hub.repos[f"me/{name}"]), re.S)
        assert len(code.splitlines()) == 3
        assert method in code
        code = code.replace('"MODEL"', '"me/target"')  # what the reader of a draft's card has to know
        printed = io.StringIO()
        with contextlib.redirect_stdout(printed):
            exec(code, {})
        assert printed.getvalue() == f"{plain}\n", name


def test_a_run_tells_its_recipe_its_data_and_its_last_figures(hub: Hub, tmp_path: Path) -> None:
    from skipstone.train.layerskip.run import run

    evaluated = {"training__eval_strategy": "steps", "training__eval_steps": 2}
    path = recipe(tmp_path, decoding={"method": "layerskip", "exit_layer": 1}, **evaluated)
    model = run(path, say=lambda _: None)
    skipstone.push(model, "me/trained")
    said = card(hub.repos["me/trained"])
    last = {name: value for line in read_lines(model.parent / "metrics.jsonl") for name, value in line.items()}
    (titles,) = re.findall(r"^\| after layer \|.*$", said, re.M)
    (row,) = re.findall(r"^\| 1 \| .*$", said, re.M)
    cells = dict(zip(titles.strip("| ").split(" | "), row.strip("| ").split(" | "), strict=True))
    assert float(cells["code: agreement"]) == pytest.approx(last["eval_code_agreement_exit_1"], rel=1e-3)
    assert float(cells["sums: perplexity"]) == pytest.approx(last["eval_sums_perplexity_exit_1"], rel=1e-3)
    data = json.loads((model / "data.json").read_text())
    assert f"| SHA-256 of the training order | {data['sha256']} |" in said
    assert "| steps | 4 |" in said
    assert "| max steps | 4 |" in said
    assert "| decodes by default with | layerskip exit_layer=1" in said
    assert str(tmp_path) not in said, "no path of this machine"
    elsewhere = shutil.copytree(model, tmp_path / "elsewhere" / "model")
    for name in ("metrics.jsonl", "checkpoint-4"):
        (shutil.copytree if name == "checkpoint-4" else shutil.copy)(model.parent / name, elsewhere.parent / name)
    (elsewhere / "data.json").write_text(json.dumps({**data, "sha256": "0" * 64}))
    skipstone.push(elsewhere, "me/other")
    assert "## Training" not in card(hub.repos["me/other"]), "that run is another one's"


def test_a_base_model_of_the_hub_is_linked_with_its_licence(hub: Hub, tmp_path: Path) -> None:
    folder = model_folder(tmp_path / "base")
    (folder / "README.md").write_text("---\nlicense: mit\n---\n\n# mine\n")
    figures = {"before": {"divergence": 0.5, "agreement": 0.25}, "divergence": 0.125, "agreement": 0.75}
    heads = heads_folder(tmp_path / "heads", name="org/base", metrics={"2": figures | {"sure": 0.5, "right": 1.0}})
    skipstone.push(heads, "me/early-heads")
    said = card(hub.repos["me/early-heads"])
    assert "| 2 | 0.5 -> 0.125 | 0.25 -> 0.75 | 0.5 | 1 |" in said
    assert f"| fingerprint of the model | {target().fingerprint} |" in said
    assert "base_model:" not in said, "no card names a repository that may be a folder"
    skipstone.push(folder, "org/base")
    assert hub.repos["org/base"].files["README.md"] == (folder / "README.md").read_bytes(), "a user's own card"
    skipstone.load("org/base")
    skipstone.push(heads, "me/heads")
    assert "base_model: org/base" in card(hub.repos["me/heads"])
    assert "\nlicense:" not in card(hub.repos["me/heads"]), "its card does not lie here"
    from huggingface_hub import hf_hub_download

    hf_hub_download("org/base", "README.md")
    skipstone.push(heads, "me/more-heads")
    assert "\nlicense: mit\n" in card(hub.repos["me/more-heads"])
    assert "## Licence" not in card(hub.repos["me/more-heads"])


def test_a_draft_tells_which_layers_of_which_model_it_is(hub: Hub, tmp_path: Path) -> None:
    repo = hub.add("org/whole", everything(model_folder(tmp_path / "whole")))
    model, words = skipstone.load("org/whole")
    write_draft(ModelRunner(model), words, DraftLayers((0, 1, 2), 6, drafts=3), tmp_path / "draft")
    skipstone.push(tmp_path / "draft", "me/draft")
    said = card(hub.repos["me/draft"])
    assert "base_model: org/whole" in said
    assert f"| revision of the base model | {repo.branches['main']} |" in said
    assert "| layers of the base model | 0, 1, 2 of 6, counted from 0 |" in said
    assert f"| fingerprint of the base model | {target().fingerprint} |" in said
    assert 'skipstone.load("org/whole")' in said


def test_a_tuned_profile_leaves_without_the_name_of_the_machine(hub: Hub, tmp_path: Path) -> None:
    path = tuned_file(tmp_path / "cache", {"speed_up": 1.5})
    here = json.loads(path.read_text())
    skipstone.push(path, "me/tuned")
    there = json.loads(hub.repos["me/tuned"].files["tune.json"])
    assert here["key"].pop("node")
    assert there == here
    assert "| speed up | 1.5 |" in card(hub.repos["me/tuned"])


def test_a_second_push_leaves_no_weights_of_the_first(hub: Hub, tmp_path: Path) -> None:
    shards = model_folder(tmp_path / "shards", max_shard_size="20KB")
    skipstone.push(shards, "me/model")
    hub.repos["me/model"].files["notes.txt"] = b"somebody's"
    skipstone.push(model_folder(tmp_path / "whole", seed=1), "me/model")
    repo = hub.repos["me/model"]
    assert len(repo.messages) == 3
    assert [name for name in repo.files if "safetensors" in name] == ["model.safetensors"]
    assert repo.files["notes.txt"] == b"somebody's"
    assert repo.files["model.safetensors"] == (tmp_path / "whole" / "model.safetensors").read_bytes()


def test_a_branch_is_made_and_the_main_one_stays(hub: Hub, tmp_path: Path) -> None:
    skipstone.push(heads_folder(tmp_path / "one"), "me/heads")
    before = hub.repos["me/heads"].files
    skipstone.push(heads_folder(tmp_path / "two", seed=1), "me/heads", revision="v2")
    repo = hub.repos["me/heads"]
    assert repo.files == before
    other = repo.commits[repo.branches["v2"]]
    assert other["exit_heads.safetensors"] == (tmp_path / "two" / "exit_heads.safetensors").read_bytes()
    assert "heads=me/heads@v2" in other["README.md"].decode()
    skipstone.push(tmp_path / "one", "me/heads", revision="v2")
    assert repo.commits[repo.branches["v2"]]["exit_heads.safetensors"] == before["exit_heads.safetensors"]


def test_a_card_that_somebody_wrote_stays_and_a_licence_that_somebody_chose_too(hub: Hub, tmp_path: Path) -> None:
    folder, told = heads_folder(tmp_path / "heads"), []
    hub.add("me/theirs", {"README.md": b"---\nlicense: mit\n---\n# My words\n"})
    skipstone.push(folder, "me/theirs", say=told.append)
    assert card(hub.repos["me/theirs"]) == "---\nlicense: mit\n---\n# My words\n"
    assert told == ["README.md of me/theirs stays as it is: somebody wrote it, so it says nothing new of these files"]
    assert pushed(hub.repos["me/theirs"]) == everything(folder)
    hub.add("me/chosen", {"README.md": b"---\nlicense: mit\n---\n"})  # as the hub's own form makes it
    skipstone.push(folder, "me/chosen", say=told.append)
    assert "license: mit" in card(hub.repos["me/chosen"])
    assert MARK in card(hub.repos["me/chosen"])
    repo = hub.repos["me/chosen"]
    repo.commit("main", {**repo.files, "README.md": card(repo).replace("license: mit", "license: bsd").encode()}, "form")
    skipstone.push(heads_folder(tmp_path / "other", seed=1), "me/chosen", say=told.append)
    assert "license: bsd" in card(repo)
    assert hashlib.sha256((tmp_path / "other" / "exit_heads.safetensors").read_bytes()).hexdigest() in card(repo)
    assert len(told) == 1


def test_private_is_never_public_and_a_repository_holds_one_kind_of_thing(hub: Hub, tmp_path: Path) -> None:
    folder = heads_folder(tmp_path / "heads")
    skipstone.push(folder, "me/secret", private=True)
    assert hub.repos["me/secret"].private
    skipstone.push(folder, "me/secret", private=True)
    open_one = hub.add("me/open", {})
    with pytest.raises(ValueError, match="me/open is there already and public: make it private in its settings"):
        skipstone.push(folder, "me/open", private=True)
    assert open_one.files == {}
    before = hub.repos["me/secret"].files
    with pytest.raises(ValueError, match="me/secret holds exit heads: a model needs a repository of its own"):
        skipstone.push(model_folder(tmp_path / "model"), "me/secret")
    assert hub.repos["me/secret"].files == before


@pytest.mark.parametrize("part", ["/lfs/", "/commit/"])
def test_a_push_that_fails_leaves_what_was_there_and_can_be_repeated(part: str, hub: Hub, tmp_path: Path) -> None:
    skipstone.push(heads_folder(tmp_path / "old"), "me/heads")
    before, new = dict(hub.repos["me/heads"].files), heads_folder(tmp_path / "new", seed=1)
    hub.breaks = part
    with pytest.raises(
        OSError, match=r"^the push to me/heads failed: the hub answers 507 for me/heads: .*disk of the hub is full"
    ):
        skipstone.push(new, "me/heads")
    assert hub.repos["me/heads"].files == before
    with pytest.raises(OSError, match=r"; the repository was made for it$"):
        skipstone.push(new, "me/fresh")
    hub.breaks = None
    skipstone.push(new, "me/heads")
    skipstone.push(new, "me/fresh")
    assert pushed(hub.repos["me/heads"]) == pushed(hub.repos["me/fresh"]) == everything(new)


def test_nobody_pushes_without_a_right_to(hub: Hub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = heads_folder(tmp_path / "heads")
    there = hub.add("me/heads", {})
    monkeypatch.setenv("HF_TOKEN", "hf_wrong")
    with pytest.raises(OSError, match=r"the push to me/heads failed: the hub answers 403 for me/heads: .*no right to write"):
        skipstone.push(folder, "me/heads")
    with pytest.raises(OSError, match="the push to me/new failed: "):
        skipstone.push(folder, "me/new")
    assert list(hub.repos) == ["me/heads"]
    assert there.files == {}


def _cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-40])


def _without(name: str) -> Callable[[Path], Any]:
    return lambda folder: (folder / name).unlink()


def _write(text: str, name: str = "") -> Callable[[Path], Any]:
    return lambda path: (path / name if name else path).write_text(text)


def _copy_shard(folder: Path) -> None:
    first, second, *_ = sorted(folder.glob("model-*"))
    shutil.copy(first, second)


TUNED_OF_OLD = '{"version": 5, "key": {}, "about": {}, "drafters": {}, "state": {}}'
REFUSED: dict[str, tuple[str, Callable[[Path], Any], str]] = {
    "heads without weights": ("heads", _without("exit_heads.safetensors"), "is incomplete: it has no exit_heads.safetensors"),
    "a model without weights": ("model", _without("model.safetensors"), "is incomplete: it has no weights"),
    "a cut model": ("model", lambda path: _cut(path / "model.safetensors"), "model.safetensors is damaged"),
    "a model without a tokenizer": ("model", _without("tokenizer.json"), "is incomplete: it has no tokenizer"),
    "a shard too few": ("shards", lambda path: sorted(path.glob("model-*"))[1].unlink(), "incomplete: it has no model-00002"),
    "a shard of another model": ("shards", _copy_shard, r"is incomplete: model-00002\S+ lacks"),
    "somebody's data": ("model", _write('{"tokens": 3}', "data.json"), "is damaged, or not skipstone's: .*sha256"),
    "empty data": ("model", _write("{}", "data.json"), "data.json is damaged, or not skipstone's"),
    "a method that is none": ("guessing", bool, "guessing"),
    "somebody else's model": ("foreign", bool, "holds a model that skipstone has neither trained nor exported"),
    "a run": ("run", bool, "the folder of a run: push .*heads"),
    "an empty folder": ("empty", bool, "holds nothing that skipstone has made"),
    "half a profile": ("profile", _write('{"attention": [1]}'), "says nothing of a layer set: model is"),
    "a tuned profile of old": ("profile", _write(TUNED_OF_OLD), "of version 5, this skipstone reads version"),
}
SPOILT: dict[str, Callable[[Path], Path]] = {
    **MADE,
    "guessing": lambda folder: model_folder(folder / "model", own={"method": "guessing"}),
    "foreign": lambda folder: model_folder(folder / "model", own=None),
    "run": lambda folder: heads_folder(folder / "run" / "heads").parent,
    "empty": lambda folder: folder,
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_is_none_of_ours_or_incomplete_is_refused_before_the_hub_is_asked(case: str, hub: Hub, tmp_path: Path) -> None:
    kind, spoil, message = REFUSED[case]
    (tmp_path / "made").mkdir()
    path = SPOILT[kind](tmp_path / "made")
    spoil(path)
    with pytest.raises((ValueError, OSError), match=message) as caught:
        skipstone.push(path, "me/thing")
    assert str(path) in str(caught.value)
    assert hub.asked == []


def test_a_repository_is_an_organisation_and_a_name(hub: Hub, tmp_path: Path) -> None:
    folder = heads_folder(tmp_path / "heads")
    for name in ("heads", "me/", "me/heads@v1", "a/b/c", "me/he ads", "../heads", ""):
        with pytest.raises(ValueError, match="a repository is ORG/NAME, found"):
            skipstone.push(folder, name)
    assert hub.asked == []


def test_files_that_nobody_asked_for_stay_here(hub: Hub, tmp_path: Path) -> None:
    folder = model_folder(tmp_path / "model")
    for name in ("training_args.bin", "optimizer.pt", "other.safetensors", ".env"):
        (folder / name).write_bytes(b"private")
    torch.save({"a": 1}, folder / "pytorch_model.bin")
    (folder / "adapter").mkdir()
    (folder / "LICENSE").write_text("mine")
    skipstone.push(folder, "me/model")
    assert set(pushed(hub.repos["me/model"])) == {
        *("LICENSE", "config.json", "generation_config.json", "model.safetensors"),
        *("chat_template.jinja", "tokenizer.json", "tokenizer_config.json"),
    }
