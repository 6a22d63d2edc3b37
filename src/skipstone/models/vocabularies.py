"""The vocabularies of tokenizers that are on this machine."""

from functools import lru_cache
from pathlib import Path
from typing import Any

COMMIT = "_commit_hash"
"""Attribute of a config: the hub commit that the model was loaded from. transformers does not save it."""
FILE = "tokenizer.json"


def vocabulary(name: str, revision: str | None = None) -> dict[str, int] | None:
    """Token -> id of a tokenizer in a folder, or of a revision in the hub's cache; None if it is not here or needs code of its
    own."""
    if not name:
        return None
    try:
        return _vocabulary(name, revision)
    except (OSError, ValueError, LookupError, TypeError, AttributeError):
        return None


@lru_cache(maxsize=8)
def _vocabulary(name: str, revision: str | None) -> dict[str, int]:
    if (Path(name) / FILE).exists():
        from tokenizers import Tokenizer

        return Tokenizer.from_file(str(Path(name) / FILE)).get_vocab()
    from transformers import AutoTokenizer

    options: dict[str, Any] = {} if revision is None else {"revision": revision}
    return dict(AutoTokenizer.from_pretrained(name, local_files_only=True, trust_remote_code=False, **options).get_vocab())
