"""The data of a training run: documents -> token ids -> rows of one length -> a mixed training order, cached on disk.

Documents, tokenizer and seed determine everything. Rows are packed: each document ends with the end token, and a row may hold
the end of one document and the beginning of the next. In a row, ~id (negative) marks a token that is read but not predicted.
"""

import hashlib
import json
import os
import warnings
import zlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from pydantic import Field
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor
from torch.utils.data import Dataset
from transformers import PreTrainedTokenizerBase as Tokenizer

from skipstone.hf.api import bos_prefix
from skipstone.train.data.documents import Document, deduplicate, fingerprint, split
from skipstone.utils.files import digest, publish
from skipstone.utils.settings_files import SettingsPart

BATCH = 256  # documents that are tokenised in one call
FORMAT = 3  # part of every cached result's key: raise it when the same documents give other rows
IGNORED = -100  # the label of a token that is not to be predicted, as in transformers


class RowPlan(SettingsPart):
    """How documents become rows. length: tokens a row. rows: of the whole training order. held_out: share of documents."""

    length: int = Field(ge=2)
    rows: int = Field(ge=1)
    held_out: float = Field(default=0.02, ge=0, lt=1)
    seed: int = Field(default=0, ge=0)


@dataclass(frozen=True)
class TrainingData:
    """train: [rows, length] int64, in training order. held_out: source -> [N, length] int64. report: counts for the model card.

    report: what JSON holds: the plan, `tokens` and `sha256` of the training order, `held_rows` of each source, and `sources`:
    name -> documents, exact and near (duplicates), kept; train and held_out: {documents, bytes, tokens} before they are cut
    into rows; rows (its part of the training order), epochs.
    """

    train: Tensor
    held_out: dict[str, Tensor]
    report: dict[str, Any]


class TokenRows(Dataset[dict[str, Tensor]]):
    """Rows [N, length] int64 as a model takes them: {"input_ids": [length], "labels": the same, IGNORED where a token is not to
    be predicted}; models shift labels."""

    def __init__(self, rows: Tensor) -> None:
        self.rows = rows

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        row = self.rows[index]
        given = row < 0
        return {"input_ids": torch.where(given, ~row, row), "labels": row.masked_fill(given, IGNORED)}


def shifted(labels: Tensor) -> Tensor:
    """labels [B, T] -> what every position predicts [B, T]: its right neighbour's label, nothing at the end."""
    return F.pad(labels[:, 1:], (0, 1), value=IGNORED)


def pack(documents: Sequence[Document], tokenizer: Tokenizer, length: int, seed: int, eos_id: int) -> Tensor:
    """[N, length] int64: the documents in an order drawn by `seed`, `eos_id` after each, cut into rows; the rest is dropped.

    The order depends on the documents alone, not on the order they come in. Special tokens that stand in a text are text; a
    tokenizer that begins texts with a bos token of its own begins every document with one, which is not predicted. A document
    with a prompt begins a row of its own where it does not fit into the one before, which is filled up with end tokens that are
    not predicted; of one longer than a row only the first row is kept. ValueError where there is not enough for one row.
    """
    return _cut(_tokens(documents, tokenizer, length, seed, eos_id), length, f"{len(documents)} documents")


def _tokens(documents: Sequence[Document], tokenizer: Tokenizer, length: int, seed: int, eos_id: int) -> NDArray[np.int64]:
    """One stream of ids, [T]. A prompt's tokens are its own, as when decoding starts from it."""
    ordered = sorted(documents, key=lambda document: document.rank(seed, "order"))
    first = [token for token in bos_prefix(tokenizer) if token != eos_id]  # an end token before it already begins a document
    parts: list[NDArray[np.int64]] = []
    total = 0
    for start in range(0, len(ordered), BATCH):
        batch = ordered[start : start + BATCH]
        texts = _encode([document.text[document.given :] for document in batch], tokenizer)
        prompts = _encode([document.text[: document.given] for document in batch], tokenizer)
        for prompt, ids in zip(prompts, texts, strict=True):
            tokens = [*(~i for i in (*first, *prompt)), *ids, eos_id]
            if prompt:
                tokens = tokens[:length]  # tokens of a later row would be predicted without the prompt
                if (place := total % length) + len(tokens) > length:
                    tokens = [~eos_id] * (length - place) + tokens
            parts.append(np.array(tokens, np.int64))
            total += len(tokens)
    return np.concatenate(parts) if parts else np.empty(0, np.int64)


