"""The rows that decode together: what is asked of each, and what is committed of it."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from torch import Tensor

from skipstone.decoding.draft import Draft, RowVerdict
from skipstone.decoding.sampling import Sampler, Sampling
from skipstone.decoding.stop_strings import StopStrings
from skipstone.models.host import on_device
from skipstone.models.kvstore import KVStore
from skipstone.models.layered import LayeredModel

Criterion = Callable[[Tensor, None], Tensor]  # a transformers StoppingCriteria: (ids [1, T], None) -> bool tensor [1]


@dataclass(frozen=True)
class Request:
    """One sequence to generate.

    prompt: [T] int64, T >= 1. max_new_tokens >= 1. eos: ids that end the row (kept in the output). criteria: evaluated after
    every new token on the row's own unpadded ids. prediction: ids that it may go on with, for methods that look drafts up.
    stop_strings: end the row with the token that completes one.
    """

    prompt: Tensor
    max_new_tokens: int
    eos: frozenset[int] = frozenset()
    sampling: Sampling = field(default_factory=Sampling)
    criteria: Sequence[Criterion] = ()
    prediction: Sequence[int] = ()
    stop_strings: StopStrings | None = None


class Batch:
    """Rows of the target's keys and values, and of what is drawn for them.

    slots: of every row, for committed tokens and scratch. depth: layers of the target that count. last: the last committed
    token of every row, on the device as `root` [B] int64; it is not in the store yet. waiting: prompt tokens [T] that a row has
    still to run; None for a row that has none. turn: of every row, when it was admitted or has run a part of its prompt."""

    def __init__(self, model: LayeredModel, rows: int, slots: int, depth: int) -> None:
        self.device = model.device
        self.store = KVStore(rows, depth, slots, model.kv_dtype)
        self.sampler = Sampler(rows, model.device, engine_draw=model.engine_draw)
        self.last = [0] * rows
        self.root = on_device(self.last, model.device)
        self.alive = [False] * rows
        self.waiting: list[Tensor | None] = [None] * rows
        self.turn = [0] * rows

    def is_free(self, row: int) -> bool:
        return not self.alive[row] and self.waiting[row] is None

    def admit(self, row: int, request: Request, known: int = 0) -> None:
        """A free row waits for its prompt to be run. known: tokens at its beginning, fewer than all, whose keys and values the
        row still has from the request before."""
        self.store.length[row] = known
        self.waiting[row] = request.prompt[known:].to(self.device)
        self.sampler.admit(row, request.sampling, request.prompt, request.eos)
        self.take_turn(row)

    def take_turn(self, row: int) -> None:
        """Of all rows with a prompt to run this one is the last."""
        self.turn[row] = max(self.turn) + 1

    def release(self, row: int) -> None:
        """Free a row. Its slots stay as they are until another request overwrites them."""
        self.alive[row] = False
        self.waiting[row] = None
        self.store.length[row] = 0
        self.sampler.release(row)

    def commit(self, draft: Draft | None, verdicts: list[RowVerdict]) -> None:
        """Move lengths, compact tree paths, remember the last token. Nothing is cloned."""
        for row, verdict in enumerate(verdicts):
            if not verdict.tokens:
                continue
            self.last[row] = verdict.tokens[-1]
            self.sampler.extend(row, verdict.tokens)
            if draft is None:
                continue
            root, nodes = self.store.length[row], verdict.path
            if draft.parents is not None:
                self.store.move(row, [root + 1 + node for node in nodes], range(root + 1, root + 1 + len(nodes)))
            self.store.length[row] = root + len(verdict.tokens)
        self.root = on_device(self.last, self.device)
