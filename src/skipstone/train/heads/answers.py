"""The training data of exit heads, in files that a killed run resumes: a model's own answers, and its states on them.

Answers (AdaDecode, appendix D: on-policy data) are greedy. Each prompt has a line {"prompt": [ids], "tokens": [ids]}; the first
line names model and prompts. Shorter prompts come first. Speculative decoding is faster in small batches and plain decoding in
large ones, so the first batches try both.

Features are the states that exit heads read, and the last layer's, in one memory-mapped file: one forward over every answer.
The file grows batch by batch.
"""

import errno
import json
import math
import os
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
from skipstone.train.heads.recipe import AnswerSettings, HeadPrompt
from skipstone.utils.files import LineFile, digest, read_lines, write_whole

BATCH = 16  # answers of one forward
BYTES = 2  # of a number in the file, bfloat16 or float16
DATA = "features.bin"  # the states, [N, k + 1, d] numbers one after the other
PARTIAL = "features.partial"  # the states so far, until all are on the disk
ABOUT = "features.json"  # the model, answers and layers of the states
GIB = 2**30


@dataclass(frozen=True)
class ModelAnswer:
    """One prompt and the model's own answer to it, ids both."""

    prompt: list[int]
    tokens: list[int]


Answers = Sequence[ModelAnswer]
HeadPrompts = Sequence[HeadPrompt]


def write(
    model: Any, prompts: HeadPrompts, tokenizer: Tokenizer, settings: AnswerSettings, path: Path, eos: set[int], say: Say
) -> tuple[list[ModelAnswer], float]:
    """The answers to all prompts, shortest first and turn by turn, and the seconds that they took over all runs. Answers in the
    file are not generated again.

    ValueError for a file of other prompts or of another model, and if no prompt leaves room for an answer.
    """
    if not prompts:
        raise ValueError("there are no prompts: the sources hold none")
    writer = _AnswerWriter(model, prompts, tokenizer, settings, path, eos, say)
    writer.answer_all()
    return writer.done, writer.seconds


class _AnswerWriter:
    """Generates answers in batches and writes them to a file. done: all answers so far. seconds: their time."""

    def __init__(
        self,
        model: Any,
        prompts: HeadPrompts,
        tokenizer: Tokenizer,
        settings: AnswerSettings,
        path: Path,
        eos: set[int],
        say: Say,
    ) -> None:
        self.model, self.prompts, self.tokenizer, self.settings, self.say = model, prompts, tokenizer, settings, say
        first_ids = [prompt.ids([], tokenizer) for prompt in prompts]  # they depend on the chat template
        content = digest([[(prompt.text, prompt.said, prompt.turns) for prompt in prompts], first_ids])
        self._key = {"model": fingerprint(model), "prompts": content, "max_new_tokens": settings.max_new_tokens}
        self._path = path
        self.done, self.seconds = _read(path, self._key)
        self._options = {"max_new_tokens": settings.max_new_tokens, "do_sample": False, "eos_token_id": sorted(eos) or None}
        self._max_prompt_tokens = ModelRunner(model).max_positions - settings.max_new_tokens
        self._methods = _methods(model, settings)
        self._rates: list[float] = []  # tokens a second of each method on its first batch

    def answer_all(self) -> None:
        """Answer all prompts, turn by turn. Several processes may read a complete file; one writes an incomplete one."""
        if not self._write_missing(None):
            return
        with LineFile(self._path) as file:
            self.done, self.seconds = _read(self._path, self._key)  # another run may have written since
            if self.done:
                file.go_on()
            else:
                file.begin(self._key, f"{self._path} is no file of answers: remove it to have them written again")
            self._write_missing(file)

    def _write_missing(self, file: LineFile | None) -> bool:
        """Write the missing answers. file: None to write none. Returns whether answers are still missing."""
        for turn in range(max(map(len, self.prompts))):
            texts = [str(self.tokenizer.decode(each.tokens, skip_special_tokens=True)) for each in self.done]
            answered = {tuple(each.prompt): text for each, text in zip(self.done, texts, strict=True)}
            every = self._prompt_ids(turn, answered)
            fitting = [ids for ids in every if 0 < len(ids) <= self._max_prompt_tokens]
            if not fitting and not turn:
                raise ValueError(f"no prompt leaves room for {self.settings.max_new_tokens} new tokens in the positions")
            if missing := [ids for ids in fitting if tuple(ids) not in answered]:
                if file is None:
                    return True
                if len(fitting) < len(every):
                    self.say(f"{len(every) - len(fitting)} prompts are empty or too long and left out")
                self._answer(file, missing, len(fitting))
        return False

    def _prompt_ids(self, turn: int, answered: dict[tuple[int, ...], str]) -> list[list[int]]:
        """The ids of a turn of every conversation with answers to all earlier turns, without repetitions, shortest first."""
        chosen: set[tuple[int, ...]] = set()
        for prompt in self.prompts:
            answers: list[str] = []
            ids = tuple(prompt.ids(answers, self.tokenizer))
            while len(answers) < min(turn, len(prompt) - 1) and ids in answered:
                answers.append(answered[ids])
                ids = tuple(prompt.ids(answers, self.tokenizer))
            if len(answers) == turn:
                chosen.add(ids)
        return sorted(map(list, chosen), key=lambda ids: (len(ids), ids))

    def _answer(self, file: LineFile, prompts: list[list[int]], among: int) -> None:
        """Answer prompts. among: number of prompts of this turn, with those that are answered already."""
        methods, rates, size = self._methods, self._rates, self.settings.batch_size
        for first in range(0, len(prompts), size):
            part, began = prompts[first : first + size], time.perf_counter()
            method = methods[len(rates)] if len(rates) < len(methods) else methods[rates.index(max(rates))]
            ids, mask = left_padded(part)
            new_tokens = api.generate(self.model, ids, method, attention_mask=mask, **self._options).new_tokens or []
            seconds = time.perf_counter() - began
            self.seconds += seconds
            if len(rates) < len(methods):
                rates.append(sum(map(len, new_tokens)) / seconds)
            answers = [ModelAnswer(ids, tokens) for ids, tokens in zip(part, new_tokens, strict=True)]
            file.add(*({**vars(answer), "seconds": self.seconds} for answer in answers))
            self.done += answers
            self.say(f"answers: {among - len(prompts) + first + len(part)} of {among}, {self.seconds:.0f} s")