def _encode(texts: list[str], tokenizer: Tokenizer) -> list[list[int]]:
    plain: dict[str, Any] = {"add_special_tokens": False, "split_special_tokens": True, "return_attention_mask": False}
    return tokenizer(texts, **plain, verbose=False)["input_ids"]  # else it warns of documents longer than the context


def _cut(tokens: NDArray[np.int64], length: int, what: str) -> Tensor:
    """Cut a stream of tokens into rows, without those that predict nothing."""
    count = len(tokens) // length
    rows = tokens[: count * length].reshape(count, length)
    rows = rows[(rows[:, 1:] >= 0).any(axis=1)]
    if not len(rows):
        raise ValueError(f"{what} make {len(tokens)} tokens, not one row of {length} with something to predict: give more text")
    return torch.from_numpy(rows)


def mix(packed: Mapping[str, Tensor], weights: Mapping[str, float], rows: int, seed: int) -> tuple[Tensor, dict[str, float]]:
    """A training order [rows, length] int64 with every source's share by weight, and how often each source's rows come: epochs.

    packed: source -> [N, length] int64. Shares are exact, by largest remainders. A source whose share is more than it has is
    repeated in whole epochs, each in an order of its own; which source comes when is shuffled. weights: of the same
    sources, positive. ValueError where a source would get no row.
    """
    counts = _shares(packed, weights, rows)
    turns = np.repeat(np.arange(len(packed)), list(counts.values()))
    np.random.default_rng([seed, 0]).shuffle(turns)
    order = torch.empty((rows, next(iter(packed.values())).shape[1]), dtype=torch.long)
    for index, (name, own) in enumerate(packed.items()):
        rng = np.random.default_rng([seed, 1, zlib.crc32(name.encode())])  # no other source moves it
        epochs = [rng.permutation(len(own)) for _ in range(-(-counts[name] // len(own)))]
        picked = torch.from_numpy(np.concatenate(epochs)[: counts[name]])
        order[torch.from_numpy(np.flatnonzero(turns == index))] = own[picked]
    return order, {name: counts[name] / len(own) for name, own in packed.items()}


def _shares(packed: Mapping[str, Tensor], weights: Mapping[str, float], rows: int) -> dict[str, int]:
    """Rows of each source, in the order of `packed`; of equal remainders the earlier source has the row."""
    exact = {name: Fraction(str(float(weights[name]))) for name in packed}  # 0.1 is a tenth
    total = sum(exact.values())
    exact = {name: rows * weight / total for name, weight in exact.items()}
    counts = {name: int(share) for name, share in exact.items()}
    by_remainder = sorted(packed, key=lambda name: counts[name] - exact[name])
    for name in by_remainder[: rows - sum(counts.values())]:
        counts[name] += 1
    if empty := [name for name, count in counts.items() if not count]:
        raise ValueError(f"source {empty[0]!r} would get none of the {rows} rows: raise its weight or train on more rows")
    return counts


def prepare(
    documents: Sequence[Document], weights: Mapping[str, float], tokenizer: Tokenizer, plan: RowPlan, cache: Path | None = None
) -> TrainingData:
    """Everything from documents to rows: deduplicate, split, pack each source, mix.

    weights: of every source, by name. cache: a folder for results, one for each combination of documents, weights, plan and
    tokenizer. A damaged result is made anew, with a warning. ValueError as the steps have it, and where a source is too small
    for one row to train on; one whose held-out documents do not fill a row is not evaluated, with a warning.
    """
    if not isinstance(tokenizer.eos_token_id, int):
        raise ValueError("the tokenizer has no eos_token, which ends every document: set tokenizer.eos_token")
    if cache is None:
        return _build(documents, weights, tokenizer, plan)
    path = cache / _key([fingerprint(documents), [*weights.items()], plan.model_dump(mode="json")], tokenizer)
    if (prepared := load(path)) is None:
        prepared = _build(documents, weights, tokenizer, plan)
        save(path, prepared)
    return prepared


def save(path: Path, prepared: TrainingData) -> None:
    """Write prepared data as a file, whole or not at all. OSError (a full disk) leaves nothing behind."""
    tensors = {str(index): rows for index, rows in enumerate((prepared.train, *prepared.held_out.values()))}
    path.parent.mkdir(parents=True, exist_ok=True)
    hidden = path.with_name(f".{path.name}-{os.getpid()}")  # several processes may write the same rows
    try:
        save_file(tensors, hidden, {"report": json.dumps(prepared.report), "sha256": _sha256(tensors.values())})
        publish(hidden, path)
    except SafetensorError as error:
        raise OSError(f"{path} could not be written: {error}") from error
    finally:
        hidden.unlink(missing_ok=True)


def load(path: Path) -> TrainingData | None:
    """Data that `save` wrote, mapped from their file; None if there are none. Damaged data are removed with a warning."""
    if not path.is_file():
        return None
    try:
        with safe_open(path, "pt") as file:
            about, rows = file.metadata(), [file.get_tensor(str(index)) for index in range(len(file.keys()))]
        if _sha256(rows) != about["sha256"]:
            raise ValueError("its SHA-256 is another")
        report = json.loads(about["report"])
        return TrainingData(rows[0], dict(zip(report["held_rows"], rows[1:], strict=True)), report)
    except (OSError, ValueError, KeyError, TypeError, IndexError, SafetensorError) as error:
        warnings.warn(f"the cached data in {path} is damaged ({error}) and is made anew", UserWarning, stacklevel=2)
        path.unlink()
        return None


def _sha256(tensors: Iterable[Tensor]) -> str:
    whole = hashlib.sha256()
    for tensor in tensors:
        whole.update(tensor.numpy().data)
    return whole.hexdigest()


def _key(facts: list[Any], tokenizer: Tokenizer) -> str:
    """The name of a result, a hash of everything that it depends on. ValueError for a tokenizer that has no hash."""
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is None:
        raise ValueError(f"expected a tokenizer of the tokenizers package, found {type(tokenizer).__name__}")
    return digest([FORMAT, facts, backend.to_str(), tokenizer.eos_token_id], 32)


def _build(documents: Sequence[Document], weights: Mapping[str, float], tokenizer: Tokenizer, plan: RowPlan) -> TrainingData:
    eos_id: Any = tokenizer.eos_token_id
    kept, duplicates = deduplicate(documents)
    parts = dict(zip(("train", "held_out"), split(kept, plan.held_out, plan.seed), strict=True))
    report: dict[str, dict[str, Any]] = {name: {**duplicates[name]} for name in weights}
    packed: dict[str, dict[str, Tensor]] = {part: {} for part in parts}
    for name in weights:
        for part, of_part in parts.items():
            own = [document for document in of_part if document.source == name]
            if not own and part == "held_out":  # held_out is 0, or the source has one document
                continue
            tokens = _tokens(own, tokenizer, plan.length, plan.seed, eos_id)
            what = f"source {name!r}: the {len(own)} {part} documents (held_out={plan.held_out})"
            try:
                packed[part][name] = _cut(tokens, plan.length, what)
            except ValueError as error:
                if part == "train":
                    raise
                warnings.warn(f"{error}; not evaluated", stacklevel=2)
            size = sum(len(document.text.encode()) for document in own)
            report[name][part] = {"documents": len(own), "bytes": size, "tokens": len(tokens)}
    train, epochs = mix(packed["train"], weights, plan.rows, plan.seed)
    for name, own in packed["train"].items():
        report[name] |= {"rows": round(epochs[name] * len(own)), "epochs": epochs[name]}
    held_rows = {name: len(rows) for name, rows in packed["held_out"].items()}
    facts = {**plan.model_dump(), "tokens": train.numel(), "sha256": _sha256([train]), "held_rows": held_rows}
    return TrainingData(train, packed["held_out"], {**facts, "sources": report})
