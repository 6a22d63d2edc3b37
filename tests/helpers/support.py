"""What several test files share: references, a tiny tokenizer, a counter of forward passes."""

import functools
import itertools
import json
import os
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerFast

import skipstone
from skipstone.engines.agreement import disagreement
from skipstone.engines.choose_engine import VARIABLE
from skipstone.engines.eager.eager import EagerEngine
from skipstone.engines.kv_cache import KVCache
from skipstone.engines.model_runner import ModelRunner
from skipstone.lab.check.check import ScoredDifference, TieDetector
from skipstone.models.decoder_model import DecoderModel
from skipstone.models.families import attention_reaches, text_config
from skipstone.models.passes import Pass, SkipSet
from skipstone.models.trace import shrunk_windows, trace
from tests.helpers import families

TIE = 1e-4
"""A greedy reference whose smallest top-2 margin is below this share of the logits' deviation proves nothing."""


def alone(model: PreTrainedModel, prompt: Tensor, **options: Any) -> list[int]:
    return model.generate(prompt[None], **options)[0, len(prompt) :].tolist()


def margin(model: PreTrainedModel, prompt: Tensor, **options: Any) -> tuple[list[int], float]:
    """New tokens of greedy `model.generate` for one row, and the smallest top-2 margin on the way, in deviations."""
    output = model.generate(prompt[None], return_dict_in_generate=True, output_scores=True, do_sample=False, **options)
    smallest = float("inf")
    for scores in output.scores:
        allowed = scores[0][scores[0].isfinite()]
        if len(allowed) > 1:
            best, second = allowed.topk(2).values.tolist()
            smallest = min(smallest, (best - second) / max(allowed.std().item(), 1e-9))
    return output.sequences[0, len(prompt) :].tolist(), smallest


def without_ties(
    model: PreTrainedModel, prompts: Iterable[Tensor], rows: int, **options: Any
) -> tuple[list[Tensor], list[list[int]]]:
    """The first prompts [T] without near-ties in their greedy texts, and the new tokens of the model's own `generate`."""
    texts = ((prompt, *margin(model, prompt, **options)) for prompt in prompts)
    found = list(itertools.islice(((prompt, tokens) for prompt, tokens, smallest in texts if smallest >= TIE), rows))
    assert len(found) == rows, "too many near-ties among the references"
    return [prompt for prompt, _ in found], [tokens for _, tokens in found]


def logits_in_chunks(
    runner: ModelRunner, ids: Tensor, bounds: list[int], skip: SkipSet | None = None, depth: int | None = None
) -> Tensor:
    """Logits [1, T, V] of ids [1, T], layer by layer, the tokens in chunks that end at `bounds`."""
    layers = runner.depth if depth is None else depth
    store, parts, start = KVCache(1, layers, ids.shape[1]), [], 0
    store.reserve(ids.shape[1])
    for stop in bounds:
        positions = torch.arange(start, stop)[None]
        at = Pass(positions, positions, None, slice(0, 1), stop, start)
        hidden = runner.embed(ids[:, start:stop], positions)
        for layer in range(layers):
            hidden = runner.run(hidden, at, store, range(layer, layer + 1), skip)
        parts.append(runner.logits(hidden))
        start = stop
    return torch.cat(parts, 1)


@torch.no_grad()
def differing_place(model: PreTrainedModel) -> str | None:
    """Where the verification of a model finds more than is allowed, None where nowhere."""
    facts, config = DecoderModel(model), text_config(model)
    engine, layers = EagerEngine(model, facts), torch.nn.ModuleList(facts.layers)
    with shrunk_windows(config):
        engine.reaches = attention_reaches(config, facts.family)
    difference = disagreement(engine, facts, trace(model, facts.decoder, layers, config, facts.max_positions))
    return None if difference.share <= difference.allowed else difference.where


def references(name: str, rows: int, *, asked: int = 1, **options: Any) -> tuple[list[Tensor], list[list[int]]]:
    """Ragged prompts of a family, and its greedy texts, which are no near-ties. asked: the prompts' seed."""
    return _references(name, rows, asked, json.dumps(options))


@functools.cache
def _references(name: str, rows: int, asked: int, options: str) -> tuple[list[Tensor], list[list[int]]]:
    prompts = families.prompts(rows + 3, longest=21 + 7 * rows, seed=asked)
    return without_ties(families.cached(name), prompts, rows, **json.loads(options))


def plainly(name: str, rows: int, *, asked: int = 1, **options: Any) -> tuple[list[Tensor], list[list[int]]]:
    """Ragged prompts of a family and what our own plain decoding says to them, for options that JSON can name.

    asked: the prompts' seed. The engine is the one that the environment names.
    """
    return _plainly(name, rows, asked, json.dumps(options), os.environ.get(VARIABLE))


