"""Collects documents from sources, removes duplicates, splits them into training and held-out ones.

Nothing depends on the order of a folder. The split of a document depends on that document alone.
"""

import hashlib
from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from skipstone.train.data.sources import Source

SHINGLE = 8  # consecutive words of a shingle, the unit that documents are compared by
MIN_WORDS = 50  # shorter documents are compared as a whole only: they have too few shingles
NEAR = 0.8  # Jaccard similarity of the sets of shingles from which documents are near duplicates
SKETCH = 64  # smallest hashes of a document's shingles, by which candidates are found
LIKELY = 0.5
"""Share of a sketch that a candidate's sketch has, too. Two documents of similarity NEAR share at least .8 of it on average: 6
standard deviations above LIKELY."""

Hashes = NDArray[np.uint64]


@dataclass(frozen=True, slots=True)
class Document:
    """A text, the name of its source and its name there. given: its first characters that are read, not predicted."""

    text: str
    source: str
    name: str
    given: int = 0

    def rank(self, seed: int, purpose: str) -> float:
        """A pseudo-random number in [0, 1) that depends on the document alone."""
        return int.from_bytes(_hash(str(seed), purpose, self.source, self.name, self.text)[:6], "big") / 2**48


def _hash(*parts: str) -> bytes:
    return hashlib.sha256("\0".join(parts).encode("utf-8", "surrogatepass")).digest()


def collect(sources: Sequence[Source], base: Path) -> list[Document]:
    """The documents of all sources, in the recipe's order; blank ones are left out and every line ends in a plain newline.

    base: the recipe's folder, which relative paths belong to (else to the current directory). FileNotFoundError for what is
    not there, ValueError for a source without a text, a text that UTF-8 cannot hold, and two sources of one name.
    """
    counts = Counter(source.name for source in sources)
    if not counts:
        raise ValueError("there are no sources: expected at least one, such as {kind: text, path: folder}")
    if twice := [name for name, count in counts.items() if count > 1]:
        raise ValueError(f"two sources are called {twice[0]!r}: give each a name of its own")
    documents = []
    for source in sources:
        before = len(documents)
        for name, *parts in source.read(base):
            text, prompt = (_plain(part, source.name, name) for part in parts)
            if text.strip():
                documents.append(Document(prompt + text, source.name, name, len(prompt)))
        if len(documents) == before:
            raise ValueError(f"source {source.name!r} ({source.path}) has no documents: what it gives is blank or nothing")
    return documents


def fingerprint(documents: Iterable[Document]) -> str:
    """A hash of documents in their order, the same wherever they were read from."""
    hashes = (_hash(each.source, each.name, each.text, str(each.given)) for each in documents)
    return hashlib.sha256(b"".join(hashes)).hexdigest()


def _plain(text: str, source: str, name: str) -> str:
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise ValueError(f"source {source!r}, document {name}: letter {error.start} is half a surrogate pair") from error
    return text.replace("\r\n", "\n").replace("\r", "\n")


def deduplicate(documents: Iterable[Document]) -> tuple[list[Document], dict[str, dict[str, int]]]:
    """The documents that equal no earlier one, nor nearly, in their order, and source -> {documents, exact, near, kept}.

    Equal: the same words, whatever the whitespace. Nearly: a Jaccard similarity of at least NEAR between the sets of
    SHINGLE-word shingles, of two documents of MIN_WORDS words or more. Candidates share much of their
    sketches, the smallest hashes (Broder, On the resemblance and containment of documents, 1997), and are compared exactly.
    """
    seen: set[bytes] = set()
    near = _NearDuplicates()
    kept: list[Document] = []
    report: dict[str, dict[str, int]] = {}
    for document in documents:
        words = document.text.split()
        whole = hashlib.sha256(" ".join(words).encode()).digest()
        kind = "exact" if whole in seen else "near" if near.contains(words) else "kept"
        seen.add(whole)
        counts = report.setdefault(document.source, dict.fromkeys(("documents", "exact", "near", "kept"), 0))
        counts["documents"] += 1
        counts[kind] += 1
        if kind == "kept":
            kept.append(document)
    return kept, report


class _NearDuplicates:
    """The documents so far, found again by their sketches: the SKETCH smallest hashes of their shingles."""

    def __init__(self) -> None:
        self._shingles: list[Hashes] = []
        self._holders: defaultdict[int, list[int]] = defaultdict(list)  # hash of a sketch -> documents

    def contains(self, words: list[str]) -> bool:
        """Whether an earlier document is nearly the same. If none is, store this one."""
        if len(words) < MIN_WORDS:
            return False
        texts = (" ".join(words[first : first + SHINGLE]) for first in range(len(words) - SHINGLE + 1))
        hashes = b"".join(hashlib.blake2b(text.encode(), digest_size=8).digest() for text in texts)
        shingles = np.unique(np.frombuffer(hashes, np.uint64))
        sketch = shingles[:SKETCH].tolist()
        shared = Counter(index for code in sketch for index in self._holders.get(code, ()))
        likely = [index for index, count in shared.items() if count >= LIKELY * len(sketch)]
        if any(jaccard(shingles, self._shingles[index]) >= NEAR for index in likely):
            return True
        for code in sketch:
            self._holders[code].append(len(self._shingles))
        self._shingles.append(shingles)
        return False


def jaccard(one: Hashes, other: Hashes) -> float:
    """Shared elements over all elements of two sets, given as arrays without repetitions."""
    shared = np.intersect1d(one, other, assume_unique=True).size
    return shared / (len(one) + len(other) - shared)


def split(documents: Sequence[Document], held_out: float = 0.02, seed: int = 0) -> tuple[list[Document], list[Document]]:
    """(training, held-out) documents, each in the given order.

    A document is held out where its own hash falls below the share `held_out`, whatever else there is. So that every source can
    be evaluated, one with two documents or more holds out at least one (that of the lowest hash) and trains on at least one.
    held_out: in [0, 1), which `RowPlan` and recipes check.
    """
    groups: defaultdict[str, list[tuple[float, int]]] = defaultdict(list)
    for index, document in enumerate(documents):
        groups[document.source].append((document.rank(seed, "split"), index))
    chosen: set[int] = set()
    for group in map(sorted, groups.values() if held_out else ()):
        count = sum(rank < held_out for rank, _ in group)
        chosen.update(index for _, index in group[: min(max(count, 1), len(group) - 1)])
    training = [document for index, document in enumerate(documents) if index not in chosen]
    return training, [documents[index] for index in sorted(chosen)]
