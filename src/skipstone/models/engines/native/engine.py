"""The native engine, which is not built yet."""

from typing import Any

from skipstone.models.engines.engine import Engine
from skipstone.models.facts import Facts


def built() -> str | None:
    """Why this installation cannot run any model natively, None where it can."""
    return "the native engine is not built"


def why_not(model: Any, facts: Facts) -> str | None:
    """Why the native engine cannot run a model, None where it can."""
    return built()


def NativeEngine(model: Any, facts: Facts) -> Engine:
    """The native engine of a model that `why_not` has nothing against."""
    raise NotImplementedError(built())