def _methods(model: PreTrainedModel, settings: AnswerSettings) -> list[Method]:
    """Methods that generate a batch each; the fastest generates the rest. ValueError for a lossy one."""
    own = getattr(model.generation_config, OWN_FIELD, None)
    if settings.method is None:
        return [method for method in map(resolve, [own, "autoregressive"] if own else ["autoregressive"]) if method.lossless]
    if not (chosen := resolve(settings.method)).lossless:
        raise ValueError(f"{chosen.name} may change the text: the answers must be the model's own")
    return [chosen]


def _read(path: Path, key: dict[str, Any]) -> tuple[list[ModelAnswer], float]:
    """The answers in a file with the same key, and their seconds."""
    try:
        first, *rest = (read_lines(path) if path.exists() else []) or [key]
        answers = [ModelAnswer(line["prompt"], line["tokens"]) for line in rest]
        seconds = float(rest[-1]["seconds"]) if rest else 0.0
    except (ValueError, TypeError, KeyError) as error:
        raise ValueError(f"{path} is no file of answers: {error!r}; remove it to have them written again") from error
    if first != key:
        different = sorted(name for name in key if not isinstance(first, dict) or first.get(name) != key[name])
        raise ValueError(f"{path} holds other answers ({', '.join(different)} differ): use another output folder, or remove it")
    return answers, seconds


@dataclass(frozen=True)
class Features:
    """states: [N, k + 1, d], inputs of the LM head (after the final norm) at N positions, from each of k exit layers and from
    the last layer. bounds: [answers + 1], the first of the N positions of each answer, and N."""

    states: Tensor
    bounds: list[int]

    def states_of(self, answers: Sequence[int]) -> Tensor:
        """[n, k + 1, d] of some answers, one after the other."""
        return torch.cat([self.states[self.bounds[index] : self.bounds[index + 1]] for index in answers])


