"""Loads by a hub id, with and without a revision, and the sentence where there is nothing to load."""

import json
import socket
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from huggingface_hub import constants, hf_hub_download
from huggingface_hub.utils import _http

import skipstone
from skipstone.engines.mapped_loading import load_for_decoding
from skipstone.engines.model_runner import ModelRunner
from skipstone.engines.mtp_head import attached_mtp
from skipstone.methods.adadecode.heads import load_heads
from skipstone.methods.drafting.layer_sets import load_profile
from skipstone.models import fetching
from skipstone.models.fetching import HubName, hub_name
from skipstone.models.mapped_model import MappedModel
from skipstone.models.tokenizer import read_tokenizer
from skipstone.models.vocabularies import vocabulary
from tests.helpers import hub as stand_in
from tests.helpers.hub import Hub
from tests.helpers.machine import prompt
from tests.helpers.mtp_checkpoints import mtp_checkpoint
from tests.helpers.parcels import draft_folder, everything, heads_folder, model_folder, profile_file, target, tuned_file
from tests.helpers.settings import QUIET
from tests.helpers.support import tokenizer

pytestmark = QUIET


def new_tokens(method: Any, tokens: int = 16) -> Any:
    return skipstone.generate(target().model, prompt(9), method, max_new_tokens=tokens, do_sample=False)


NAMES: dict[str, HubName | None] = {
    "org/name": HubName("org/name", None),
    "org/name@main": HubName("org/name", "main"),
    "org/na.me-1_b@refs/pr/1": HubName("org/na.me-1_b", "refs/pr/1"),
    "gpt2": HubName("gpt2", None),
    "gpt2@v1": HubName("gpt2", "v1"),
    "org/name:Q4_K_M": HubName("org/name", None, "Q4_K_M"),
    "org/name@v1:q8_0": HubName("org/name", "v1", "q8_0"),
    **dict.fromkeys(
        ("", "./name", "../name", "/org/name", "a/b/c", "org/name@", "@v1", "org/na me", "a@b@c", "~/a", "a:b:c", "a/b:")
    ),
}


def test_a_hub_id_is_a_name_with_or_without_a_revision() -> None:
    assert {name: hub_name(name) for name in NAMES} == NAMES


def test_heads_by_their_hub_id_are_those_of_the_folder(hub: Hub, tmp_path: Path) -> None:
    old, new = heads_folder(tmp_path / "old"), heads_folder(tmp_path / "new", seed=1)
    model, hidden = target(), torch.randn(1, 3, 32)
    hub.add("me/heads", everything(old))
    first = hub.repos["me/heads"].branches["main"]
    hub.repos["me/heads"].commit("main", everything(new), "better ones")
    for name, folder in (("me/heads", new), (f"me/heads@{first}", old), ("me/heads@main", new)):
        loaded, here = load_heads(name, model), load_heads(folder, model)
        with torch.no_grad():
            assert torch.equal(loaded.logits(model, 0, hidden), here.logits(model, 0, hidden)), name
    by_id, by_folder = (new_tokens(f"adadecode heads={heads} confidence_threshold=0.1") for heads in ("me/heads", new))
    assert by_id.new_tokens == by_folder.new_tokens
    assert by_id.stats.drafted == by_folder.stats.drafted > 0


