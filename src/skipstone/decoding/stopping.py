"""Where the text of a row ends: the only place that knows the stopping rules."""

from dataclasses import dataclass, field

import torch

from skipstone.decoding.batch import Request
from skipstone.decoding.draft import RowVerdict


@dataclass
class RunningRequest:
    """A request while it runs, with its new tokens on the host."""

    request: Request
    tokens: list[int] = field(default_factory=list)

    @property
    def room(self) -> int:
        """Most draft tokens of the next step: the token that verification adds must fit too."""
        return self.request.max_new_tokens - len(self.tokens) - 1

    def take(self, verdict: RowVerdict) -> None:
        """Append the new tokens up to the first that ends the row, and cut the verdict there."""
        for count, token in enumerate(verdict.tokens, 1):
            self.tokens.append(token)
            if len(self.tokens) >= self.request.max_new_tokens or token in self.request.eos or self._criteria_met():
                verdict.cut(count)
                verdict.finished = True
                return

    def _criteria_met(self) -> bool:
        if not self.request.criteria:
            return False
        prompt = self.request.prompt
        ids = torch.cat([prompt, torch.tensor(self.tokens, dtype=torch.int64, device=prompt.device)])[None]  # [1, T]
        return any(
            bool(torch.as_tensor(criterion(ids, None), dtype=torch.bool, device=ids.device).all())
            for criterion in self.request.criteria
        )
