"""Atomic checkpoints: written under a hidden name, listed with their hashes, flushed, renamed.

transformers' Trainer writes into checkpoint-N directly. A process that is killed then leaves a folder that looks whole.
"""

import hashlib
import json
import shutil
from contextlib import suppress
from pathlib import Path
from typing import Any

from torch import nn

from skipstone.utils import files

MANIFEST = "manifest.json"  # file in a checkpoint: its step, its run's fingerprint, and the SHA-256 of every other file
_PREFIX = "checkpoint-"
PARTIAL = ".partial"  # folder in that of a run: the checkpoint that is being written
SAMPLE = 16  # entries of a frozen parameter that its digest covers


def partial_folder(run: Path) -> Path:
    """An empty folder inside `run` to write a checkpoint into."""
    clear(run)
    folder = run / PARTIAL
    folder.mkdir(parents=True)
    return folder


def clear(run: Path) -> None:
    """Remove leftovers of interrupted saves."""
    for name in (PARTIAL, files.DISCARDED):
        shutil.rmtree(run / name, ignore_errors=True)


def publish(partial: Path, run: Path, step: int, fingerprint: dict[str, Any]) -> Path:
    """Give a written checkpoint its name, all at once. fingerprint: what a run must share to resume from it."""
    paths = [path for path in sorted(partial.rglob("*")) if path.is_file()]
    digests = {path.relative_to(partial).as_posix(): files.file_digest(path) for path in paths}
    manifest = {"step": step, "fingerprint": fingerprint, "files": digests}
    (partial / MANIFEST).write_text(json.dumps(manifest, indent=1), encoding="utf-8")
    final = run / f"{_PREFIX}{step}"
    files.publish(partial, final)
    clear(run)
    return final


def keep_latest(run: Path, count: int) -> None:
    """Remove all but the latest `count` checkpoints; 0 keeps all."""
    for _, folder in _numbered(run)[:-count]:
        files.discard(folder)


def latest(run: Path) -> Path | None:
    """The checkpoint with the highest step; None if there is none."""
    return next((folder for _, folder in reversed(_numbered(run))), None)


def latest_good(run: Path, fingerprint: dict[str, Any]) -> Path | None:
    """The checkpoint with the highest step that can be resumed from."""
    for _, folder in reversed(_numbered(run)):
        with suppress(ValueError):
            verify(folder, fingerprint)
            return folder
    return None


def fingerprint_of(folder: Path | None) -> dict[str, Any]:
    """The fingerprint that a checkpoint holds, and its step, unverified; {} if it holds none."""
    with suppress(OSError, ValueError, KeyError, TypeError):
        manifest = {} if folder is None else json.loads((folder / MANIFEST).read_text(encoding="utf-8"))
        return {**manifest["fingerprint"], "steps": manifest["step"]}
    return {}


def verify(folder: Path, fingerprint: dict[str, Any]) -> int:
    """The step of a checkpoint. ValueError if a file is missing or damaged, or if another run wrote it."""
    try:
        manifest = json.loads((folder / MANIFEST).read_text(encoding="utf-8"))
        step, saved, listed = int(manifest["step"]), dict(manifest["fingerprint"]), dict(manifest["files"])
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ValueError(f"{folder} is no checkpoint of skipstone: its {MANIFEST} is missing or unreadable") from error
    for name, digest in listed.items():
        path = folder / name
        actual = files.file_digest(path) if path.is_file() else "nothing"
        if actual != digest:
            raise ValueError(f"{path} is damaged: expected {digest:.12}, found {actual:.12}; remove {folder.name}")
    old, new = _flat(saved), _flat(json.loads(json.dumps(fingerprint)))
    if different := [key for key in sorted(old | new) if old.get(key) != new.get(key)]:
        pairs = (f"{key}: the checkpoint has {old.get(key)!r:.99}, this run {new.get(key)!r:.99}" for key in different)
        raise ValueError(f"{folder} belongs to another run, {', '.join(different)} differ ({'; '.join(pairs):.800})")
    return step


def frozen(model: nn.Module) -> dict[str, str]:
    """A digest of a sample of every frozen parameter, which a checkpoint of adapters does not hold. {} if all train."""
    fixed = [(name, parameter.detach()) for name, parameter in model.named_parameters() if not parameter.requires_grad]
    samples = [f"{name} {tuple(one.shape)} {one.flatten()[:SAMPLE].tolist()}" for name, one in fixed]
    return {"frozen": hashlib.sha256("".join(samples).encode()).hexdigest()} if samples else {}


def _flat(fingerprint: dict[str, Any]) -> dict[str, Any]:
    """A fingerprint with its inner mappings flattened, without the version of transformers that wrote a config."""
    flat: dict[str, Any] = {}
    for key, value in fingerprint.items():
        if isinstance(value, str) and value.startswith("{"):  # the config of a model
            value = json.loads(value)
        flat |= {f"{key}.{name}": inner for name, inner in value.items()} if isinstance(value, dict) else {key: value}
    flat.pop("model.transformers_version", None)
    return flat


def _numbered(run: Path) -> list[tuple[int, Path]]:
    """The checkpoints of a run by step."""
    folders = [(path.name.removeprefix(_PREFIX), path) for path in run.glob(f"{_PREFIX}*") if path.is_dir()]
    return sorted((int(number), path) for number, path in folders if number.isdecimal())
