"""After a rollback, the newest committed slot keeps what the rejected draft behind it wrote."""

from __future__ import annotations

from skipstone.decoding.draft import Draft, RowVerdict
from skipstone.decoding.session import Session
from tests.helpers.bugs.base import broken


class Broken(Session):
    def commit(self, draft: Draft | None, verdicts: list[RowVerdict]) -> None:
        super().commit(draft, verdicts)
        for row, verdict in enumerate(verdicts):
            if draft is not None and verdict.tokens and len(verdict.path) < verdict.drafted:
                end = self.store.length[row]
                self.store.move(row, [end], [end - 1])


METHOD = broken(session=Broken)
