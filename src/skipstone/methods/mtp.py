"""Multi-token prediction, DeepSeek-V3 Technical Report (DeepSeek-AI, 2024, arXiv 2412.19437), section 2.2.

Checkpoints of DeepSeek-V3, GLM-4.5 and later, Qwen3-Next and Qwen3.5 bring a decoder layer that predicts the token after the
next one. It reads the target's state after the final norm next to the embedding of the next token (`models/mtp_layer.py`).

The layer was trained for one draft. For further drafts it reads its own output, as in vLLM and SGLang.
"""

from dataclasses import dataclass
from typing import ClassVar, Literal

from skipstone.decoding.settings import setting
from skipstone.engines.model_runner import ModelRunner
from skipstone.engines.mtp_head import MtpHead, load_mtp
from skipstone.methods.drafting.feature_drafter import FeatureMethod
from skipstone.utils.setup_times import setup_work


@dataclass(frozen=True)
class Mtp(FeatureMethod):
    """Drafting with the checkpoint's own layer for multi-token prediction."""

    name: ClassVar[str] = "mtp"

    num_speculative_tokens: int = setting(1, "maximum drafts a step; the layer was trained for one.", kw_only=True)
    feedback: Literal["normed", "raw"] = setting(
        "normed", "the state before or after the layer's final norm goes into the next draft.", kw_only=True
    )

    @setup_work("draft head")
    def head_for(self, target: ModelRunner) -> MtpHead:
        return load_mtp(target, self.feedback)
