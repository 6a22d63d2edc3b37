"""What a drafter sees of the session that it drafts for."""

from torch import Tensor

from skipstone.decoding.sampling import Sampler
from skipstone.engines.host_transfer import on_device
from skipstone.engines.kv_cache import KVCache
from skipstone.engines.model_runner import ModelRunner
from skipstone.engines.partial_forward import PartialForward


class SessionView:
    """The rows of a session: their keys and values, their sampler, and the last committed token of each.

    model: the target. slots: of every row, for committed tokens and scratch. depth: layers of the target that count. last: the
    last committed token of every row, on the device as `root` [B] int64. It is not in the store yet. alive: rows that decode.
    """

    def __init__(self, model: ModelRunner, rows: int, slots: int, depth: int) -> None:
        self.model, self.rows = model, rows
        self.store = KVCache(rows, depth, slots, model.kv_dtype)
        engine = model.engine
        self.sampler = Sampler(rows, model.device, engine_draw=engine.draw if engine.supports_draws else None)
        self.last = [0] * rows
        self.root = on_device(self.last, model.device)
        self.alive = [False] * rows

    def start_forward(
        self, max_drafts: list[int], shortlist: Tensor | None = None, drafting_model: ModelRunner | None = None
    ) -> PartialForward:
        """A new forward that holds the last committed token of every live row.

        max_drafts: draft tokens of every row that it has room for. shortlist: [S] int64, the ids that drafts are picked from;
        None for all. drafting_model: the target's layers in fewer bits; None for the target itself.
        """
        return PartialForward(self.model, self.store, self.root, self.alive, max_drafts, shortlist, drafting_model)
