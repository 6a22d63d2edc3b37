"""Imports of optional packages, which the extras of skipstone install."""

import importlib
from typing import Any


def installed(module: str, need: str, extra: str = "bench") -> Any:
    """The imported module. Its ImportError says `need`, a clause such as "pictures need matplotlib", and what to install."""
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise ImportError(f'{need}: pip install "skipstone[{extra}]"') from error
