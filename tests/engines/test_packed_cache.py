"""The cache of quantised panels: the same bits, fewer reads, and every broken file is made again."""

import json
import os
import stat
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from skipstone import Speculative
from skipstone.cli import cache as cache_verb
from skipstone.engines import mapped_loading
from skipstone.engines.mapped_loading import load_for_decoding
from skipstone.engines.model_runner import ModelRunner
from skipstone.engines.native import packed_cache
from skipstone.models.weight_files import weight_files
from skipstone.utils import files
from tests.helpers import families
from tests.helpers.commandline import run, succeed
from tests.helpers.native import NATIVE_ONLY
from tests.helpers.support import tokenizer

pytestmark = NATIVE_ONLY


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A checkpoint, next to an empty cache."""
    monkeypatch.setenv("SKIPSTONE_CACHE", str(tmp_path / "cache"))
    files.warn_of_cache.cache_clear()
    families.build("llama").save_pretrained(tmp_path / "model", max_shard_size="40KB")
    tokenizer().save_pretrained(tmp_path / "model")
    return tmp_path / "model"


def logits(folder: Path, quantize: str = "int4", **more: Any) -> Tensor:
    """Those of a model that is loaded now."""
    model, _ = load_for_decoding(folder, quantize=quantize, **more)
    runner, ids = ModelRunner(model), families.prompts(1)[0][None]
    return runner.project(runner.read(ids))


def only_file(folder: Path) -> Path:
    (path,) = (folder.parent / "cache" / "packed").iterdir()
    return path


def overwrite_weights(folder: Path) -> None:
    """Zeros in all weights, with the old sizes, names and times."""
    for path in folder.glob("*.safetensors"):
        state, data = path.stat(), path.read_bytes()
        begin = 8 + int.from_bytes(data[:8], "little")
        path.write_bytes(data[:begin] + bytes(len(data) - begin))
        os.utime(path, ns=(state.st_atime_ns, state.st_mtime_ns))


@pytest.mark.parametrize("quantize", ["int8", "int4"])
def test_a_second_start_has_the_same_bits_and_reads_no_matrix(quantize: str, folder: Path) -> None:
    tokenizer().save_pretrained(folder)
    families.build("llama", tie_word_embeddings=True).save_pretrained(folder)
    expected = logits(folder, quantize, cache=False)
    assert not list(packed_cache.entries())
    assert torch.equal(logits(folder, quantize), expected)
    assert stat.S_IMODE(only_file(folder).parent.stat().st_mode) == 0o700
    overwrite_weights(folder)
    norms = logits(folder, quantize)  # which come from the checkpoint, and are 0 now
    assert torch.equal(norms, torch.zeros_like(norms))
    assert not torch.equal(logits(folder, quantize, cache=False), expected)
    (entry,) = packed_cache.entries()
    assert entry.about["quantize"] == quantize
    assert packed_cache.damaged(entry) == []


@pytest.mark.parametrize("cache", [True, False])
def test_a_draft_model_uses_the_cache_as_its_target_does(cache: bool, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    target = ModelRunner(load_for_decoding(folder, cache=cache)[0])
    Speculative(str(folder), draft_quantize="int4").draft_model_for(target)
    assert len(list(packed_cache.entries())) == cache
    monkeypatch.setattr(mapped_loading, "available_memory_bytes", lambda: 100)
    with pytest.raises(ValueError, match=r"draft model .* need .* GB of memory"):
        Speculative(str(folder), draft_quantize="int8").draft_model_for(target)


def test_matrices_come_from_the_file(folder: Path) -> None:
    """A byte of a matrix that is changed in the file changes the logits, and only `verify` finds it."""
    expected = logits(folder)
    data = bytearray((path := only_file(folder)).read_bytes())
    data[100] ^= 0x11
    path.write_bytes(data)
    assert not torch.equal(logits(folder), expected)
    assert json.loads(succeed("cache", "list", "--json").stdout)[0]["model"] == str(folder)
    printed = run("cache", "verify")
    assert (printed.exit_code, "damaged, removed" in printed.stdout) == (cache_verb.DAMAGED, True)
    assert torch.equal(logits(folder), expected)
    assert ": good" in succeed("cache", "verify").stdout


def test_unfinished_and_older_files_are_named_and_removed_only_by_clear(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    logits(folder)
    (left := only_file(folder).with_name(".left.panels")).touch()
    monkeypatch.setattr(packed_cache, "VERSION", packed_cache.VERSION + 1)
    assert "1 unfinished files" in succeed("cache", "list").stderr
    assert "of an older format" in succeed("cache", "verify").stdout
    assert left.exists()
    assert "removed 2 files" in succeed("cache", "clear").stdout
    assert not any(left.parent.iterdir())


def test_a_hub_id_is_listed_and_a_file_that_is_not_whole_says_so(folder: Path) -> None:
    model, _ = load_for_decoding(folder)
    model.config.name_or_path = "org/model"
    ModelRunner(model, quantize="int4").engine.cache_panels(model)
    assert "org/model" in succeed("cache", "list").stdout
    only_file(folder).write_bytes(b"x")
    assert "(not whole)" in succeed("cache", "list").stdout


def test_mapped_files_are_read_only_so_they_may_be_larger_than_memory(folder: Path) -> None:
    logits(folder)
    _kept = load_for_decoding(folder, quantize="int4")
    lines = [line.split() for line in Path("/proc/self/maps").read_text().splitlines() if str(folder.parent) in line]
    assert {Path(path).suffix for *_, path in lines} == {".safetensors", ".panels"}
    assert {permissions for _, permissions, *_ in lines} == {"r--s"}


CUTS = {"empty": 0.0, "cut in the panels": 0.5, "cut in the index": 0.99, "cut at the end": 0.9999}
LIMITS = {"small limit": "1000", "limit in words": "10GB"}


@pytest.mark.parametrize("damage", [*CUTS, "foreign", "other sizes", "another version"])
def test_a_file_that_is_not_whole_is_made_again(damage: str, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    expected = logits(folder)
    data = (path := only_file(folder)).read_bytes()
    if damage == "another version":
        with monkeypatch.context() as patch:
            patch.setattr(packed_cache, "VERSION", 0)
            logits(folder)
        (other,) = {*path.parent.iterdir()} - {path}
        os.replace(other, path)
    elif damage == "other sizes":
        packed_cache.write(weight_files(folder).identity, "int4", "", [torch.zeros(128, dtype=torch.uint8)] * 4)
    else:
        path.write_bytes(b"x" * len(data) if damage == "foreign" else data[: int(len(data) * CUTS[damage])])
    assert torch.equal(logits(folder), expected)
    assert only_file(folder).read_bytes() == data


def test_a_flipped_bit_outside_the_panels_is_found_at_the_start(folder: Path) -> None:
    """It could move a matrix to another place."""
    logits(folder)
    (entry,) = packed_cache.entries()
    data, identity = entry.path.read_bytes(), weight_files(folder).identity
    for place in range(entry.about["size"], len(data)):
        entry.path.write_bytes(data[:place] + bytes([data[place] ^ 1]) + data[place + 1 :])
        assert packed_cache.read(identity, "int4") is None
    entry.path.write_bytes(data)
    assert packed_cache.read(identity, "int4") is not None


@pytest.mark.parametrize("change", ["time", "size", "header"])
def test_another_checkpoint_at_the_same_place_is_another_entry(change: str, folder: Path) -> None:
    logits(folder)
    weights = next(folder.glob("*.safetensors"))
    if change == "time":
        os.utime(weights, ns=(1, 1))
    else:
        families.build("llama", seed=3).save_pretrained(folder, max_shard_size="40KB" if change == "header" else "30KB")
    assert torch.equal(logits(folder), logits(folder, cache=False))
    assert len(list(packed_cache.entries())) == 2


def test_a_checkpoint_that_changes_while_it_is_read_is_refused(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    own = packed_cache.read

    def change(*given: Any) -> Any:
        os.utime(next(folder.glob("*.safetensors")), ns=(1, 1))
        return own(*given)

    monkeypatch.setattr(packed_cache, "read", change)
    with pytest.raises(ValueError, match="changed while it was read: load it again"):
        logits(folder)
    assert not list(packed_cache.entries())


@pytest.mark.parametrize(
    "obstacle", ["full disk", "read-only folder", "small disk", "small limit", "limit in words", "no home"]
)
def test_what_cannot_be_written_is_a_warning_and_no_cache(obstacle: str, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*_: Any) -> None:
        raise OSError(28 if obstacle == "full disk" else 30, obstacle)

    logits(folder, "int8")
    (other,) = packed_cache.entries()
    if obstacle == "full disk":
        monkeypatch.setattr(packed_cache, "_write_panels", fails)
    elif obstacle == "read-only folder":
        monkeypatch.setattr(packed_cache.tempfile, "mkstemp", lambda **_: fails())
    elif obstacle == "small disk":
        monkeypatch.setattr(packed_cache, "DISK_RESERVE_BYTES", 1 << 60)
    elif obstacle in LIMITS:
        monkeypatch.setenv(packed_cache.LIMIT_VARIABLE, LIMITS[obstacle])
    else:
        monkeypatch.setattr(packed_cache, "cache_place", lambda *_: None)
    remedy = "SKIPSTONE_PACKED_BYTES to a larger number" if obstacle in LIMITS else "SKIPSTONE_CACHE to a writable folder"
    with pytest.warns(RuntimeWarning, match=f"cannot write its cache .* set {remedy}"):
        found = logits(folder)
    assert torch.equal(found, logits(folder, cache=False))
    assert list(folder.parent.rglob("*.panels")) == [other.path]


def test_a_file_that_another_process_removes_meanwhile_is_no_obstacle(folder: Path) -> None:
    place = packed_cache.path_of([], "int4")
    assert place is not None
    place.parent.mkdir(parents=True)
    for name in (place.name, f".{place.name}"):
        place.with_name(name).symlink_to(folder / "removed")
    logits(folder)
    (entry,) = packed_cache.entries()
    assert packed_cache.damaged(entry) == []


def test_the_entry_that_was_not_used_for_longest_goes_first(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    logits(folder, "int8")
    logits(folder, "int4")
    for one in packed_cache.entries():
        os.utime(one.path, (1, 100 if one.about["quantize"] == "int4" else 50))
    logits(folder, "int8")  # which makes it the newest
    has_room_for_two = int(1.2 * sum(one.size for one in packed_cache.entries()))
    monkeypatch.setenv(packed_cache.LIMIT_VARIABLE, str(has_room_for_two))
    for path in folder.glob("*.safetensors"):
        os.utime(path, ns=(1, 1))  # another checkpoint
    logits(folder, "int4")
    found = {(one.about["quantize"], one.about["identity"][0][2] == 1) for one in packed_cache.entries()}
    assert found == {("int8", False), ("int4", True)}


def test_the_entry_that_is_replaced_does_not_count(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for quantize in ("int8", "int4"):
        logits(folder, quantize)
    monkeypatch.setenv(packed_cache.LIMIT_VARIABLE, str(int(1.1 * sum(one.size for one in packed_cache.entries()))))
    (replaced,) = (one.path for one in packed_cache.entries() if one.about["quantize"] == "int4")
    replaced.write_bytes(replaced.read_bytes()[:-1])
    logits(folder, "int4")
    assert {one.about["quantize"] for one in packed_cache.entries()} == {"int8", "int4"}


def test_processes_that_write_at_once_do_not_disturb_each_other(folder: Path) -> None:
    code = (
        "import sys; from skipstone.engines.mapped_loading import load_for_decoding; "
        "load_for_decoding(sys.argv[1], quantize='int4')"
    )
    both = [subprocess.Popen([sys.executable, "-c", code, str(folder)]) for _ in range(2)]
    assert [one.wait(timeout=60) for one in both] == [0, 0]
    (entry,) = packed_cache.entries()
    assert packed_cache.damaged(entry) == []
    assert [one.name for one in entry.path.parent.iterdir()] == [entry.path.name]
