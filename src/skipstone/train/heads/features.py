"""What a frozen model thinks of its own answers: the states that exit heads read, and the last ones, in one file that is mapped
into memory.

One forward over every answer, in batches that the answers alone decide; the file grows batch by batch under a hidden name, so
that a killed run goes on with it, and has its name when it is whole.
"""

import errno
import json
import os
import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from skipstone.files import digest, install
from skipstone.models.exits import watched
from skipstone.models.fingerprint import fingerprint
from skipstone.models.layered import LayeredModel
from skipstone.train.heads.answers import Answer
from skipstone.train.runs import Say

BATCH = 16  # answers of one forward
BYTES = 2  # of a number in the file, bfloat16 or float16
DATA = "features.bin"  # the states, [N, k + 1, d] numbers one after the other
ABOUT = "features.json"  # what the states are of; the file that tells that they are complete
PARTIAL = ".features.partial"  # the folder in which they grow
GIB = 2**30


@dataclass(frozen=True)
class Features:
    """states: [N, k + 1, d], what the LM head would read of N positions after each of k exit layers and after the last (after
    the final norm). bounds: [answers + 1], where in N an answer's positions begin and end."""

    states: Tensor
    bounds: list[int]

    def states_of(self, answers: Sequence[int]) -> Tensor:
        """[n, k + 1, d] of some answers, one after the other."""
        return torch.cat([self.states[self.bounds[one] : self.bounds[one + 1]] for one in answers])


def extract(
    model: LayeredModel, answers: Sequence[Answer], layers: Sequence[int], folder: Path, max_disk: float, say: Say
) -> Features:
    """The features of all answers, made or found. max_disk: most bytes they may take.

    ValueError where they would take more, OSError where the disk is full: nothing of them is left then.
    """
    width = model.head.weight.shape[1]  # d
    kind = torch.bfloat16 if model.dtype == torch.bfloat16 else torch.float16
    about = {
        "model": fingerprint(model.model),
        "answers": digest([[one.prompt, one.tokens] for one in answers]),
        "layers": list(layers),
        "width": width,
        "dtype": str(kind),
    }
    bounds = [0, *np.cumsum([len(one.tokens) for one in answers]).tolist()]
    needed = bounds[-1] * (len(layers) + 1) * width * BYTES
    if not _there(folder, about):
        say(f"features: {bounds[-1]} positions, {needed / GIB:.2f} GiB on the disk")
        if needed > max_disk:
            raise ValueError(
                f"the features of {len(answers)} answers take {needed / GIB:.2f} GiB, more than --max-disk {max_disk / GIB:g}: "
                "raise it, or take fewer prompts, shorter answers or fewer layers"
            )
        _make(model, answers, layers, folder, about, bounds, kind, say)
    raw = np.memmap(folder / DATA, dtype=np.int16, mode="c", shape=(bounds[-1], len(layers) + 1, width))
    return Features(torch.from_numpy(raw).view(kind), bounds)


def _there(folder: Path, about: dict[str, Any]) -> bool:
    try:
        return json.loads((folder / ABOUT).read_text(encoding="utf-8")) == about and (folder / DATA).is_file()
    except (OSError, ValueError):
        return False


def _make(
    model: LayeredModel,
    answers: Sequence[Answer],
    layers: Sequence[int],
    folder: Path,
    about: dict[str, Any],
    bounds: list[int],
    kind: torch.dtype,
    say: Say,
) -> None:
    made = folder / PARTIAL
    row = (len(layers) + 1) * about["width"] * BYTES  # bytes of a position
    try:
        made.mkdir(parents=True, exist_ok=True)
        if not _there(made, about):
            shutil.rmtree(made)
            made.mkdir()
            (made / DATA).touch()
            (made / ABOUT).write_text(json.dumps(about), encoding="utf-8")
        had = (made / DATA).stat().st_size
        if (free := shutil.disk_usage(made).free) < bounds[-1] * row - had:
            raise OSError(errno.ENOSPC, f"{free / GIB:.2f} GiB are free")
        begin = max((first for first in range(0, len(answers), BATCH) if bounds[first] * row <= had), default=0)
        with (made / DATA).open("r+b") as file:
            file.truncate(bounds[begin] * row)
            file.seek(0, os.SEEK_END)
            for first in range(begin, len(answers), BATCH):
                states = _states(model, answers[first : first + BATCH], layers).to(kind)
                if not bool(states.isfinite().all()):
                    raise ValueError(
                        f"the model's states do not fit into {str(kind).removeprefix('torch.')}: load it as bfloat16"
                    )
                file.write(states.view(torch.int16).cpu().numpy().tobytes())
                if first // BATCH % 16 == 15:
                    say(f"features: {first + BATCH} of {len(answers)} answers")
        install(made, folder, (DATA, ABOUT))
        made.rmdir()
    except (OSError, ValueError) as error:
        shutil.rmtree(made, ignore_errors=True)
        if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT):
            raise OSError(
                error.errno, f"the disk is full, nothing of the features is left: {error.strerror}", str(folder)
            ) from error
        raise


@torch.inference_mode()
def _states(model: LayeredModel, answers: Sequence[Answer], layers: Sequence[int]) -> Tensor:
    """[n, k + 1, d] of a batch: of every position whose next token is the answer's."""
    texts = [torch.tensor(one.prompt + one.tokens[:-1]) for one in answers]
    ids = torch.nn.utils.rnn.pad_sequence(texts, batch_first=True).to(model.device)
    real = torch.nn.utils.rnn.pad_sequence([torch.ones_like(text) for text in texts], batch_first=True).to(model.device)
    with watched(model, [*layers, model.depth]) as kept:
        model.decoder(input_ids=ids, attention_mask=real, use_cache=False)
    parts = [
        torch.stack(
            [kept[layer][row, len(one.prompt) - 1 : len(one.prompt) + len(one.tokens) - 1] for layer in (*layers, model.depth)],
            1,
        )
        for row, one in enumerate(answers)
    ]
    return model.normed(torch.cat(parts))
