"""SWIFT's settings in the paper and in its released code."""

from skipstone.decoding.method import Preset

PAPER = Preset(
    "Xia et al., section 4, footnote 3 and appendix B.2 (13B); the paper does not print the confidence threshold, which is "
    "that of the released code, nor how a tree is sampled",
    {
        "skip_ratio": 0.45,
        "num_speculative_tokens": 25,
        "confidence_threshold": 0.8,
        "context_window": 32,
        "search": "swift",
        "bayes_interval": 25,
        "max_steps": 1000,
        "patience": 300,
        "target_matchness": 0.95,
        "candidate_counts": (10, 5, 3, 1),
        "min_acceptance_rate": 0.7,
        "rejection_sample_method": "standard",
    },
)
RELEASE = Preset(
    "hemingkx/SWIFT, eval_llama.sh at 312a2a0, greedy only, because its sampling is not lossless; it stops once its 1000 "
    "evaluations, or 300 without a better set, are exceeded",
    {
        **PAPER.settings,
        "context_window": 50,
        "search": "release",
        "max_steps": 1001,
        "patience": 301,
        "target_matchness": 0.93,
        "candidate_counts": (10, 8, 5, 3),
        "min_acceptance_rate": None,
        "rejection_sample_method": None,
    },
)
