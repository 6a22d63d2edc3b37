"""Checkpoints that are whole or not there: written under a hidden name, listed with their hashes, flushed, renamed.

transformers' Trainer writes into checkpoint-N directly, so a process killed meanwhile leaves a folder that looks like one.
"""

import hashlib
import json
import re
import shutil
from contextlib import suppress
from itertools import takewhile
from pathlib import Path
from typing import Any

from torch import nn

from skipstone.utils import files

MANIFEST = "manifest.json"  # file in a checkpoint: its step, its run's fingerprint, and the SHA-256 of every other file
_PREFIX = "checkpoint-"
PARTIAL = ".partial"  # folder in that of a run: the checkpoint that is being written
SAMPLE = 16  # how many entries of a frozen parameter tell it from another model's


def partial_folder(run: Path) -> Path:
    """An empty folder inside `run` to write a checkpoint into; what an interrupted save left there is removed."""
    clear(run)
    folder = run / PARTIAL
    folder.mkdir(parents=True)
    return folder


def clear(run: Path) -> None:
    """Remove what interrupted saves have left behind."""
    for name in (PARTIAL, files.DISCARDED):
        shutil.rmtree(run / name, ignore_errors=True)


def publish(partial: Path, run: Path, step: int, fingerprint: dict[str, Any]) -> Path:
    """Give a written checkpoint its name, all at once. fingerprint: what a run must have in common to resume from it."""
    written = [path for path in sorted(partial.rglob("*")) if path.is_file()]
    digests = {path.relative_to(partial).as_posix(): files.file_digest(path) for path in written}
    manifest = {"step": step, "fingerprint": fingerprint, "files": digests}
    (partial / MANIFEST).write_text(json.dumps(manifest, indent=1), encoding="utf-8")
    final = run / f"{_PREFIX}{step}"
    files.publish(partial, final)
    clear(run)
    return final


def keep_latest(run: Path, count: int) -> None:
    """Remove all but the latest `count` checkpoints; none where count is 0."""
    for _, folder in _numbered(run)[:-count]:
        files.discard(folder)


def latest(run: Path) -> Path | None:
    """The checkpoint with the highest step, None where there is none."""
    return next((folder for _, folder in reversed(_numbered(run))), None)


def latest_good(run: Path, fingerprint: dict[str, Any]) -> Path | None:
    """The checkpoint with the highest step that can be resumed from."""
    for _, folder in reversed(_numbered(run)):
        with suppress(ValueError):
            verify(folder, fingerprint)
            return folder
    return None


def fingerprint_of(folder: Path) -> dict[str, Any]:
    """What a checkpoint says of its run, unverified; {} where it says nothing."""
    try:
        return dict(json.loads((folder / MANIFEST).read_text(encoding="utf-8"))["fingerprint"])
    except (OSError, ValueError, KeyError, TypeError):
        return {}


def verify(folder: Path, fingerprint: dict[str, Any]) -> int:
    """The step of a checkpoint. ValueError where a file is missing or damaged, or where it belongs to another run."""
    try:
        manifest = json.loads((folder / MANIFEST).read_text(encoding="utf-8"))
        step, saved, listed = int(manifest["step"]), dict(manifest["fingerprint"]), dict(manifest["files"])
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ValueError(f"{folder} is no checkpoint of skipstone: its {MANIFEST} is missing or unreadable") from error
    for name, digest in listed.items():
        path = folder / name
        found = files.file_digest(path) if path.is_file() else "nothing"
        if found != digest:
            raise ValueError(
                f"{path} is damaged: expected SHA-256 {digest:.12}, found {found:.12}; "
                f"remove {folder.name} to resume from the one before it"
            )
    if different := _differences(saved, fingerprint):
        shown = "; ".join(f"{key}: the checkpoint has {old}, this run {new}" for key, (old, new) in different.items())
        raise ValueError(
            f"{folder} belongs to another run, {', '.join(different)} differ ({shown:.400}): use another output folder, or the "
            "recipe that it was started with"
        )
    return step


def frozen(model: nn.Module) -> dict[str, str]:
    """What a checkpoint of adapters does not hold: a digest of a sample of every frozen parameter. Empty where all train."""
    samples = [
        f"{name} {tuple(parameter.shape)} {parameter.detach().flatten()[:SAMPLE].tolist()}"
        for name, parameter in model.named_parameters()
        if not parameter.requires_grad
    ]
    return {"frozen": hashlib.sha256("".join(samples).encode()).hexdigest()} if samples else {}


def _differences(saved: dict[str, Any], now: dict[str, Any]) -> dict[str, tuple[str, str]]:
    """What two fingerprints do not have in common: key -> (saved, now), shortened to where they part."""
    old, new = _flat(saved), _flat(json.loads(json.dumps(now)))
    return {key: _contrast(old.get(key), new.get(key)) for key in sorted(old | new) if old.get(key) != new.get(key)}


def _flat(fingerprint: dict[str, Any]) -> dict[str, Any]:
    """Mappings as entries of their own. The version of transformers that wrote a config is no difference."""
    flat: dict[str, Any] = {}
    for key, value in fingerprint.items():
        if isinstance(value, dict):
            flat |= {f"{key}.{name}": one for name, one in value.items()}
        else:
            flat[key] = re.sub(r'"transformers_version": "[^"]*",?\s*', "", value) if isinstance(value, str) else value
    return flat


def _contrast(old: Any, new: Any) -> tuple[str, str]:
    """Two different values as text; of long ones only what follows the place where they part, with what led to it."""
    one, other = (" ".join(value.split()) if isinstance(value, str) else repr(value) for value in (old, new))
    start = max(0, len(list(takewhile(lambda pair: pair[0] == pair[1], zip(one, other, strict=False)))) - 30)
    cut = start if max(len(one), len(other)) > 80 else 0
    return one[cut : cut + 80], other[cut : cut + 80]


def _numbered(run: Path) -> list[tuple[int, Path]]:
    """The checkpoints of a run by step."""
    found = [(path.name.removeprefix(_PREFIX), path) for path in run.glob(f"{_PREFIX}*") if path.is_dir()]
    return sorted((int(number), path) for number, path in found if number.isdecimal())
