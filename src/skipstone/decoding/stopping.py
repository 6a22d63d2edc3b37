"""Where the text of a row ends: the only place that knows the stopping rules."""

from dataclasses import dataclass, field

import torch

from skipstone.decoding.draft import RowVerdict
from skipstone.decoding.request import Request
from skipstone.engines.greedy_tokens import NO_TOKEN


@dataclass
class RunningRequest:
    """A request while it runs, with its new tokens on the host.

    is_stopped: the last token ends the text. False if the text has only reached max_new_tokens.
    must_decode_plainly: the latest step had a draft and no token to choose. The draft may be the cause.
    """

    request: Request
    tokens: list[int] = field(default_factory=list)
    is_stopped: bool = False
    must_decode_plainly: bool = False

    @property
    def room(self) -> int:
        """Maximum number of draft tokens in the next step. Verification adds one more token."""
        return 0 if self.must_decode_plainly else self.request.max_new_tokens - len(self.tokens) - 1

    def take(self, verdict: RowVerdict) -> None:
        """Append the new tokens up to the first that ends the row, and cut the verdict there.

        NO_TOKEN cuts the verdict before it. The row fails only if it had no draft, so every method fails at the same place."""
        self.must_decode_plainly = False
        for count, token in enumerate(verdict.tokens, 1):
            if token == NO_TOKEN:
                verdict.cut(count - 1)
                verdict.is_broken, self.must_decode_plainly = True, bool(verdict.nodes)
                verdict.finished = not self.must_decode_plainly
                return
            self.tokens.append(token)
            self.is_stopped = token in self.request.eos or self._meets_criterion()
            if self.is_stopped or len(self.tokens) >= self.request.max_new_tokens:
                verdict.cut(count)
                verdict.finished = True
                return

    def _meets_criterion(self) -> bool:
        strings, prompt = self.request.stop_strings, self.request.prompt
        if strings is not None and strings.completed_by_last(prompt, self.tokens):
            return True
        if not self.request.criteria:
            return False
        ids = torch.cat([prompt, torch.tensor(self.tokens, dtype=torch.int64, device=prompt.device)])[None]  # [1, T]
        return any(
            bool(torch.as_tensor(criterion(ids, None), dtype=torch.bool, device=ids.device).all())
            for criterion in self.request.criteria
        )
