"""Whether a token's logits have the same bits alone and in a batch: promised by some engines, measured on others. The passes
are those of decoding: a `PartialForward` brings tokens up the layers, as many at once as there are drafts.

Also, whether a quantised layer gives a row the same sum alone and in a batch, on the inputs of a text. Some kernels have
another loop for one row than for many, and round differently. Some choose by all rows of a pass which inputs to compute in a
finer dtype (bitsandbytes' outliers), so a row's sum depends on its neighbours by more than rounding.
"""

import random
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from skipstone.engines.host_transfer import on_device
from skipstone.engines.kv_cache import KVCache
from skipstone.engines.model_runner import ModelRunner
from skipstone.engines.native import library
from skipstone.engines.native.engine import NativeEngine
from skipstone.engines.partial_forward import PartialForward
from skipstone.models.quantised_checkpoints import kernels
from skipstone.utils.cached_property import cached_property

LENGTH = 80  # tokens of the text, fewer if the model has fewer positions
WIDTHS = (2, 3, 4, 8, 16, 33, 64)  # tokens of a pass
ROUNDED_WIDTHS = (2, 8, 64)  # on an engine that promises nothing; enough to see how large differences are
OTHER_WIDTHS = (1, 8, 64)  # of passes on another number of threads, or with other instructions
RAGGED_LENGTHS = (80, 53, 27)  # tokens of the texts of a batch
MAX_ROW_TOKENS = 8  # of a row in a pass of the batch
TREES = 2
TOKENS_BEFORE_TREE = 16
NODES = 40  # drafts of a tree
BRANCHING = 6  # a node's parent is one of so many nodes before it


LogitPairs = Iterator[tuple[Tensor, Tensor]]  # found and expected logits, [n, V] float32 each


