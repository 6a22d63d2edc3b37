"""The names of methods and of their settings, without the classes, which take seconds to import.

The command line refuses a misspelt name by this table before torch is imported. A test compares it with the classes.
"""

import re
import sys
from pathlib import Path

from skipstone.decoding.method_text import Known, MethodNames

REGISTRY = Path(__file__).parents[1] / "methods" / "__init__.py"


def _names(settings: str, aliases: str = "", lossless: bool = True) -> MethodNames:
    """settings: NAME=TYPE, as `skipstone methods NAME` shows the types. aliases: OTHER=NAME."""
    types, others = (dict(pair.split("=", 1) for pair in text.split()) for text in (settings, aliases))
    return MethodNames(types, others, lossless)


METHODS = {
    "auto": _names(
        "candidates=method;...|none own=method;...|none slack=float log=text|none use_profile=true|false profile=text|none",
        "remembers=use_profile",
    ),
    "autoregressive": _names(""),
    "early_exit": _names("exit_layer=int|none", "assistant_early_exit=exit_layer", lossless=False),
    "layerskip": _names(
        "exit_layer=int|none num_speculative_tokens=int confidence_threshold=float|adaptive|none "
        "reuse_cache=true|false rejection_sample_method=standard|coupled guard=true|false "
        "draft_vocabulary=int|text|none",
        "assistant_early_exit=exit_layer num_assistant_tokens=num_speculative_tokens "
        "num_speculations=num_speculative_tokens assistant_confidence_threshold=confidence_threshold",
    ),
    "swift": _names(
        "skip_ratio=float num_speculative_tokens=int confidence_threshold=float|adaptive|none context_window=int "
        "search=linear_ts|swift|random|uniform bayes_interval=int max_steps=int patience=int target_matchness=float "
        "dynamic_verification=true|false profile=text|none search_seed=int guard=true|false "
        "draft_vocabulary=int|text|none",
        "num_assistant_tokens=num_speculative_tokens enough=target_matchness",
    ),
    "self_speculative": _names(
        "skip_attention=int,... skip_mlp=int,... profile=text|none num_speculative_tokens=int "
        "confidence_threshold=float|adaptive|none guard=true|false draft_vocabulary=int|text|none "
        "draft_quantize=text|none",
        "num_assistant_tokens=num_speculative_tokens stop_threshold=confidence_threshold",
    ),
    "adadecode": _names(
        "heads=text|none confidence_threshold=float num_speculative_tokens=int exit_layers=int,... "
        "verification=true|false recheck=true|false rejection_sample_method=standard|coupled guard=true|false "
        "draft_vocabulary=int|text|none",
        "threshold=confidence_threshold max_pending=num_speculative_tokens num_assistant_tokens=num_speculative_tokens",
    ),
    "speculative": _names(
        "draft_model=text|none num_speculative_tokens=int schedule=constant|heuristic|confidence "
        "confidence_threshold=float|adaptive|none guard=true|false draft_device=text|none draft_dtype=text|none "
        "draft_quantize=text|none rejection_sample_method=standard|coupled draft_vocabulary=int|text|none",
        "model=draft_model assistant_model=draft_model num_assistant_tokens=num_speculative_tokens "
        "num_assistant_tokens_schedule=schedule assistant_confidence_threshold=confidence_threshold",
    ),
    "adasd": _names(
        "draft_model=text|none num_speculative_tokens=int|none relaxed=true|false adaptive_length=true|false "
        "variant=A|B|C|none guard=true|false draft_device=text|none draft_dtype=text|none "
        "draft_quantize=text|none rejection_sample_method=standard|coupled draft_vocabulary=int|text|none",
        "model=draft_model assistant_model=draft_model max_window=num_speculative_tokens fixed_window=num_speculative_tokens",
        lossless=False,
    ),
    "prompt_lookup": _names(
        "prompt_lookup_max=int prompt_lookup_min=int num_speculative_tokens=int prefer=recent|first guard=true|false",
        "prompt_lookup_num_tokens=num_speculative_tokens max_matching_ngram_size=prompt_lookup_max",
    ),
    "jacobi": _names("num_speculative_tokens=int guard=true|false", "block=num_speculative_tokens"),
    "lookahead": _names("window=int ngram=int guesses=int guard=true|false"),
    "recycle": _names(
        "num_speculative_tokens=int num_candidates=int guard=true|false",
        "nodes=num_speculative_tokens candidates=num_candidates",
    ),
}

PEERS = {
    "hf-generate": _names(""),
    "hf-generate-static": _names(""),
    "hf-early-exit": _names("exit_layer=int num_assistant_tokens=int confidence_threshold=float"),
    "hf-prompt-lookup": _names("prompt_lookup_num_tokens=int"),
    "hf-assisted": _names("assistant=text num_assistant_tokens=int confidence_threshold=float"),
    "draft-alone": _names("draft_model=text|none", lossless=False),
    "llama-cpp": _names("file=text python=text drafts=text|none num_draft_tokens=int confidence_threshold=float"),
}
"""What only `skipstone bench` compares with."""


def known_methods() -> Known:
    """The table. If the classes are imported already, or if a new method has no row here yet, the classes are read instead."""
    registered = re.findall(r'"(\w+)": [A-Z]\w*,', REGISTRY.read_text(encoding="utf-8"))
    if "skipstone.methods" not in sys.modules and set(registered) <= set(METHODS):
        return METHODS
    from skipstone import methods

    return {name: methods.names_of(kind) for name, kind in methods.METHODS.items()}
