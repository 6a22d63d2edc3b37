"""LayerSkip: Enabling Early Exit Inference and Self-Speculative Decoding
(Elhoushi et al., ACL 2024, arXiv 2404.16710), section 4.3 and appendix A.4.

Draft with the first E layers and the shared LM head, verify with the remaining ones. Keys, values and exit hidden states of
the draft are the verification's own (the paper's KVQ cache): the same weights saw the same inputs.

Deviations: the last drafted token runs through the first E layers too, so that n drafts leave n+1 exit states and full
acceptance is no special case; drafting may stop early on the confidence of the newest draft (`confidence_threshold`, ours,
off by default; "adaptive" is Draft & Verify's rule, arXiv 2309.08168).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal

from skipstone.decoding.draft import Draft, RowVerdict
from skipstone.decoding.method import Method
from skipstone.decoding.session import Request, Session
from skipstone.decoding.settings import RejectionRule, check_rule, layer_in_range, setting, whole_number
from skipstone.methods.shared.chain import Chain
from skipstone.methods.shared.confidence import Confidence, check_threshold
from skipstone.models.layered import LayeredModel


@dataclass(frozen=True)
class LayerSkip(Method):
    """LayerSkip's self-speculative decoding: the first E layers draft, the others verify."""

    name: ClassVar[str] = "layerskip"
    by_model: ClassVar[tuple[str, ...]] = ("exit_layer",)
    aliases: ClassVar[dict[str, str]] = {
        "assistant_early_exit": "exit_layer",
        "num_assistant_tokens": "num_speculative_tokens",
        "num_speculations": "num_speculative_tokens",
        "assistant_confidence_threshold": "confidence_threshold",
    }
    if_few_accepted: ClassVar[str] = "An acceptance rate that low says that the model's early exits are not trained."

    exit_layer: int | None = setting(None, "E, layers that draft, 1 <= E < L.")
    num_speculative_tokens: int = setting(6, "d, most drafts a step.")
    confidence_threshold: float | Literal["adaptive"] | None = setting(
        None, "stop drafting after a token whose probability is below it; None never stops early."
    )
    reuse_cache: bool = setting(True, "False scores from layer 0 again, the ablation of Table 7.")
    rejection_sample_method: RejectionRule = setting(
        "standard",
        "'standard' is Leviathan's rule; 'coupled' draws drafts from the target's own noise: same seed, same text as plain",
    )

    def check(self, model: LayeredModel) -> None:
        layer_in_range("exit_layer", self.exit_layer, model)
        whole_number("num_speculative_tokens", self.num_speculative_tokens, 1)
        check_threshold(self.confidence_threshold)
        check_rule(self.rejection_sample_method)

    def start(self, model: LayeredModel, rows: int, capacity: int) -> Session:
        return LayerSkipSession(self, model, rows, capacity)


class LayerSkipSession(Session):
    """Drafts at depth E; the scoring pass runs layers[E:] on the n+1 exit states that drafting left behind."""

    def __init__(self, method: LayerSkip, model: LayeredModel, rows: int, capacity: int) -> None:
        super().__init__(model, rows, capacity, coupled=method.rejection_sample_method == "coupled")
        assert method.exit_layer is not None
        self.exit_layer, self.most, self.reuse_cache = method.exit_layer, method.num_speculative_tokens, method.reuse_cache
        self.confidence = Confidence(method.confidence_threshold, rows, model.device, self.most)

    def admit(self, row: int, request: Request) -> None:
        super().admit(row, request)
        self.confidence.reset(row)

    def draft(self, limit: list[int]) -> Draft:
        """Self-drafting (section 4.3.1): layers[:E] and the shared LM head, autoregressively."""
        most = [min(self.most, allowed) for allowed in limit]
        chain = Chain(most, self.alive, self.model.device)
        frontier = self.frontier(most)
        position = frontier.positions[:, 0] + 1
        for place in range(chain.width):
            logits = frontier.exit_logits(self.exit_layer)
            wanted = chain.open_rows() if self.sampler.processed else None
            token, q, scores = self.sampler.propose(logits, position + place, frontier.tokens[:, 1:], wanted)
            sure = self.confidence.of(scores)
            frontier.append(token[:, None], chain.add(token, q, sure))
            if chain.stop(self.confidence.keep(sure), self.sampler.unfinished(token)):
                break
        if not self.reuse_cache:
            frontier.restart()
        return chain.draft(frontier, exit_layer=self.exit_layer)

    def commit(self, draft: Draft | None, verdicts: list[RowVerdict]) -> None:
        super().commit(draft, verdicts)
        self.confidence.update(verdicts)