def extract(
    model: ModelRunner, answers: Answers, layers: Sequence[int], folder: Path, max_disk: float, say: Say, mixed: bool = False
) -> Features:
    """The features of all answers, from the folder or made anew. max_disk: limit in bytes. mixed: whether matrices are
    multiplied in bfloat16, several times as fast as float32 on a processor with instructions for it.

    ValueError if they would exceed the limit, OSError if the disk is full; nothing of them is left then.
    """
    width = model.head.weight.shape[1]  # d
    kind = torch.bfloat16 if model.dtype == torch.bfloat16 else torch.float16
    content = digest([[answer.prompt, answer.tokens] for answer in answers])
    about = {"model": fingerprint(model.model), "answers": content, "layers": list(layers), "width": width, "dtype": str(kind)}
    about |= {"mixed": True} if mixed else {}
    bounds = [0, *accumulate(len(answer.tokens) for answer in answers)]
    shape = (bounds[-1], len(layers) + 1, width)
    data, partial, needed = folder / DATA, folder / PARTIAL, math.prod(shape) * BYTES
    same = (folder / ABOUT).is_file() and (folder / ABOUT).read_text(encoding="utf-8") == json.dumps(about)
    if not same or not data.is_file() or data.stat().st_size < needed:
        say(f"features: {bounds[-1]} positions, {needed / GIB:.2f} GiB on the disk")
        if needed > max_disk:
            size = f"{needed / GIB:.2f} GiB, more than --max-disk {max_disk / GIB:g}"
            raise ValueError(f"the features of {len(answers)} answers take {size}")
        if not same:
            data.unlink(missing_ok=True)
            partial.unlink(missing_ok=True)
        try:
            write_whole(folder / ABOUT, json.dumps(about))
            _append(model, answers, partial, about, bounds, say)
            os.replace(partial, data)
        except (OSError, ValueError) as error:
            for path in (partial, folder / ABOUT):
                path.unlink(missing_ok=True)
            if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT):
                raise OSError(error.errno, f"{error.strerror}, and nothing of the features is left", str(folder)) from error
            raise
    raw = np.memmap(data, dtype=np.int16, mode="c", shape=shape)
    return Features(torch.from_numpy(raw).view(kind), bounds)


def _append(model: ModelRunner, answers: Answers, data: Path, about: dict[str, Any], bounds: list[int], say: Say) -> None:
    """Write the states, from the last whole batch in the file on. When this returns, they are on the disk."""
    layers, dtype = about["layers"], about["dtype"].removeprefix("torch.")
    row = (len(layers) + 1) * about["width"] * BYTES  # bytes of a position
    with data.open("ab") as file:
        had = file.tell()
        if (free := shutil.disk_usage(data.parent).free) < bounds[-1] * row - had:
            raise OSError(errno.ENOSPC, f"{free / GIB:.2f} GiB are free")
        begin = max(first for first in range(0, len(answers), BATCH) if bounds[first] * row <= had)
        file.truncate(bounds[begin] * row)
        for first in range(begin, len(answers), BATCH):
            with torch.autocast(model.device.type, torch.bfloat16, enabled="mixed" in about):
                states = _states(model, answers[first : first + BATCH], layers).to(getattr(torch, dtype))
            if not bool(states.isfinite().all()):
                raise ValueError(f"the model's states do not fit into {dtype}: load it as bfloat16")
            file.write(states.view(torch.int16).cpu().numpy().tobytes())
            if first // BATCH % 16 == 15:
                say(f"features: {first + BATCH} of {len(answers)} answers")
        file.flush()
        os.fsync(file.fileno())


@torch.inference_mode()
def _states(model: ModelRunner, answers: Answers, layers: Sequence[int]) -> Tensor:
    """[n, k + 1, d], the states of a batch at every position that predicts a token of an answer."""
    texts = [torch.tensor(answer.prompt + answer.tokens[:-1]) for answer in answers]
    ids = pad_sequence(texts, batch_first=True).to(model.device)
    real = pad_sequence([torch.ones_like(text) for text in texts], batch_first=True).to(model.device)
    with watched(model, [*layers, model.depth]) as kept:
        model.decoder(input_ids=ids, attention_mask=real, use_cache=False)
    spans = [slice(len(answer.prompt) - 1, len(answer.prompt) + len(answer.tokens) - 1) for answer in answers]
    parts = [torch.cat([kept[layer][row, span] for row, span in enumerate(spans)]) for layer in (*layers, model.depth)]
    return model.normed(torch.stack(parts, 1))
