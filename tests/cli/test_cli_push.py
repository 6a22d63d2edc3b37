"""`skipstone push`: what it prints, and one sentence for every mistake."""

import hashlib
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.helpers.commandline import assert_refused, run, succeed
from tests.helpers.hub import TOKEN, Hub
from tests.helpers.parcels import everything, heads_folder, model_folder


def test_the_address_of_the_commit_is_what_is_printed(hub: Hub, tmp_path: Path) -> None:
    folder = heads_folder(tmp_path / "heads")
    first = succeed("push", folder, "me/heads", "--private")
    repo = hub.repos["me/heads"]
    assert first.stdout == f"{hub.address}/me/heads/commit/{repo.branches['main']}\n"
    assert repo.private
    succeed("push", folder, "me/heads", "--revision", "v2")
    assert set(repo.branches) == {"main", "v2"}
    assert repo.files["exit_heads.safetensors"] == (folder / "exit_heads.safetensors").read_bytes()
    hub.add("me/theirs", {"README.md": b"# mine\n"})
    assert "README.md of me/theirs stays as it is" in succeed("push", folder, "me/theirs").stderr


def test_a_dry_run_shows_the_files_and_the_card_and_asks_nobody(hub: Hub, tmp_path: Path) -> None:
    folder = model_folder(tmp_path / "model")
    (folder / "training_args.bin").write_bytes(b"1")
    before = everything(tmp_path)
    said = succeed("push", folder, "me/model", "--dry-run").stdout
    assert said.startswith("a model, to me/model:\n")
    weights = folder / "model.safetensors"
    digest = hashlib.sha256(weights.read_bytes()).hexdigest()
    assert f"\n  model.safetensors  {weights.stat().st_size:,} bytes  {digest}\n" in said
    assert "\nstays here: training_args.bin\n" in said
    assert hub.asked == []
    assert everything(tmp_path) == before
    succeed("push", folder, "me/model")
    assert said.endswith(f"\nREADME.md:\n\n{hub.repos['me/model'].files['README.md'].decode()}"), "the card that comes"


@pytest.mark.product
def test_a_process_of_its_own_pushes_and_decodes_by_the_environment(hub: Hub, tmp_path: Path) -> None:
    """HF_ENDPOINT, HF_TOKEN and HF_HOME as a user sets them, which huggingface_hub reads when it is imported."""
    folder = model_folder(tmp_path / "model")
    usual = {name: value for name, value in os.environ.items() if not name.startswith("HF_")}
    own = {"HF_ENDPOINT": hub.address, "HF_TOKEN": TOKEN, "HF_HOME": str(tmp_path / "home"), "HF_HUB_DISABLE_XET": "1"}
    common = {"env": usual | own, "capture_output": True, "text": True, "check": False, "timeout": 300}
    program = [sys.executable, "-m", "skipstone"]
    pushed = subprocess.run([*program, "push", str(folder), "me/model"], **common)
    assert pushed.returncode == 0, pushed.stderr
    commit = pushed.stdout.strip().rpartition("/")[2]
    said = subprocess.run(
        [*program, "generate", f"me/model@{commit}", "--prompt", "hello the", "--max-new-tokens", "4", "--stats"], **common
    )
    assert said.returncode == 0, said.stderr
    assert "layerskip" in said.stderr, "the method that was pushed with it"


def test_a_name_that_is_none_is_refused(hub: Hub, tmp_path: Path) -> None:
    folder = heads_folder(tmp_path / "heads")
    for more in ((), ("--dry-run",)):
        assert_refused(run("push", folder, "heads", *more), "a repository is ORG/NAME, found 'heads'")
        assert_refused(run("push", folder, "me/heads@v1", *more), "a branch is named by --revision")
    assert hub.asked == []


def test_what_cannot_be_pushed_or_loaded_is_one_line(hub: Hub, folder: Path, tmp_path: Path) -> None:
    assert_refused(run("push", tmp_path / "nowhere", "me/x"), f"{tmp_path / 'nowhere'}: no such file or folder")
    assert_refused(run("push", folder, "me/x"), "holds a model that skipstone has neither trained nor exported")
    heads = heads_folder(tmp_path / "heads")
    hub.breaks = "/commit/"
    assert_refused(run("push", heads, "me/x"), "the push to me/x failed: the hub answers 507")
    text = ("generate", folder, "--prompt", "x", "--method")
    assert_refused(
        run(*text, "adadecode heads=me/none"), "me/none: no folder or file here, and the hub has no repository me/none"
    )
    assert_refused(run(*text, "auto profile=me/none"), "me/none: no folder or file here, and the hub has no repository me/none")
    assert_refused(run("generate", "me/none@v1", "--prompt", "x"), "me/none@v1: no folder or file here, and the hub has no")
