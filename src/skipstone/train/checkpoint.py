"""Checkpoints that are whole or not there: written under a hidden name, listed with their hashes, flushed, renamed.

transformers' Trainer writes into checkpoint-N directly, so a process killed meanwhile leaves a folder that looks like one.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from pathlib import Path
from typing import Any

MANIFEST = "manifest.json"
_PREFIX = "checkpoint-"
_PARTIAL = ".partial"


def partial_folder(run: Path) -> Path:
    """An empty folder inside `run` to write a checkpoint into; what an interrupted save left there is removed."""
    folder = run / _PARTIAL
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    return folder


def publish(partial: Path, run: Path, step: int, fingerprint: dict[str, Any]) -> Path:
    """Give a written checkpoint its name, all at once. fingerprint: what a run must have in common to resume from it."""
    files = {path.relative_to(partial).as_posix(): _digest(path) for path in sorted(partial.rglob("*")) if path.is_file()}
    manifest = {"step": step, "fingerprint": fingerprint, "files": files}
    (partial / MANIFEST).write_text(json.dumps(manifest, indent=1))
    for path in partial.rglob("*"):
        _flush(path)
    _flush(partial)
    final = run / f"{_PREFIX}{step}"
    if final.exists():  # the same step again, after resuming from an earlier one
        shutil.rmtree(final)
    os.replace(partial, final)
    _flush(run)
    return final


def keep_latest(run: Path, count: int) -> None:
    """Remove all but the latest `count` checkpoints."""
    for _, folder in _numbered(run)[:-count]:
        shutil.rmtree(folder)


def latest(run: Path) -> Path | None:
    """The checkpoint with the highest step, None where there is none."""
    numbered = _numbered(run)
    return numbered[-1][1] if numbered else None


def verify(folder: Path, fingerprint: dict[str, Any]) -> int:
    """The step of a checkpoint. ValueError where a file is missing or damaged, or where it belongs to another run."""
    try:
        manifest = json.loads((folder / MANIFEST).read_text())
        step, saved, files = manifest["step"], manifest["fingerprint"], manifest["files"]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ValueError(f"{folder} is no checkpoint of skipstone: its {MANIFEST} is missing or unreadable") from error
    for name, digest in files.items():
        path = folder / name
        found = _digest(path) if path.is_file() else "nothing"
        if found != digest:
            raise ValueError(
                f"{path} is damaged: expected SHA-256 {digest[:12]}..., found {found[:12]}; "
                f"remove {folder.name} to resume from the one before it"
            )
    different = sorted(key for key in saved.keys() | fingerprint.keys() if saved.get(key) != fingerprint.get(key))
    if different:
        key = different[0]
        raise ValueError(
            f"{folder} belongs to another run: {', '.join(different)} differ ({key}: the checkpoint has {saved.get(key)!r}, "
            f"this run {fingerprint.get(key)!r}); use another output folder, or the recipe that it was started with"
        )
    return int(step)


def _numbered(run: Path) -> list[tuple[int, Path]]:
    """The checkpoints of a run by step."""
    found = [(path.name.removeprefix(_PREFIX), path) for path in run.glob(f"{_PREFIX}*") if path.is_dir()]
    return sorted((int(number), path) for number, path in found if number.isdigit())


def _digest(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _flush(path: Path) -> None:
    """Make sure that a file or folder is on the disk."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
