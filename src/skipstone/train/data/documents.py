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
BANDS = 32
"""Bands of a MinHash signature. Two documents of similarity J share none with probability (1 - J^4)^32: 5e-8 at J = .8, .13 at
J = .5."""
BAND_ROWS = 4  # entries of the signature in a band
LIKELY = 0.6  # share of equal signature entries from which candidates are compared exactly: 5.6 standard deviations below NEAR

Hashes = NDArray[np.uint64]
Signature = NDArray[np.uint32]


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
    SHINGLE-word shingles, of two documents of MIN_WORDS words or more. Candidates share a band of their
    MinHash signatures (Broder, On the resemblance and containment of documents, 1997), and are compared exactly.
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
    """The documents so far, found again by the bands of their signatures."""

    def __init__(self) -> None:
        rng = np.random.default_rng(0)
        self._multipliers = rng.integers(1, 2**32, (BANDS * BAND_ROWS, 1), dtype=np.uint32) | np.uint32(1)
        self._shingles: list[Hashes] = []
        self._signatures: list[Signature] = []
        self._buckets: defaultdict[tuple[int, bytes], list[int]] = defaultdict(list)

    def contains(self, words: list[str]) -> bool:
        """Whether an earlier document is nearly the same. If none is, store this one."""
        if len(words) < MIN_WORDS:
            return False
        texts = (" ".join(words[first : first + SHINGLE]) for first in range(len(words) - SHINGLE + 1))
        hashes = b"".join(hashlib.blake2b(text.encode(), digest_size=8).digest() for text in texts)
        shingles = np.unique(np.frombuffer(hashes, np.uint64))
        signature = self._signature(shingles)
        bands = [(band, row.tobytes()) for band, row in enumerate(signature.reshape(BANDS, BAND_ROWS))]
        candidates = {index for band in bands for index in self._buckets.get(band, ())}
        likely = [index for index in candidates if (self._signatures[index] == signature).mean() >= LIKELY]
        if any(jaccard(shingles, self._shingles[index]) >= NEAR for index in likely):
            return True
        for band in bands:
            self._buckets[band].append(len(self._shingles))
        self._shingles.append(shingles)
        self._signatures.append(signature)
        return False

    def _signature(self, shingles: Hashes) -> Signature:
        """[BANDS * BAND_ROWS]: the smallest value of every hash function over the shingles, of which 32 bits do."""
        short = shingles.astype(np.uint32)
        smallest = np.full(len(self._multipliers), np.iinfo(np.uint32).max, np.uint32)
        for start in range(0, len(short), 4096):  # parts that fit the processor's cache
            np.minimum(smallest, (self._multipliers * short[start : start + 4096]).min(axis=1), out=smallest)
        return smallest


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