def test_both_files_are_of_one_commit_and_the_hub_is_asked_once(
    hub: Hub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    files = "exit_heads.json", "exit_heads.safetensors"
    hub.add("me/heads", everything(heads_folder(tmp_path / "heads")))
    commit = hub.repos["me/heads"].branches["main"]
    folder = fetching.fetch("me/heads", *files)
    requests = [f"{verb} /me/heads/resolve/{commit}/{files[1]}" for verb in ("HEAD", "GET")]
    assert [line for line in hub.asked if "safetensors" in line] == requests
    asked = len(hub.asked)
    hub.repos["me/heads"].commit("main", {}, "moved on")
    assert fetching.fetch("me/heads", *files) == folder
    fetching.fetch.cache_clear()
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    assert fetching.fetch("me/heads", *files) == folder, "it is there without a network"
    assert len(hub.asked) == asked


def test_a_model_and_a_draft_model_of_a_revision(hub: Hub, tmp_path: Path) -> None:
    repo = hub.add("me/model", everything(model_folder(tmp_path / "old")))
    repo.branches["v1"] = repo.branches["main"]
    repo.commit("main", everything(model_folder(tmp_path / "new", seed=1)), "another one")
    for name, seed in (("me/model@v1", 0), ("me/model", 1)):
        model, words = skipstone.load(name)
        assert torch.equal(model.lm_head.weight, target(seed=seed).model.lm_head.weight), name
        assert words("hello")["input_ids"]
        assert model.config._commit_hash == repo.at(name.partition("@")[2] or "main")
    drafts = hub.add("me/draft", everything(draft_folder(tmp_path / "draft")))
    drafts.branches["v1"] = drafts.branches["main"]
    drafts.commit("main", {}, "emptied")
    by_id = new_tokens("speculative draft_model=me/draft@v1")
    assert by_id.new_tokens == new_tokens("autoregressive").new_tokens
    assert by_id.stats.drafted == new_tokens(f"speculative draft_model={tmp_path / 'draft'}").stats.drafted > 0


def test_the_mtp_layer_of_a_revision(hub: Hub, tmp_path: Path) -> None:
    folders = [mtp_checkpoint(tmp_path / str(seed), "glm4_moe", seed=seed, files=3) for seed in (0, 1)]
    for folder in folders:
        tokenizer().save_pretrained(folder)
    repo = hub.add("me/model", everything(folders[0]))
    repo.branches["v1"] = repo.branches["main"]
    repo.commit("main", everything(folders[1]), "another one")
    for name, folder in (("me/model@v1", folders[0]), ("me/model", folders[1])):
        head, expected = (attached_mtp(ModelRunner(skipstone.load(one)[0])) for one in (name, folder))
        assert head is not None
        assert expected is not None
        assert torch.equal(head.layer.eh_proj.weight, expected.layer.eh_proj.weight), name


def test_files_that_the_hubs_cache_lacks_are_fetched_once_for_a_mapped_model(hub: Hub, tmp_path: Path) -> None:
    files = everything(model_folder(tmp_path / "model"))
    del files["generation_config.json"]
    hub.add("me/model", files | {"chat_template.jinja": b"{{ messages }}"})
    for file in ("config.json", "model.safetensors", "tokenizer.json"):
        hf_hub_download("me/model", file)
    model, words = load_for_decoding("me/model")
    assert isinstance(model, MappedModel)
    assert words.chat_template == "{{ messages }}"
    assert words.special_tokens_map == read_tokenizer(tmp_path / "model").special_tokens_map
    asked = len(hub.asked)
    load_for_decoding("me/model")
    assert len(hub.asked) == asked
    named, _ = load_for_decoding("me/model@main")
    assert (named.config.name_or_path, vocabulary(named.config.name_or_path)) == ("me/model", words.get_vocab())


QUANTISED = (
    *("small-Q4_K_M.gguf", "small-UD-Q4_K_M.gguf", "small.q8_0.gguf", "IQ4_XS/small-00001-of-00002.gguf", "mmproj-BF16.gguf"),
    *("IQ4_XS/small-00002-of-00002.gguf", "small-Q6_K-00002-of-00002.gguf", "small-Q6_K-00001-of-00002.gguf"),
    *("one-F16.gguf", "two-F16.gguf", "imatrix.gguf", "README.md"),
)
TAGS = {
    "Q4_K_M": QUANTISED[:1],
    "ud-q4_k_m": QUANTISED[1:2],
    "small-Q4_K_M": QUANTISED[:1],
    "Q8_0": QUANTISED[2:3],
    "iq4_xs": (QUANTISED[3], QUANTISED[5]),
    "q6_k": (QUANTISED[7], QUANTISED[6]),
    "one-f16": QUANTISED[8:9],
}


@pytest.mark.parametrize("tag", TAGS)
def test_a_tag_picks_a_gguf_file_with_all_its_parts(tag: str, hub: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    hub.add("me/files", {file: file.encode() for file in QUANTISED}).commit("v2", {}, "emptied")
    commit = hub.repos["me/files"].branches["main"]
    for is_offline in (False, True):
        stand_in.forget()
        monkeypatch.setattr(constants, "HF_HUB_OFFLINE", is_offline)
        path = Path(fetching.local_model(f"me/files@main:{tag}"))
        folder = path.parents[TAGS[tag][0].count("/")]
        assert path == folder / TAGS[tag][0]
        assert folder.name == commit
        cached = {one.relative_to(folder).as_posix(): one.read_bytes().decode() for one in folder.rglob("*.gguf")}
        assert cached == {file: file for file in TAGS[tag]}


def test_a_tag_that_picks_no_single_file_lists_the_tags(hub: Hub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    files = dict.fromkeys(QUANTISED, b"GGUF")
    hub.add("me/files", files)
    hub.add("me/both", files | {"config.json": (model_folder(tmp_path) / "config.json").read_bytes()})
    tags = "F16, IQ4_XS, Q4_K_M, Q6_K, UD-Q4_K_M, q8_0"
    failures = {
        "me/files:Q5_0": f"me/files has no GGUF file Q5_0: it has {tags}",
        "me/files:f16": "me/files has several GGUF files f16: name one by all of its name, such as me/files:one-F16",
        "me/files": f"me/files has GGUF files in the place of safetensors, {tags}: name one of them, such as me/files:Q4_K_M",
        "me/both": f"me/both has GGUF files in the place of safetensors, {tags}: name one of them, such as me/both:Q4_K_M",
        "me/files@v9:Q8_0": "me/files@v9: no folder or file here, and me/files has no revision 'v9' on the hub",
    }
    for name, message in failures.items():
        with pytest.raises(OSError) as caught:
            skipstone.load(name)
        assert str(caught.value) == message
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    with pytest.raises(OSError, match="the hub is not asked"):
        skipstone.load("me/files:Q8_0")


@pytest.mark.parametrize("method", ["self_speculative", "swift"])
def test_a_layer_set_by_its_hub_id(method: str, hub: Hub, tmp_path: Path) -> None:
    path = profile_file(tmp_path / "profile.json")
    hub.add("me/set", {"profile.json": path.read_bytes()})
    assert load_profile("me/set", target().model) == load_profile(path, target().model)
    assert new_tokens(f"{method} profile=me/set").stats.drafted == new_tokens(f"{method} profile={path}").stats.drafted > 0
    with pytest.raises(ValueError, match=r"me/set is the profile of another model \(me/target; this one is"):
        load_profile("me/set", target(layers=5).model)


@pytest.fixture(scope="module")
def tuned(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The profile that `auto` has learnt of the target, with the name of a machine that is not this one."""
    path = tuned_file(tmp_path_factory.mktemp("tuned"), {})
    held = json.loads(path.read_text())
    held["key"]["node"] = "elsewhere"
    path.write_text(json.dumps(held))
    return path


def test_what_another_machine_has_learnt_is_where_auto_begins(hub: Hub, tuned: Path, tmp_path: Path) -> None:
    def first_position(method: str, log: Path) -> int:
        """How much text `auto` has learnt from when a request begins."""
        new_tokens(f"auto use_profile=false {method} log={log}", tokens=4)
        return json.loads(log.read_text().splitlines()[0])["state"]["position"]

    hub.add("me/tuned", {"tune.json": tuned.read_bytes()})
    assert first_position("", tmp_path / "none.jsonl") == 0
    for name, profile in (("hub", "me/tuned"), ("file", tuned)):
        position = first_position(f"profile={profile}", tmp_path / f"{name}.jsonl")
        assert position == json.loads(tuned.read_text())["state"]["position"] > 10


MISFITS: dict[str, Callable[[dict[str, Any]], Any]] = {
    "was learnt elsewhere: its model is 0000000000000000, here it is": lambda held: held["key"].update(model="0" * 16),
    "was learnt elsewhere: its machine is abacus, here it is": lambda held: held["key"].update(machine="abacus"),
    "of version 1, this skipstone reads version": lambda held: held.update(version=1),
    "says nothing of a profile of `skipstone tune`": lambda held: held.pop("state"),
    "is damaged: its state cannot be read": lambda held: held["state"].clear(),
}


def test_a_tuned_profile_that_does_not_fit_is_an_error(tuned: Path, tmp_path: Path) -> None:
    for words, change in MISFITS.items():
        held, path = json.loads(tuned.read_text()), tmp_path / "tuned.json"
        change(held)
        path.write_text(json.dumps(held))
        with pytest.raises(ValueError, match=words):
            new_tokens(f"auto profile={path}", tokens=4)


LOADS: dict[str, Callable[[str], Any]] = {
    "heads": lambda name: new_tokens(f"adadecode heads={name}", tokens=4),
    "layer set": lambda name: new_tokens(f"self_speculative profile={name}", tokens=4),
    "tuned": lambda name: new_tokens(f"auto profile={name}", tokens=4),
    "draft": lambda name: new_tokens(f"speculative draft_model={name}", tokens=4),
    "model": skipstone.load,
}
FILES = {"heads": "exit_heads.json", "layer set": "profile.json", "tuned": "tune.json"}


def refusal(what: str, name: str) -> str:
    with pytest.raises(OSError) as caught:
        LOADS[what](name)
    message = str(caught.value)
    assert "\n" not in message
    assert len(message) < 330, message
    assert name in message
    return message


@pytest.mark.parametrize("what", LOADS)
def test_what_cannot_be_had_is_one_sentence(what: str, hub: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    hub.add("me/gated", {"config.json": b"{}"}, gated=True)
    hub.add("me/there", {"notes.txt": b""})
    hub.add("me/secret", {"config.json": b"{}"}, private=True)
    assert "the hub has no repository me/none, or a private one" in refusal(what, "me/none")
    assert f"me/gated is gated on the hub: ask for access at {hub.address}/me/gated" in refusal(what, "me/gated")
    assert "me/there has no revision 'v9' on the hub" in refusal(what, "me/there@v9")
    if what in FILES:
        assert f"me/there has no file {FILES[what]} on the hub" in refusal(what, "me/there")
    monkeypatch.setenv("HF_TOKEN", "hf_wrong")
    assert "the hub has no repository me/secret, or a private one" in refusal(what, "me/secret")
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    assert "the hub is not asked (HF_HUB_OFFLINE is set)" in refusal(what, "me/offline")


def test_a_hub_that_does_not_answer_is_one_sentence(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    with socket.socket() as taken:  # bound and not listening: nobody else answers there
        taken.bind(("127.0.0.1", 0))
        address = f"http://127.0.0.1:{taken.getsockname()[1]}"
        stand_in.use(monkeypatch, address, tmp_path / "cache")
        monkeypatch.setattr(_http.time, "sleep", lambda _: None)  # between the client's tries
        assert f"the hub at {address} cannot be reached" in refusal("model", "me/silent")


def test_a_folder_here_comes_before_a_repository(hub: Hub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    heads_folder(tmp_path / "me" / "heads")
    profile_file(tmp_path / "me" / "set")
    assert new_tokens("adadecode heads=me/heads confidence_threshold=0.1").stats.drafted > 0
    assert new_tokens("self_speculative profile=me/set").stats.drafted > 0
    with pytest.raises(OSError, match=r"me/missing\.json"):
        new_tokens("self_speculative profile=me/missing.json")
    assert hub.asked == []
