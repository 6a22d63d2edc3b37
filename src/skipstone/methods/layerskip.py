"""LayerSkip: Enabling Early Exit Inference and Self-Speculative Decoding
(Elhoushi et al., ACL 2024, arXiv 2404.16710), section 4.3 and appendix A.4.

The first E layers draft with the shared LM head; the remaining layers verify. Verification reuses the keys, values and exit
states of drafting (the paper's KVQ cache), because the same weights computed them from the same inputs.

Deviations: the last drafted token runs through the first E layers, too, so that n drafts leave n+1 exit states and full
acceptance is no special case. Drafting may stop at low confidence (`confidence_threshold`, ours, off by default; "adaptive" is
Draft & Verify's rule, arXiv 2309.08168) and may use a part of the vocabulary (`draft_vocabulary`, off by default).
"""

from dataclasses import dataclass, replace
from typing import ClassVar

from torch import Tensor

from skipstone.decoding.draft import Draft
from skipstone.decoding.drafter import Candidate
from skipstone.decoding.method import Preset
from skipstone.decoding.settings import RejectionRule, check_exit_layer, setting
from skipstone.engines.model_runner import ModelRunner
from skipstone.engines.partial_forward import PartialForward
from skipstone.methods.drafting.candidates import layer_candidate
from skipstone.methods.drafting.chain import ChainDrafter, DraftChain
from skipstone.methods.drafting.chain_stop_rule import Threshold
from skipstone.methods.drafting.shortlist import ShortlistMethod
from skipstone.policy.draft_length import MAX_DRAFTS


def _paper(where: str, num_speculative_tokens: int) -> Preset:
    fixed = {"confidence_threshold": None, "reuse_cache": True, "rejection_sample_method": "standard"}
    return Preset(f"Elhoushi et al., {where}", {"num_speculative_tokens": num_speculative_tokens, **fixed})


@dataclass(frozen=True)
class LayerSkip(ShortlistMethod):
    """LayerSkip's self-speculative decoding: the first E layers draft, the others verify."""

    name: ClassVar[str] = "layerskip"
    by_model: ClassVar[tuple[str, ...]] = ("exit_layer",)
    aliases: ClassVar[dict[str, str]] = {
        "assistant_early_exit": "exit_layer",
        "num_assistant_tokens": "num_speculative_tokens",
        "num_speculations": "num_speculative_tokens",
        "assistant_confidence_threshold": "confidence_threshold",
    }
    presets: ClassVar[dict[str, Preset]] = {
        "paper": _paper("Table 3: CNN/DM and XSum with Llama2 7B, where E = 8", 12),
        "paper-humaneval": _paper("Table 3: HumanEval with Llama2 7B, where E = 8", 6),
        "paper-topv2": _paper("section 6.2: TOPv2 with Llama 1.5B, where E = 6, 12 and 18", 8),
        "paper-cpu": _paper("Table 11: TOPv2 on the CPU with Llama 1.5B, where E = 6, 12 and 18", 7),
    }
    if_few_accepted: ClassVar[str] = "An acceptance rate that low says that the model's early exits are not trained."

    exit_layer: int | None = setting(None, "E, number of layers that draft, 1 <= E < L.")
    num_speculative_tokens: int = setting(6, "d, maximum drafts a step.")
    confidence_threshold: Threshold = setting(
        None, "stop drafting after a token whose probability is below it; None never stops early.", within=(0, 1)
    )
    reuse_cache: bool = setting(True, "False scores from layer 0 again, the ablation of Table 7.")
    rejection_sample_method: RejectionRule = setting(
        "standard",
        "'standard' is Leviathan's rule; 'coupled' draws drafts from the target's own noise: same seed, same text as plain",
    )

    def check(self, model: ModelRunner) -> None:
        super().check(model)
        check_exit_layer(self.exit_layer, model)

    def create_drafter(self, model: ModelRunner, rows: int, capacity: int) -> "LayerSkipDrafter":
        return LayerSkipDrafter(self, model, rows)

    def auto_candidates(self, model: ModelRunner, rows: int, capacity: int) -> dict[str, Candidate]:
        """One candidate. It drafts chains, and `auto` decides their length."""
        assert self.exit_layer is not None
        chain = replace(self, num_speculative_tokens=MAX_DRAFTS, confidence_threshold=None, reuse_cache=True)
        chain = replace(chain, rejection_sample_method="coupled")
        drafter = chain.create_drafter(model, rows, capacity)
        return {f"layerskip, exit {self.exit_layer}": layer_candidate(drafter, chain, model, self.exit_layer)}


class LayerSkipDrafter(ChainDrafter):
    """Drafts at depth E. The scoring pass runs layers[E:] on the n+1 exit states of drafting."""

    checks_for_stops = False  # drafting for stopped rows is cheap: it runs only E layers

    def __init__(self, method: LayerSkip, model: ModelRunner, rows: int) -> None:
        max_drafts, threshold = method.num_speculative_tokens, method.confidence_threshold
        coupled = method.rejection_sample_method == "coupled"
        exit_layer = method.exit_layer
        super().__init__(model, rows, max_drafts=max_drafts, threshold=threshold, coupled=coupled, exit_layer=exit_layer)
        self.shortlist, self.reuse_cache = method.shortlist(model), method.reuse_cache

    def one_call(self) -> tuple[int, None]:
        return self.layers, None

    def next_logits(self, chain: DraftChain, forward: PartialForward) -> Tensor:
        """Self-drafting (section 4.3.1): layers[:E] and the shared LM head, on the newest token. Returns [B, V]."""
        return forward.exit_logits(self.layers)

    def finish(self, chain: DraftChain, forward: PartialForward) -> Draft:
        """Self-verification (section 4.3.2) continues from the exit states, or from layer 0 without cache reuse."""
        if not self.reuse_cache:
            forward.restart()
        return super().finish(chain, forward)
