"""What a model answers to prompts, greedily and in batches, kept in a file that a killed run goes on with: the on-policy data
of AdaDecode's heads (appendix D).

Speculative decoding pays in small batches and plain decoding in large ones, so the first batches try both.

The first line says what is asked of whom; then comes a line a prompt, {"prompt": [ids], "tokens": [ids]}, in an order that
only the prompts' lengths decide.
"""

import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from transformers import PreTrainedModel, PreTrainedTokenizerBase

from skipstone import api
from skipstone.decoding.method import OWN_FIELD, Method
from skipstone.files import LineFile, digest, read_lines
from skipstone.methods import resolve
from skipstone.models.fingerprint import fingerprint
from skipstone.models.host import left_padded
from skipstone.models.layered import LayeredModel
from skipstone.train.heads.recipe import Answers
from skipstone.train.runs import Say


@dataclass(frozen=True)
class Answer:
    """One prompt and the model's own answer to it, ids both."""

    prompt: list[int]
    tokens: list[int]


def prompt_ids(texts: Sequence[str], tokenizer: PreTrainedTokenizerBase, chat: bool) -> list[list[int]]:
    """Every prompt once, as ids, shortest first. ValueError for a tokenizer without a chat template where one is asked for."""
    wanted: list[Any] = [[{"role": "user", "content": text}] if chat else text for text in dict.fromkeys(texts)]
    return sorted((api.token_ids(one, tokenizer) for one in wanted), key=lambda ids: (len(ids), ids))


def write(
    model: PreTrainedModel, prompts: list[list[int]], wish: Answers, path: Path, eos: set[int], say: Say
) -> tuple[list[Answer], float]:
    """The answers to all prompts, and the seconds that they took in all runs. What a file has already is not asked again.

    ValueError for a file of other prompts or of another model, and where no prompt leaves room for an answer.
    """
    room = LayeredModel(model).max_positions - wish.max_new_tokens
    asked = [ids for ids in prompts if 0 < len(ids) <= room]
    if not asked:
        raise ValueError(f"no prompt leaves room for {wish.max_new_tokens} new tokens in the model's positions")
    if len(asked) < len(prompts):
        say(f"{len(prompts) - len(asked)} prompts are empty or too long and left out")
    key = {"model": fingerprint(model), "prompts": digest(asked), "max_new_tokens": wish.max_new_tokens}
    methods = _methods(model, wish)
    rates: list[float] = []  # tokens a second of each method on its first batch
    with LineFile(path) as file:
        done, seconds = _read(path, key)
        if done:
            file.go_on()
        else:
            file.begin(key, f"{path} is no file of answers: remove it to have them written again")
        while len(done) < len(asked):
            began = time.perf_counter()
            part = asked[len(done) : len(done) + wish.batch_size]
            method = methods[len(rates)] if len(rates) < len(methods) else methods[rates.index(max(rates))]
            ids, mask = left_padded(part)
            out = api.generate(
                model,
                ids,
                method,
                attention_mask=mask,
                max_new_tokens=wish.max_new_tokens,
                do_sample=False,
                eos_token_id=sorted(eos) or None,
            )
            assert out.new_tokens is not None
            took = time.perf_counter() - began
            seconds += took
            if len(rates) < len(methods):
                rates.append(sum(map(len, out.new_tokens)) / took)
            answers = [Answer(ids, tokens) for ids, tokens in zip(part, out.new_tokens, strict=True)]
            file.add(*({"prompt": one.prompt, "tokens": one.tokens, "seconds": seconds} for one in answers))
            done += answers
            say(f"answers: {len(done)} of {len(asked)}, {seconds:.0f} s")
    return done, seconds


def _methods(model: PreTrainedModel, wish: Answers) -> list[Method]:
    """What a batch each is written with, and all the rest with the fastest of them. ValueError for a lossy one."""
    own = getattr(model.generation_config, OWN_FIELD, None)
    if wish.method is None:
        return [one for one in map(resolve, [own, "autoregressive"] if own else ["autoregressive"]) if one.lossless]
    if not (asked := resolve(wish.method)).lossless:
        raise ValueError(f"{asked.name} may change the text: the answers must be the model's own")
    return [asked]


def _read(path: Path, key: dict[str, Any]) -> tuple[list[Answer], float]:
    """The answers of a file that was begun with the same key."""
    try:
        first, *rest = read_lines(path) or [key]
        answers = [Answer(one["prompt"], one["tokens"]) for one in rest]
        seconds = float(rest[-1]["seconds"]) if rest else 0.0
    except (ValueError, TypeError, KeyError) as error:
        raise ValueError(f"{path} is no file of answers: {error!r}; remove it to have them written again") from error
    if first != key:
        different = sorted(name for name in key if not isinstance(first, dict) or first.get(name) != key[name])
        raise ValueError(f"{path} holds other answers ({', '.join(different)} differ): use another output folder, or remove it")
    return answers, seconds
