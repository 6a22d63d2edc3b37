"""What a drafter sees of the session that it drafts for."""

from torch import Tensor

from skipstone.decoding.sampling import Sampler
from skipstone.models.frontier import Frontier
from skipstone.models.host import on_device
from skipstone.models.kvstore import KVStore
from skipstone.models.layered import LayeredModel


class SessionView:
    """The rows of a session: their keys and values, their sampler, and the last committed token of each.

    model: the target. slots: of every row, for committed tokens and scratch. depth: layers of the target that count. last: the
    last committed token of every row, on the device as `root` [B] int64. It is not in the store yet. alive: rows that decode.
    """

    def __init__(self, model: LayeredModel, rows: int, slots: int, depth: int) -> None:
        self.model = model
        self.store = KVStore(rows, depth, slots, model.kv_dtype)
        self.sampler = Sampler(rows, model.device, engine_draw=model.engine_draw)
        self.last = [0] * rows
        self.root = on_device(self.last, model.device)
        self.alive = [False] * rows

    @property
    def rows(self) -> int:
        return self.store.rows

    def start_forward(
        self, most: list[int], shortlist: Tensor | None = None, drafting_model: LayeredModel | None = None
    ) -> Frontier:
        """A new forward that holds the last committed token of every live row.

        most: draft tokens of every row that it has room for. shortlist: [S] int64, the ids that drafts are picked from; None
        for all. drafting_model: the target's layers in fewer bits; None for the target itself.
        """
        return Frontier(self.model, self.store, self.root, self.alive, most, shortlist, drafting_model)
