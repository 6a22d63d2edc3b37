"""Packages that only an extra of this one brings."""

import importlib
from typing import Any


def installed(module: str, need: str, extra: str = "bench") -> Any:
    """The module. ImportError without it: `need`, a clause such as "pictures need matplotlib", and what to install."""
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise ImportError(f'{need}: pip install "skipstone[{extra}]"') from error