@functools.cache
def _plainly(name: str, rows: int, asked: int, options: str, engine: str | None) -> tuple[list[Tensor], list[list[int]]]:
    prompts = families.prompts(rows, seed=asked)
    output = decode(families.cached(name), prompts, skipstone.Autoregressive(), **json.loads(options))
    assert output.new_tokens is not None
    return prompts, output.new_tokens


def message(parted: ScoredDifference, around: int = 8) -> str:
    """Tie or bug, the place, the difference, and `around` tokens of both texts before and after it, in four lines."""
    apart = "" if parted.margin is None else f" (the two are {parted.margin:.3g} apart)"
    first = max(0, parted.position - around)
    lines = [f"{'a tie, which rounding explains' if parted.tie else 'A BUG'}{apart}", str(parted)]
    for name, text in zip(("expected", "found"), parted.texts, strict=True):
        before, after = text[first : parted.position], text[parted.position : parted.position + around]
        lines.append(f"{name:>8}: {'... ' if first else ''}{before} >>> {after or 'the end'}")
    return "\n".join(lines)


def assert_same_texts(
    model: PreTrainedModel,
    prompts: Sequence[Tensor],
    expected: Sequence[Sequence[int]],
    output: skipstone.Output,
    options: dict[str, Any],
) -> None:
    """Fail with every row that differs: whether rounding explains it (a tie) or not (a bug), where, and both texts.

    prompts: [T] each. expected: new tokens per row. options: of `generate`; sampled texts of one seed differ by a bug only.
    """
    assert output.new_tokens is not None
    assert len(output.new_tokens) == len(expected)
    judge, told = TieDetector(model), []
    scoring = {name: value for name, value in options.items() if name not in ("max_new_tokens", "min_new_tokens", "seed")}
    for row, (prompt, wanted, found) in enumerate(zip(prompts, expected, output.new_tokens, strict=True)):
        if list(wanted) == list(found):
            continue
        if options.get("do_sample"):
            shared = min(len(wanted), len(found))
            place = next((i for i in range(shared) if wanted[i] != found[i]), shared)
            one, other = (text[place] if place < len(text) else None for text in (wanted, found))
            parted = ScoredDifference(row, place, one, other, texts=(list(wanted), list(found)))
        else:
            parted = judge.compare(prompt, list(wanted), list(found), scoring, row)
            assert parted is not None
        told.append(f"row {row}, position {parted.position}: {message(parted)}")
        told.append(f"  expected whole: {list(wanted)}\n     found whole: {list(found)}")
    if told:
        pytest.fail("\n".join([f"{output.method} says something else than it should", *told]), pytrace=False)


@functools.cache
def tokenizer(size: int = 97) -> PreTrainedTokenizerFast:
    """Single letters, some words that hide stop strings in one token, and enough filler for `size` ids."""
    letters = [chr(97 + i) for i in range(26)]
    vocabulary = ["<pad>", "<eos>", " ", *letters, "ab", "bc", "abc", " the", "stop", "xst", "op!"]
    vocabulary += [f"<{i}>" for i in range(size - len(vocabulary))]
    core = Tokenizer(models.BPE({word: i for i, word in enumerate(vocabulary)}, [], fuse_unk=False))
    core.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    core.decoder = decoders.Fuse()
    wrapped = PreTrainedTokenizerFast(tokenizer_object=core, pad_token="<pad>", eos_token="<eos>", padding_side="left")
    wrapped.chat_template = "{% for m in messages %}{{ m['content'] }} {% endfor %}{% if add_generation_prompt %}z{% endif %}"
    return wrapped


def decode(model: PreTrainedModel, prompts: Sequence[Tensor], method: Any, **options: Any) -> skipstone.Output:
    """One left-padded batch through a method; 24 new tokens unless told."""
    return skipstone.generate(model, families.padded(prompts), method, **{"max_new_tokens": 24, **options})


def assert_as_plain(model: Any, prompt: Any, method: Any, **options: Any) -> Any:
    """The method drafts, and its text is that of plain decoding. Returns its output."""
    output: Any = skipstone.generate(model, prompt, method, **options)
    assert output.new_tokens == skipstone.generate(model, prompt, "autoregressive", **options).new_tokens
    assert output.stats.drafted > 0
    return output


@contextmanager
def forwards(model: PreTrainedModel) -> Iterator[list[int]]:
    """Counts, in the list's one entry, how often any module of the model runs."""
    count = [0]

    def tick(*_: Any) -> None:
        count[0] += 1

    handles = [module.register_forward_pre_hook(tick) for module in model.modules()]
    try:
        yield count
    finally:
        for handle in handles:
            handle.remove()


def save(model: PreTrainedModel, folder: Path) -> Path:
    model.save_pretrained(folder)
    tokenizer().save_pretrained(folder)
    return folder
