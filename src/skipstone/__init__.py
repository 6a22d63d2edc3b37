"""skipstone makes language models answer faster without changing what they say. This file is the public API.

A name is imported when it is first used: torch and transformers take seconds, and `skipstone --help` needs neither.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from skipstone.decoding.draft import Draft as Draft
    from skipstone.decoding.draft import Step as Step
    from skipstone.decoding.loop import Decoder as Decoder
    from skipstone.decoding.loop import DecodingLoop as DecodingLoop
    from skipstone.decoding.method import Method as Method
    from skipstone.decoding.request import Request as Request
    from skipstone.decoding.sampling import Sampling as Sampling
    from skipstone.decoding.session import Session as Session
    from skipstone.decoding.stats import Stats as Stats
    from skipstone.engines.loading import load as load
    from skipstone.engines.model_runner import ModelRunner as ModelRunner
    from skipstone.export.hub.push import push as push
    from skipstone.hf.api import RowError as RowError
    from skipstone.hf.api import generate as generate
    from skipstone.hf.api import stream as stream
    from skipstone.hf.detokenizer import Detokenizer as Detokenizer
    from skipstone.hf.enable import custom_generate as custom_generate
    from skipstone.hf.enable import disable as disable
    from skipstone.hf.enable import enable as enable
    from skipstone.hf.output import Output as Output
    from skipstone.methods import METHODS as METHODS
    from skipstone.methods import AdaDecode as AdaDecode
    from skipstone.methods import AdaSD as AdaSD
    from skipstone.methods import Auto as Auto
    from skipstone.methods import Autoregressive as Autoregressive
    from skipstone.methods import Eagle3 as Eagle3
    from skipstone.methods import EarlyExit as EarlyExit
    from skipstone.methods import Jacobi as Jacobi
    from skipstone.methods import LayerSkip as LayerSkip
    from skipstone.methods import Lookahead as Lookahead
    from skipstone.methods import Mtp as Mtp
    from skipstone.methods import PromptLookup as PromptLookup
    from skipstone.methods import Recycle as Recycle
    from skipstone.methods import SelfSpeculative as SelfSpeculative
    from skipstone.methods import Speculative as Speculative
    from skipstone.methods import Swift as Swift
    from skipstone.methods.adadecode.heads import ExitHeads as ExitHeads
    from skipstone.models.weight_version import refresh as refresh

__version__ = "0.1.0"

_NAMES = {
    "hf.api": ("RowError", "generate", "stream"),
    "hf.output": ("Output",),
    "decoding.request": ("Request",),
    "decoding.draft": ("Draft", "Step"),
    "decoding.loop": ("Decoder", "DecodingLoop"),
    "decoding.method": ("Method",),
    "decoding.sampling": ("Sampling",),
    "decoding.session": ("Session",),
    "decoding.stats": ("Stats",),
    "hf.detokenizer": ("Detokenizer",),
    "hf.enable": ("custom_generate", "disable", "enable"),
    "export.hub.push": ("push",),
    "engines.loading": ("load",),
    "methods": (
        *("METHODS", "AdaDecode", "AdaSD", "Auto", "Autoregressive", "Eagle3", "EarlyExit", "Jacobi", "LayerSkip"),
        *("Lookahead", "Mtp", "PromptLookup", "Recycle", "SelfSpeculative", "Speculative", "Swift"),
    ),
    "methods.adadecode.heads": ("ExitHeads",),
    "engines.model_runner": ("ModelRunner",),
    "models.weight_version": ("refresh",),
}
_HOME = {name: module for module, names in _NAMES.items() for name in names}
__all__ = [*_HOME]


def __getattr__(name: str) -> Any:
    if name in _HOME:
        value = getattr(import_module(f"skipstone.{_HOME[name]}"), name)
        globals()[name] = value
        return value
    if name in ("api", "decoding", "hf", "methods", "models"):
        return import_module(f"skipstone.{name}")
    raise AttributeError(f"module 'skipstone' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *_HOME})
