"""The bytes of tokens in byte-level vocabularies and in those with byte fallback."""

import json
import re
from collections.abc import Set
from typing import Any

_PRINTED = [*range(33, 127), *range(161, 173), *range(174, 256)]
_UNPRINTED = [byte for byte in range(256) if byte not in _PRINTED]
_BYTE_OF = {chr(byte): byte for byte in _PRINTED} | {chr(256 + place): byte for place, byte in enumerate(_UNPRINTED)}
"""Letter of a byte-level token -> byte."""
_BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")
"""A token of byte fallback."""


def decoder_kinds(tokenizer: Any) -> frozenset[str]:
    """Names of a fast tokenizer's decoder and of its parts; empty for a slow tokenizer."""
    decoder = getattr(getattr(tokenizer, "backend_tokenizer", None), "decoder", None)
    state = {} if decoder is None else json.loads(decoder.__getstate__())
    return frozenset(part["type"] for part in (state, *state.get("decoders", ())) if part)


def is_byte_level(kinds: Set[str]) -> bool:
    """Whether a decoder with these parts only reads the letters of all tokens as bytes."""
    return "ByteLevel" in kinds and kinds <= {"ByteLevel", "Sequence", "Fuse"}


def token_bytes(token: str, kinds: Set[str]) -> bytes | None:
    """The bytes of a token of the vocabulary; None if its text depends on the tokens around it. kinds: see `decoder_kinds`."""
    if is_byte_level(kinds):
        return bytes(map(_BYTE_OF.__getitem__, token)) if _BYTE_OF.keys() >= set(token) else token.encode()
    byte = _BYTE_TOKEN.fullmatch(token) if "ByteFallback" in kinds else None
    return None if byte is None else bytes.fromhex(byte[1])