def repeat_text(text: Tensor, length: int) -> Tensor:
    """The first `length` tokens of a text that is repeated as often as needed."""
    return text.repeat(-(-length // len(text)))[:length]


def run_chain(runner: ModelRunner, store: KVCache, tokens: Tensor, exit_layer: int | None = None) -> Tensor:
    """Append tokens [n] to a store of one row. Returns their logits [n, V].

    exit_layer: the tokens come one by one and go alone up to this layer, as LayerSkip drafts them.
    """
    tokens = tokens.to(runner.device)
    forward = PartialForward(runner, store, tokens[:1], [True], [len(tokens) - 1])
    if exit_layer is None and len(tokens) > 1:
        forward.append(tokens[None, 1:])
    elif exit_layer is not None:
        for token in tokens[1:]:
            forward.advance(exit_layer)
            forward.append(token[None, None])
    store.length[0] += len(tokens)
    return forward.finish()[0]


def run_in_passes(runner: ModelRunner, store: KVCache, text: Tensor, width: int) -> Iterator[Tensor]:
    """Append a text [T] in passes of `width` tokens. Yields the logits [n, V] of each pass."""
    return (run_chain(runner, store, part) for part in text.split(width))


class LogitsComparison:
    """Counts of compared logits and of those with other bits, and the largest difference."""

    def __init__(self, pairs: Iterable[tuple[Tensor, Tensor]]) -> None:
        """pairs: found and expected logits, [n, V] float32 each."""
        self.logits, self.different, self.largest = 0, 0, 0.0
        for found, expected in pairs:
            assert found.shape == expected.shape, f"{found.shape} logits against {expected.shape}"
            same = found.view(torch.int32) == expected.view(torch.int32)
            self.logits += found.numel()
            if not bool(same.all()):
                self.different += int((~same).sum())
                self.largest = max(self.largest, float((found - expected).abs().nan_to_num(torch.inf).max()))

    @property
    def fault(self) -> str | None:
        """The broken promise in words, or None if no bit differs."""
        if not self.different:
            return None
        return f"{self.different} of {self.logits} logits have other bits, they differ by up to {self.largest:.3g}"


class BatchInvarianceCheck:
    """The claims about one model on its engine.

    promised: whether the engine promises that all claims hold.
    """

    def __init__(self, runner: ModelRunner, texts: Sequence[Tensor]) -> None:
        """texts: [T] int64 ids each, which are joined, and repeated if they are short."""
        self.runner, self.promised = runner, runner.engine.row_exact
        length = min(LENGTH, runner.max_positions)
        repeated = repeat_text(torch.cat([text.cpu() for text in texts]), 2 * length)
        starts = (index * length // len(RAGGED_LENGTHS) for index in range(len(RAGGED_LENGTHS)))
        self._texts = [repeated[start:][: min(n, length)] for start, n in zip(starts, RAGGED_LENGTHS, strict=True)]
        self._nodes = min(NODES, runner.max_positions - 2)
        self._before_tree = min(TOKENS_BEFORE_TREE, runner.max_positions - self._nodes - 1)  # leaves room for the tree

    def claims(self) -> list[tuple[str, Callable[[], LogitsComparison]]]:
        """(claim about the logits of a token, the comparison that tests it)."""
        widths, engine = self._possible(WIDTHS), self.runner.engine
        listed = _listed(widths) if widths[1:] else "more"
        claims: dict[str, Callable[[], LogitPairs]] = {
            f"the same bits alone and in passes of {listed} rows": partial(self._in_widths, widths),
            "the same bits alone and behind an exit, whose layers drafted": self._behind_exit,
            f"the same bits alone and on the branches of {TREES} random trees": self._on_trees,
            f"the same bits alone and in a ragged batch of {len(self._texts)}": self._in_ragged_batch,
        }
        if isinstance(engine, NativeEngine):
            most = max(2, engine.threads)
            claims[f"the same bits on 1 thread and on {most}"] = partial(self._with, "threads", {1, most})
            if (levels := library.levels())[1:]:
                claims[f"the same bits with the instructions of {_listed(levels)}"] = partial(self._with, "level", levels)
        return [(claim, lambda pairs=pairs: LogitsComparison(pairs())) for claim, pairs in claims.items()]

    def difference(self) -> LogitsComparison:
        """The difference between the logits of wider passes and those of single tokens."""
        return LogitsComparison(self._in_widths(self._possible(ROUNDED_WIDTHS)))

    def _possible(self, widths: Sequence[int]) -> list[int]:
        return [width for width in widths if width <= len(self._texts[0])]

    @cached_property
    def _alone(self) -> list[Tensor]:
        """[T, V] per text: every token by itself."""
        return [self._logits(text, 1) for text in self._texts]

    def _store(self, rows: int = 1) -> KVCache:
        return KVCache(rows, self.runner.depth, max(len(self._texts[0]), self._before_tree + self._nodes + 1))

    def _logits(self, text: Tensor, width: int) -> Tensor:
        return torch.cat([*run_in_passes(self.runner, self._store(), text, width)])

    def _in_widths(self, widths: Sequence[int]) -> LogitPairs:
        return ((self._logits(self._texts[0], width), self._alone[0]) for width in widths)

    def _behind_exit(self) -> LogitPairs:
        store, exit_layer = self._store(), max(1, self.runner.depth // 2)
        parts = [run_chain(self.runner, store, part, exit_layer) for part in self._texts[0].split(MAX_ROW_TOKENS)]
        yield torch.cat(parts), self._alone[0]

    def _in_ragged_batch(self) -> LogitPairs:
        """Rows take turns of different lengths, next to rows that have ended."""
        device, dice = self.runner.device, random.Random(0)
        texts, rows = [text.to(device) for text in self._texts], range(len(self._texts))
        store = self._store(len(texts))
        while any(alive := [store.length[row] < len(texts[row]) for row in rows]):
            parts = [text[start:][: dice.randint(1, MAX_ROW_TOKENS)] for text, start in zip(texts, store.length, strict=True)]
            counts = [len(part) for part in parts]
            padded = torch.stack([torch.cat([part, texts[0][:1].expand(max(counts) - len(part))]) for part in parts])
            valid = torch.arange(max(counts), device=device, dtype=torch.int64) < on_device(counts, device)[:, None]
            forward = PartialForward(self.runner, store, padded[:, 0], alive, [max(count - 1, 0) for count in counts])
            if max(counts) > 1:
                forward.append(padded[:, 1:], valid[:, 1:])
            logits = forward.finish()  # [B, n, V]
            for row, count in enumerate(counts):
                start = store.length[row]
                yield logits[row, :count], self._alone[row][start : start + count]
                store.length[row] += count

    def _on_trees(self) -> LogitPairs:
        """Every path of a tree against its chain, token by token."""
        text, store, runner = self._texts[0], self._store(), self.runner
        deque(run_in_passes(runner, store, text[: self._before_tree], 1), maxlen=0)
        for seed in range(TREES):
            dice = random.Random(seed)
            parents = [dice.randint(max(-1, node - BRANCHING), node - 1) for node in range(self._nodes)]
            tokens = text[[dice.randrange(len(text)) for _ in range(self._nodes + 1)]].to(runner.device)  # root, then nodes
            forward = PartialForward(runner, store, tokens[:1], [True], [self._nodes])
            forward.append(tokens[None, 1:], None, torch.tensor([parents], dtype=torch.int64, device=runner.device))
            logits = forward.finish()[0]  # [1 + nodes, V]
            for leaf in sorted({*range(self._nodes)} - {*parents}):
                path = [leaf]
                while path[0] >= 0:
                    path.insert(0, parents[path[0]])
                columns = [node + 1 for node in path]
                yield logits[columns], torch.cat([*run_in_passes(runner, store, tokens[columns], 1)])
                store.length[0] = self._before_tree

    def _with(self, name: str, values: Iterable[Any]) -> LogitPairs:
        """With each of these values of an attribute of the engine."""
        expected, engine = self._alone[0], self.runner.engine
        own = getattr(engine, name)
        try:
            for value in values:
                setattr(engine, name, value)
                yield from ((self._logits(self._texts[0], width), expected) for width in OTHER_WIDTHS)
        finally:
            setattr(engine, name, own)


def _listed(values: Sequence[Any]) -> str:
    return ", ".join(map(str, values[:-1])) + f" and {values[-1]}"


ROWS = 32  # tokens of the text in the comparison of sums
TOKENS = 96  # tokens of the text in the comparison of keys and values; few of them differ much
KERNEL_WIDTHS = (2, 8, 32)  # rows of a pass that are compared with single rows


@dataclass
class KernelResult:
    """The layers of one kernel."""

    layers: int = 0
    different: int = 0  # layers that gave a row another sum in a batch
    sums: int = 0  # compared
    largest: float = 0.0  # difference
    share: float = 0.0  # largest difference as a share of the layer's largest sum

    def add(self, alone: Tensor, batched: list[Tensor]) -> None:
        """Sums [1, n, d_out] of one layer."""
        differences = [float((one.float() - alone.float()).abs().nan_to_num(torch.inf).max()) for one in batched]
        largest = max(differences)
        self.layers += 1
        self.different += largest > 0
        self.sums += len(batched) * alone.numel()
        self.largest = max(self.largest, largest)
        self.share = max(self.share, largest / max(float(alone.abs().max()), 1e-30))

    def __str__(self) -> str:
        if not self.different:
            return f"the same sums in all {self.layers} layers"
        difference = f"by up to {self.largest:.2g} ({self.share:.1g} of the largest)"
        return f"other sums in {self.different} of {self.layers} layers, {difference}"


@torch.inference_mode()
def compare_kernels(runner: ModelRunner, text: Tensor) -> dict[str, KernelResult]:
    """Name of a quantised kernel -> result. text: [T] int64, repeated if it is short."""
    ids = repeat_text(text, min(ROWS, runner.max_positions)).to(runner.device)
    inputs: list[tuple[str, nn.Module, Tensor]] = []  # of every layer, [1, n, d_in]
    with ExitStack() as stack:
        for name, modules in kernels(runner.model).items():
            for module in modules:
                hook = partial(lambda name, module, given: inputs.append((name, module, given[0].clone())), name)
                stack.callback(module.register_forward_pre_hook(hook).remove)
        runner.read(ids[None])
    results: dict[str, KernelResult] = {}
    for name, module, rows in inputs:
        alone, *batched = (torch.cat([module(part) for part in rows.split(width, 1)], 1) for width in (1, *KERNEL_WIDTHS))
        results.setdefault(name, KernelResult()).add(alone, batched)
    return results


@torch.inference_mode()
def logits_spread(runner: ModelRunner, text: Tensor, tokens: Tensor) -> float:
    """Largest difference between the logits of tokens [n] after a text [T] read token by token and in wider passes."""
    last = torch.stack([_read_in_passes(runner, text, width)[0][tokens] for width in (1, *KERNEL_WIDTHS, len(text))])
    return float((last - last[0]).abs().nan_to_num(torch.inf).max())


@torch.inference_mode()
def kv_spread(runner: ModelRunner, text: Tensor) -> float:
    """The same of stored keys and values, as a share of the largest entry of a layer. text: repeated if it is short."""
    text = repeat_text(text, min(TOKENS, runner.max_positions))
    alone, *others = (_read_in_passes(runner, text, width)[1] for width in (1, *KERNEL_WIDTHS, len(text)))
    shares = [0.0]
    for other in others:
        for one, expected in zip((*other.keys, *other.values), (*alone.keys, *alone.values), strict=True):
            if one is not None and expected is not None:
                one, expected = (entries[:, :, : len(text)].float() for entries in (one, expected))
                shares.append(float((one - expected).abs().max() / expected.abs().max().clamp_min(1e-30)))
    return max(shares)


def _read_in_passes(runner: ModelRunner, text: Tensor, width: int) -> tuple[Tensor, KVCache]:
    """(logits [V] after a text that is read in passes of `width` tokens, its keys and values)."""
    store = KVCache(1, runner.depth, len(text))
    (logits,) = deque(run_in_passes(runner, store, text, width), maxlen=1)
    return logits[-1], store
