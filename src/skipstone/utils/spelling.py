"""Suggestions for misspelt names."""

from collections.abc import Iterable
from difflib import get_close_matches


def did_you_mean(name: object, known: Iterable[str]) -> str:
    """A clause with the known word most similar to an unknown one; empty if none is similar."""
    plain = {word.lower().replace("_", "-"): word for word in known}
    close = get_close_matches(str(name).lower().replace("_", "-"), plain, n=1, cutoff=0.65)
    return f" (did you mean {plain[close[0]]!r}?)" if close else ""
