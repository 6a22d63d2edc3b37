"""How byte-level tokenizers cut texts into words, by llama.cpp's names of them.

The regexes are those of the families' own tokenizer.json. llama.cpp's differ where its regex engine lacks a feature.
"""

from dataclasses import dataclass
from typing import Any

LLAMA3_SPLIT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
QWEN2_SPLIT = LLAMA3_SPLIT.replace(r"\p{N}{1,3}", r"\p{N}")
_WORDS = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+%s",
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*%s",
    r"\p{N}{1,%s}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+",
)
_CONTRACTIONS = "(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
TEKKEN_SPLIT = "|".join(_WORDS).replace("{1,%s}", "").replace("%s", "")
GPT4O_SPLIT = "|".join(_WORDS) % (_CONTRACTIONS, _CONTRACTIONS, 3)


@dataclass(frozen=True)
class PreTokenizer:
    """The steps before a BPE's merges.

    steps: (kind, parameter) of each. ignore_merges: whether a word that is itself a token is looked up before any merge.
    normal_form: whether texts are brought to NFC first. adds_bos: whether a text begins with BOS if the file does not say."""

    steps: tuple[tuple[str, Any], ...]
    ignore_merges: bool = False
    normal_form: bool = False
    adds_bos: bool = False


def _splitting(regex: str, **flags: bool) -> PreTokenizer:
    return PreTokenizer((("split", regex), ("bytes", False)), **flags)


_LLAMA3 = _splitting(LLAMA3_SPLIT, ignore_merges=True, adds_bos=True)
_QWEN2 = _splitting(QWEN2_SPLIT, normal_form=True)
_DIGITS = PreTokenizer((("digits", True), ("bytes", True)))
_GPT2 = PreTokenizer((("bytes", True),))
_CL100K = _splitting(LLAMA3_SPLIT)
PRE_TOKENIZERS = {
    "llama-bpe": _LLAMA3,
    "qwen2": _QWEN2,
    "smollm": _DIGITS,
    "gpt-2": _GPT2,
    "dbrx": _CL100K,
    "tekken": _splitting(TEKKEN_SPLIT, ignore_merges=True, adds_bos=True),
    "gpt-4o": _splitting(GPT4O_SPLIT),
    **dict.fromkeys(("llama3", "llama-v3"), _LLAMA3),
    **dict.fromkeys(("starcoder", "refact"), _DIGITS),
    **{"deepseek-r1-qwen": _QWEN2, "smaug-bpe": _CL100K, "phi-2": _GPT2},
}
"""llama.cpp's name -> pre-tokenizer. The first name of a pre-tokenizer is the one that exports write."""
