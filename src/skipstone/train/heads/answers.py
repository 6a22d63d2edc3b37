"""What heads learn from, in files that a killed run goes on with: a model's own answers, and what it thinks of them.

Answers (AdaDecode, appendix D: on-policy data): greedily and in batches, a line a prompt, {"prompt": [ids], "tokens": [ids]},
after a first line that says what is asked of whom, in an order that only the prompts' lengths decide. Speculative decoding pays
in small batches and plain decoding in large ones, so the first batches try both.

Features: the states that exit heads read, and the last ones, in one file that is mapped into memory. One forward over every
answer, in batches that the answers alone decide; the file grows batch by batch under a hidden name, and has its name when it is
whole.
"""

import errno
import json
import math
import shutil
import time
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence
from transformers import PreTrainedModel
from transformers import PreTrainedTokenizerBase as Tokenizer

from skipstone.decoding.method import Method
from skipstone.engines.exit_statistics import watched
from skipstone.engines.host_transfer import left_padded
from skipstone.engines.model_runner import ModelRunner
from skipstone.hf import api
from skipstone.methods import resolve
from skipstone.models.fingerprint import fingerprint
from skipstone.models.generation_config import OWN_FIELD
from skipstone.train import Say
from skipstone.train.heads.prompts import HeadPrompt
from skipstone.train.heads.recipe import AnswerSettings
from skipstone.utils.files import LineFile, digest, install, read_lines

BATCH = 16  # answers of one forward
BYTES = 2  # of a number in the file, bfloat16 or float16
DATA = "features.bin"  # the states, [N, k + 1, d] numbers one after the other
ABOUT = "features.json"  # what the states are of; the file that tells that they are complete
PARTIAL = ".features.partial"  # the folder in which they grow
GIB = 2**30


@dataclass(frozen=True)
class ModelAnswer:
    """One prompt and the model's own answer to it, ids both."""

    prompt: list[int]
    tokens: list[int]


def write(
    model: PreTrainedModel,
    asked: Sequence[HeadPrompt],
    tokenizer: Tokenizer,
    wish: AnswerSettings,
    path: Path,
    eos: set[int],
    say: Say,
) -> tuple[list[ModelAnswer], float]:
    """The answers to all prompts, shortest first, second turns behind all first ones, and the seconds that they took in all
    runs. What a file has already is not asked again.

    ValueError for a file of other prompts or of another model, and where no prompt leaves room for an answer.
    """
    if not asked:
        raise ValueError("there are no prompts: the sources hold none")
    begins = [one.ids([], tokenizer) for one in asked]  # another chat template asks something else, too
    asked_for = digest([[(one.text, one.said, one.turns) for one in asked], begins])
    key = {"model": fingerprint(model), "prompts": asked_for, "max_new_tokens": wish.max_new_tokens}
    writer = _AnswerWriter(model, wish, eos, *_read(path, key))
    if not _go_through(asked, tokenizer, writer, None, say):  # what is complete is only read: several processes may
        with LineFile(path) as file:
            writer = _AnswerWriter(model, wish, eos, *_read(path, key))
            if writer.done:
                file.go_on()
            else:
                file.begin(key, f"{path} is no file of answers: remove it to have them written again")
            _go_through(asked, tokenizer, writer, file, say)
    return writer.done, writer.seconds


def _go_through(
    asked: Sequence[HeadPrompt], tokenizer: Tokenizer, writer: "_AnswerWriter", file: LineFile | None, say: Say
) -> bool:
    """Have all prompts answered, turn by turn; without a file only find out whether they are. Returns that."""
    for turn in range(max(map(len, asked))):
        answered = {tuple(one.prompt): str(tokenizer.decode(one.tokens, skip_special_tokens=True)) for one in writer.done}
        prompts = _prompts(asked, turn, answered, tokenizer)
        fitting = [ids for ids in prompts if 0 < len(ids) <= writer.room]
        if not fitting and not turn:
            raise ValueError(f"no prompt leaves room for {writer.wish.max_new_tokens} new tokens in the model's positions")
        wanted = [ids for ids in fitting if tuple(ids) not in answered]
        if wanted and file is None:
            return False
        if file is not None:
            if len(fitting) < len(prompts):
                say(f"{len(prompts) - len(fitting)} prompts are empty or too long and left out")
            writer.answer(wanted, len(fitting), file, say)
    return True


