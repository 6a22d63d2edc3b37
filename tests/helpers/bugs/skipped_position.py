"""After a full acceptance the bonus token is put one position too far."""

from __future__ import annotations

from skipstone.decoding.draft import Draft, RowVerdict
from skipstone.decoding.session import Session
from tests.helpers.bugs.base import broken


class Broken(Session):
    def commit(self, draft: Draft | None, verdicts: list[RowVerdict]) -> None:
        super().commit(draft, verdicts)
        for row, verdict in enumerate(verdicts):
            if draft is not None and verdict.tokens and verdict.final == "bonus" and verdict.drafted and self.alive[row]:
                self.store.length[row] = min(self.store.length[row] + 1, self.capacity - 2)


METHOD = broken(session=Broken)
