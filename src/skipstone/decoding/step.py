"""One turn of the loop, told on the host: tokens, where each came from, what it cost."""

from dataclasses import dataclass, field

from torch import Tensor


@dataclass(slots=True)
class TokenRecord:
    """What `record=True` keeps of one token: probabilities under p and q, the target's entropy in nats (after processors,
    before warpers, at temperature 1), and where it came from. p and entropy are None for drafts that the verification never
    reached; q is None for tokens that were not drafted."""

    token: int
    p: float | None
    q: float | None
    entropy: float | None
    exit_layer: int | None
    accepted: bool


@dataclass(slots=True)
class Step:
    """One turn of the loop, all rows. Lists have one entry per row; a row that took no part has empty lists and zeros.

    origin says for each token whether it is the "prefill"'s, an accepted "draft", the "recovered" or the "bonus" token.
    draft_steps counts passes of the drafter, drafted the tokens submitted, verified_nodes the scored nodes (leaves too).
    prefill: the step ran a part of a prompt. probe: a plain step taken to learn what plain decoding costs. finished: rows that
    ended in this step.
    Seconds are wall-clock; on CUDA those of searching, drafting and scoring are device time, and other is what is left of the
    step. seconds_search: spent for later steps (`Session.optimise`).
    """

    tokens: list[list[int]]
    origin: list[list[str]]
    drafted: list[int]
    draft_steps: list[int]
    accepted: list[int]
    overruled: list[int]
    verified_nodes: int = 0
    prefill: bool = False
    probe: bool = False
    seconds_search: float = 0.0
    seconds_draft: float = 0.0
    seconds_score: float = 0.0
    seconds_other: float = 0.0
    finished: list[int] = field(default_factory=list)
    records: list[list[TokenRecord]] | None = None
    logits: list[Tensor] | None = None
    scores: list[Tensor] | None = None

    @property
    def seconds(self) -> float:
        return self.seconds_search + self.seconds_draft + self.seconds_score + self.seconds_other
