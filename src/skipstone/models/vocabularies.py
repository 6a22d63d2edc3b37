"""The vocabularies of tokenizers that are on this machine."""

from contextlib import suppress
from functools import lru_cache
from pathlib import Path
from typing import Any

from skipstone.models.fetching import cached_folder
from skipstone.models.mapped_config import UnmappableError
from skipstone.models.tokenizer import FILE, FURTHER_FILES, read_tokenizer

COMMIT = "_commit_hash"
"""Attribute of a config: the hub commit that the model was loaded from. transformers does not save it."""


def vocabulary(name: str, revision: str | None = None) -> dict[str, int] | None:
    """Token -> id of a tokenizer in a folder, or of a revision in the hub's cache; None if it is not here or needs code of its
    own."""
    folder = Path(name)
    if not name or (folder.is_dir() and not any((folder / file).exists() for file in (FILE, *FURTHER_FILES))):
        return None
    try:
        return _vocabulary(name, revision)
    except Exception:  # the files may hold anything, and `tokenizers` has no error class of its own
        return None


@lru_cache(maxsize=8)
def _vocabulary(name: str, revision: str | None) -> dict[str, int]:
    folder = Path(name) if Path(name).is_dir() else cached_folder(name, revision, FILE)
    with suppress(UnmappableError):
        if folder is not None:
            return read_tokenizer(folder).get_vocab()
    from transformers import AutoTokenizer

    options: dict[str, Any] = {} if revision is None else {"revision": revision}
    return dict(AutoTokenizer.from_pretrained(name, local_files_only=True, trust_remote_code=False, **options).get_vocab())
