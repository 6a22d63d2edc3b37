"""Whether a token's logits have the same bits alone and beside others: on some engines a promise, on others a question of size.

What is compared is what decoding does: a `PartialForward` brings tokens up the layers, as many at once as there are drafts.
"""

import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from skipstone.engines.host_transfer import on_device
from skipstone.engines.kv_cache import KVCache
from skipstone.engines.model_runner import ModelRunner
from skipstone.engines.partial_forward import PartialForward

LENGTH = 80  # tokens of the text, fewer where the model has fewer positions
WIDTHS = (2, 3, 4, 8, 16, 33, 64)  # tokens of a pass
ROUNDED = (2, 8, 64)  # tokens of a pass on an engine that promises nothing: enough to see how large differences are
THREADED = (1, 8, 64)  # tokens of a pass that is run by another number of threads
RAGGED = (80, 53, 27)  # tokens of the texts of a batch
MOST = 8  # tokens of a row in a pass of the batch
TREES = 2
BEFORE = 16  # tokens before a tree
NODES = 40  # drafts of a tree
BRANCHING = 6  # a node hangs on one of so many before it


@dataclass
class LogitsComparison:
    """logits: how many were compared. different: how many have other bits. largest: the largest difference."""

    logits: int = 0
    different: int = 0
    largest: float = 0.0

    def add(self, found: Tensor, expected: Tensor) -> None:
        """Both [n, V] float32."""
        assert found.shape == expected.shape, f"{found.shape} logits against {expected.shape}"
        same = found.view(torch.int32) == expected.view(torch.int32)
        self.logits += found.numel()
        if not bool(same.all()):
            self.different += int((~same).sum())
            self.largest = max(self.largest, float((found - expected).abs().nan_to_num(torch.inf).max()))

    @property
    def fault(self) -> str | None:
        """What a promise was broken by; None where no bit differs."""
        if not self.different:
            return None
        return f"{self.different} of {self.logits} logits have other bits, they differ by up to {self.largest:.3g}"