def _prompts(
    asked: Sequence[HeadPrompt], turn: int, answered: dict[tuple[int, ...], str], tokenizer: Tokenizer
) -> list[list[int]]:
    """The ids that ask a turn of every conversation whose earlier turns are answered, each once, shortest first."""
    found: dict[tuple[int, ...], None] = {}
    for one in asked:
        answers: list[str] = []
        ids = tuple(one.ids(answers, tokenizer))
        while len(answers) < min(turn, len(one) - 1) and ids in answered:
            answers.append(answered[ids])
            ids = tuple(one.ids(answers, tokenizer))
        if len(answers) == turn:
            found[ids] = None
    return sorted(map(list, found), key=lambda ids: (len(ids), ids))


class _AnswerWriter:
    """Has a model answer prompts in batches, into a file. done: all answers so far. seconds: that they took. room: most tokens
    of a prompt."""

    def __init__(
        self, model: PreTrainedModel, wish: AnswerSettings, eos: set[int], done: list[ModelAnswer], seconds: float
    ) -> None:
        self.model, self.wish, self.done, self.seconds = model, wish, done, seconds
        self._options = {"max_new_tokens": wish.max_new_tokens, "do_sample": False, "eos_token_id": sorted(eos) or None}
        self.room = ModelRunner(model).max_positions - wish.max_new_tokens
        self._methods = _methods(model, wish)
        self._rates: list[float] = []  # tokens a second of each method on its first batch

    def answer(self, prompts: list[list[int]], among: int, file: LineFile, say: Say) -> None:
        """Answer prompts; `among` so many, with those that are answered already."""
        methods, rates = self._methods, self._rates
        while prompts:
            part, prompts = prompts[: self.wish.batch_size], prompts[self.wish.batch_size :]
            began = time.perf_counter()
            method = methods[len(rates)] if len(rates) < len(methods) else methods[rates.index(max(rates))]
            ids, mask = left_padded(part)
            found = api.generate(self.model, ids, method, attention_mask=mask, **self._options).new_tokens
            took = time.perf_counter() - began
            assert found is not None
            self.seconds += took
            if len(rates) < len(methods):
                rates.append(sum(map(len, found)) / took)
            answers = [ModelAnswer(ids, tokens) for ids, tokens in zip(part, found, strict=True)]
            file.add(*({"prompt": one.prompt, "tokens": one.tokens, "seconds": self.seconds} for one in answers))
            self.done += answers
            say(f"answers: {among - len(prompts)} of {among}, {self.seconds:.0f} s")


def _methods(model: PreTrainedModel, wish: AnswerSettings) -> list[Method]:
    """What a batch each is written with, and all the rest with the fastest of them. ValueError for a lossy one."""
    own = getattr(model.generation_config, OWN_FIELD, None)
    if wish.method is None:
        return [one for one in map(resolve, [own, "autoregressive"] if own else ["autoregressive"]) if one.lossless]
    if not (asked := resolve(wish.method)).lossless:
        raise ValueError(f"{asked.name} may change the text: the answers must be the model's own")
    return [asked]


