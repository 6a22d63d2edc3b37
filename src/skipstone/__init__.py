"""skipstone makes language models answer faster without changing what they say. This file is the public API.

A name is imported when it is first used: torch and transformers take seconds, and `skipstone --help` needs neither.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from skipstone.api import Detokenizer as Detokenizer
    from skipstone.api import generate as generate
    from skipstone.api import stream as stream
    from skipstone.core.decode import Decoder as Decoder
    from skipstone.core.model import LayeredModel as LayeredModel
    from skipstone.core.protocol import Method as Method
    from skipstone.core.sampling import Sampling as Sampling
    from skipstone.core.session import Request as Request
    from skipstone.core.session import Session as Session
    from skipstone.core.stats import Stats as Stats
    from skipstone.core.types import Draft as Draft
    from skipstone.core.types import Output as Output
    from skipstone.core.types import Step as Step
    from skipstone.hf import disable as disable
    from skipstone.hf import enable as enable
    from skipstone.loading import load as load
    from skipstone.methods import METHODS as METHODS
    from skipstone.methods.adadecode import AdaDecode as AdaDecode
    from skipstone.methods.adasd import AdaSD as AdaSD
    from skipstone.methods.autoregressive import Autoregressive as Autoregressive
    from skipstone.methods.early_exit import EarlyExit as EarlyExit
    from skipstone.methods.exit_heads import ExitHeads as ExitHeads
    from skipstone.methods.jacobi import Jacobi as Jacobi
    from skipstone.methods.layerskip import LayerSkip as LayerSkip
    from skipstone.methods.lookahead import Lookahead as Lookahead
    from skipstone.methods.prompt_lookup import PromptLookup as PromptLookup
    from skipstone.methods.self_speculative import SelfSpeculative as SelfSpeculative
    from skipstone.methods.speculative import Speculative as Speculative
    from skipstone.methods.swift import Swift as Swift

__version__ = "0.1.0"

_NAMES = {
    "api": ("Detokenizer", "generate", "stream"),
    "core.decode": ("Decoder",),
    "core.model": ("LayeredModel",),
    "core.protocol": ("Method",),
    "core.sampling": ("Sampling",),
    "core.session": ("Request", "Session"),
    "core.stats": ("Stats",),
    "core.types": ("Draft", "Output", "Step"),
    "hf": ("disable", "enable"),
    "loading": ("load",),
    "methods": ("METHODS",),
    "methods.adadecode": ("AdaDecode",),
    "methods.adasd": ("AdaSD",),
    "methods.autoregressive": ("Autoregressive",),
    "methods.early_exit": ("EarlyExit",),
    "methods.exit_heads": ("ExitHeads",),
    "methods.jacobi": ("Jacobi",),
    "methods.layerskip": ("LayerSkip",),
    "methods.lookahead": ("Lookahead",),
    "methods.prompt_lookup": ("PromptLookup",),
    "methods.self_speculative": ("SelfSpeculative",),
    "methods.speculative": ("Speculative",),
    "methods.swift": ("Swift",),
}
_HOME = {name: module for module, names in _NAMES.items() for name in names}
__all__ = [*_HOME]


def __getattr__(name: str) -> Any:
    if name in _HOME:
        value = getattr(import_module(f"skipstone.{_HOME[name]}"), name)
        globals()[name] = value
        return value
    if name in ("api", "core", "hf", "methods"):
        return import_module(f"skipstone.{name}")
    raise AttributeError(f"module 'skipstone' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *_HOME})