class BatchInvarianceCheck:
    """The claims about one model on its engine. texts: [T] int64 ids each, of the user; they are repeated where they are short.

    promised: whether the engine promises that all claims hold. threads: with how many threads it runs, None where it does not
    say.
    """

    def __init__(self, runner: ModelRunner, texts: Sequence[Tensor]) -> None:
        self.runner = runner
        self.promised = runner.engine.row_exact
        self.threads: int | None = getattr(runner.engine, "threads", None)
        whole = torch.cat([text.cpu() for text in texts])
        length = min(LENGTH, runner.max_positions)
        repeated = whole.repeat(-(-2 * length // len(whole)))
        self._nodes = min(NODES, runner.max_positions - 2)
        starts = [place * length // len(RAGGED) for place in range(len(RAGGED))]
        self._texts = [repeated[start:][: min(count, length)] for start, count in zip(starts, RAGGED, strict=True)]

    def claims(self) -> list[tuple[str, Callable[[], LogitsComparison]]]:
        """What is claimed of the logits of a token, and the comparison that shows it."""
        widths = self._possible(WIDTHS)
        told = ", ".join(map(str, widths[:-1])) + f" and {widths[-1]}" if widths[1:] else "more"
        found: list[tuple[str, Callable[[], LogitsComparison]]] = [
            (f"the same bits alone and in passes of {told} rows", lambda: self._passes(widths)),
            ("the same bits alone and behind an exit, whose layers drafted", self._behind_an_exit),
            (f"the same bits alone and on the branches of {TREES} random trees", self._trees),
            (f"the same bits alone and in a ragged batch of {len(self._texts)}", self._ragged),
        ]
        if self.threads is not None:
            found.append((f"the same bits on 1 thread and on {self._most_threads}", self._on_other_threads))
        return found

    def difference(self) -> LogitsComparison:
        """How far the logits of wider passes are from those of tokens alone."""
        return self._passes(self._possible(ROUNDED))

    def _possible(self, widths: Sequence[int]) -> list[int]:
        return [width for width in widths if width <= len(self._texts[0])]

    @property
    def _most_threads(self) -> int:
        return max(2, self.threads or 0)

    @cached_property
    def _alone(self) -> list[Tensor]:
        """[T, V] of every text: every token by itself."""
        return [torch.cat([*self._passed(text, 1)]) for text in self._texts]

    def _store(self, rows: int = 1) -> KVCache:
        longest = max(len(self._texts[0]), self._before + self._nodes + 1)
        return KVCache(rows, self.runner.depth, longest)

    def _passed(self, text: Tensor, width: int) -> Iterator[Tensor]:
        """Logits [n, V] of a text, pass by pass of `width` tokens."""
        store = self._store()
        for part in text.split(width):
            yield self._chain(store, part)

    def _chain(self, store: KVCache, part: Tensor, exit_layer: int | None = None) -> Tensor:
        """Logits [n, V] of the next tokens [n] of a store of one row, which they are committed to. exit_layer: tokens come one
        by one and go so far alone."""
        part = part.to(self.runner.device)
        forward = PartialForward(self.runner, store, part[:1], [True], [len(part) - 1])
        if exit_layer is None:
            if len(part) > 1:
                forward.append(part[None, 1:])
        else:
            for token in part[1:]:
                forward.advance(exit_layer)
                forward.append(token[None, None])
        store.length[0] += len(part)
        return forward.finish()[0]

    def _passes(self, widths: Sequence[int]) -> LogitsComparison:
        found = LogitsComparison()
        for width in widths:
            found.add(torch.cat([*self._passed(self._texts[0], width)]), self._alone[0])
        return found

    def _behind_an_exit(self) -> LogitsComparison:
        found, store = LogitsComparison(), self._store()
        exit_layer = max(1, self.runner.depth // 2)
        parts = [self._chain(store, part, exit_layer) for part in self._texts[0].split(MOST)]
        found.add(torch.cat(parts), self._alone[0])
        return found

    def _ragged(self) -> LogitsComparison:
        """Rows take turns of different lengths, beside rows that have ended."""
        found, device, dice = LogitsComparison(), self.runner.device, random.Random(0)
        texts, rows = [text.to(device) for text in self._texts], range(len(self._texts))
        store = self._store(len(texts))
        while any(alive := [store.length[row] < len(texts[row]) for row in rows]):
            parts = [text[start:][: dice.randint(1, MOST)] for text, start in zip(texts, store.length, strict=True)]
            counts = [len(part) for part in parts]
            padded = torch.stack([torch.cat([part, texts[0][:1].expand(max(counts) - len(part))]) for part in parts])
            valid = torch.arange(max(counts), device=device, dtype=torch.int64) < on_device(counts, device)[:, None]
            forward = PartialForward(self.runner, store, padded[:, 0], alive, [max(count - 1, 0) for count in counts])
            if max(counts) > 1:
                forward.append(padded[:, 1:], valid[:, 1:])
            logits = forward.finish()  # [B, n, V]
            for row, count in enumerate(counts):
                start = store.length[row]
                found.add(logits[row, :count], self._alone[row][start : start + count])
                store.length[row] += count
        return found

    @property
    def _before(self) -> int:
        """Tokens before a tree, where there is room for it and its deepest node."""
        return min(BEFORE, self.runner.max_positions - self._nodes - 1)

    def _trees(self) -> LogitsComparison:
        """Every path of a tree against its chain, token by token."""
        found, text, before = LogitsComparison(), self._texts[0], self._before
        store, device = self._store(), self.runner.device
        for part in text[:before].split(1):
            self._chain(store, part)
        for seed in range(TREES):
            dice = random.Random(seed)
            parents = [dice.randint(max(-1, node - BRANCHING), node - 1) for node in range(self._nodes)]
            tokens = text[[dice.randrange(len(text)) for _ in range(self._nodes + 1)]]  # of the root, then of the nodes
            forward = PartialForward(self.runner, store, tokens[:1].to(device), [True], [self._nodes])
            forward.append(tokens[None, 1:].to(device), None, torch.tensor([parents], dtype=torch.int64, device=device))
            logits = forward.finish()[0]  # [1 + nodes, V]
            for leaf in sorted({*range(self._nodes)} - {*parents}):
                path = [leaf]
                while path[0] >= 0:
                    path.insert(0, parents[path[0]])
                columns = [node + 1 for node in path]
                chain = torch.cat([self._chain(store, token) for token in tokens[columns].split(1)])
                found.add(logits[columns], chain)
                store.length[0] = before
        return found

    def _on_other_threads(self) -> LogitsComparison:
        found, engine = LogitsComparison(), self.runner.engine
        expected = self._alone[0]
        try:
            for threads in {1, self._most_threads}:
                setattr(engine, "threads", threads)  # noqa: B010, not every engine has threads
                for width in THREADED:
                    found.add(torch.cat([*self._passed(self._texts[0], width)]), expected)
        finally:
            setattr(engine, "threads", self.threads)  # noqa: B010
        return found