def _read(path: Path, key: dict[str, Any]) -> tuple[list[ModelAnswer], float]:
    """The answers of a file that was begun with the same key."""
    try:
        first, *rest = (read_lines(path) if path.exists() else []) or [key]
        answers = [ModelAnswer(one["prompt"], one["tokens"]) for one in rest]
        seconds = float(rest[-1]["seconds"]) if rest else 0.0
    except (ValueError, TypeError, KeyError) as error:
        raise ValueError(f"{path} is no file of answers: {error!r}; remove it to have them written again") from error
    if first != key:
        different = sorted(name for name in key if not isinstance(first, dict) or first.get(name) != key[name])
        raise ValueError(f"{path} holds other answers ({', '.join(different)} differ): use another output folder, or remove it")
    return answers, seconds


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
    model: ModelRunner,
    answers: Sequence[ModelAnswer],
    layers: Sequence[int],
    folder: Path,
    max_disk: float,
    say: Say,
    mixed: bool = False,
) -> Features:
    """The features of all answers, made or found. max_disk: most bytes they may take. mixed: whether matrices are multiplied in
    bfloat16, which a processor with instructions for it does several times as fast as in float32.

    ValueError where they would take more, OSError where the disk is full: nothing of them is left then.
    """
    width = model.head.weight.shape[1]  # d
    kind = torch.bfloat16 if model.dtype == torch.bfloat16 else torch.float16
    asked = digest([[one.prompt, one.tokens] for one in answers])
    about = {"model": fingerprint(model.model), "answers": asked, "layers": list(layers), "width": width, "dtype": str(kind)}
    about |= {"mixed": True} if mixed else {}
    bounds = [0, *accumulate(len(one.tokens) for one in answers)]
    shape = (bounds[-1], len(layers) + 1, width)
    if not _there(folder, about):
        needed = math.prod(shape) * BYTES
        say(f"features: {bounds[-1]} positions, {needed / GIB:.2f} GiB on the disk")
        if needed > max_disk:
            raise ValueError(
                f"the features of {len(answers)} answers take {needed / GIB:.2f} GiB, more than --max-disk {max_disk / GIB:g}: "
                "raise it, or take fewer prompts, shorter answers or fewer layers"
            )
        _make(model, answers, folder, about, bounds, say)
    raw = np.memmap(folder / DATA, dtype=np.int16, mode="c", shape=shape)
    return Features(torch.from_numpy(raw).view(kind), bounds)


def _there(folder: Path, about: dict[str, Any]) -> bool:
    try:
        return json.loads((folder / ABOUT).read_text(encoding="utf-8")) == about and (folder / DATA).is_file()
    except (OSError, ValueError):
        return False


def _make(
    model: ModelRunner, answers: Sequence[ModelAnswer], folder: Path, about: dict[str, Any], bounds: list[int], say: Say
) -> None:
    made, layers, dtype = folder / PARTIAL, about["layers"], about["dtype"].removeprefix("torch.")
    row = (len(layers) + 1) * about["width"] * BYTES  # bytes of a position
    try:
        if not _there(made, about):
            shutil.rmtree(made, ignore_errors=True)
            made.mkdir(parents=True)
            (made / DATA).touch()
            (made / ABOUT).write_text(json.dumps(about), encoding="utf-8")
        had = (made / DATA).stat().st_size
        if (free := shutil.disk_usage(made).free) < bounds[-1] * row - had:
            raise OSError(errno.ENOSPC, f"{free / GIB:.2f} GiB are free")
        begin = max((first for first in range(0, len(answers), BATCH) if bounds[first] * row <= had), default=0)
        with (made / DATA).open("ab") as file:
            file.truncate(bounds[begin] * row)
            for first in range(begin, len(answers), BATCH):
                with torch.autocast(model.device.type, torch.bfloat16, enabled="mixed" in about):
                    states = _states(model, answers[first : first + BATCH], layers).to(getattr(torch, dtype))
                if not bool(states.isfinite().all()):
                    raise ValueError(f"the model's states do not fit into {dtype}: load it as bfloat16")
                file.write(states.view(torch.int16).cpu().numpy().tobytes())
                if first // BATCH % 16 == 15:
                    say(f"features: {first + BATCH} of {len(answers)} answers")
        install(made, folder, (DATA, ABOUT))
        made.rmdir()
    except (OSError, ValueError) as error:
        shutil.rmtree(made, ignore_errors=True)
        if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT):
            said = f"the disk is full, nothing of the features is left: {error.strerror}"
            raise OSError(error.errno, said, str(folder)) from error
        raise


@torch.inference_mode()
def _states(model: ModelRunner, answers: Sequence[ModelAnswer], layers: Sequence[int]) -> Tensor:
    """[n, k + 1, d] of a batch: of every position whose next token is the answer's."""
    texts = [torch.tensor(one.prompt + one.tokens[:-1]) for one in answers]
    ids = pad_sequence(texts, batch_first=True).to(model.device)
    real = pad_sequence([torch.ones_like(text) for text in texts], batch_first=True).to(model.device)
    with watched(model, [*layers, model.depth]) as kept:
        model.decoder(input_ids=ids, attention_mask=real, use_cache=False)
    spans = [slice(len(one.prompt) - 1, len(one.prompt) + len(one.tokens) - 1) for one in answers]
    parts = [torch.cat([kept[layer][row, span] for row, span in enumerate(spans)]) for layer in (*layers, model.depth)]
    return model.normed(torch.stack(parts, 1))
