"""transformers' tokenizer classes: the one that a checkpoint gets, and what it takes from tokenizer.json.

`TokenizersBackend` takes the file as it is. The others take its vocabulary, and build the steps around it themselves.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers

from skipstone.models.mapped_config import UnmappableError

AS_WRITTEN = "TokenizersBackend"
OLD_NAME = "PreTrainedTokenizerFast"  # of the same class
CLASS_OF_TYPE: dict[str, str | None] = {
    **dict.fromkeys(("llama", "smollm3"), None),
    **dict.fromkeys(("mistral", "granite", "olmo2", "phi3"), AS_WRITTEN),
    **dict.fromkeys(("qwen2", "qwen3"), "Qwen2Tokenizer"),
    **dict.fromkeys(("gemma", "gemma2", "gemma3_text"), "GemmaTokenizer"),
}
"""The class that transformers has for a model type; None if it has none."""
QWEN_WORDS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
Settings = Mapping[str, Any]
"""The values of tokenizer_config.json."""
Steps = tuple[Any, Any, Any]
"""Normalizer, pre-tokenizer and decoder."""


@dataclass(frozen=True)
class TokenizerClass:
    """A class that builds its tokenizer from a BPE vocabulary.

    steps: makes those around the model. special: name -> special token where the settings have no such name. flags: values of
    the model; all others are off. names_unknown: whether the model knows the unknown token. adds_special: whether all special
    tokens are added again, by their texts."""

    steps: Callable[[Settings], Steps]
    special: Mapping[str, str]
    flags: Mapping[str, bool] = field(default_factory=dict)
    names_unknown: bool = False
    adds_special: bool = False

    def rebuild(self, backend: Tokenizer, settings: Settings, special: Mapping[str, str]) -> None:
        """Give the tokenizer of a file the steps of the class. special: name -> special token. UnmappableError for a model that
        is no plain BPE."""
        model: Any = backend.model
        if not isinstance(model, models.BPE) or model.continuing_subword_prefix or model.end_of_word_suffix:
            raise UnmappableError("has a tokenizer of another kind than its class builds")
        flags = dict.fromkeys(("fuse_unk", "byte_fallback", "ignore_merges"), False)
        values = {**flags, **self.flags, "dropout": None}
        values["unk_token"] = str(special.get("unk_token")) if self.names_unknown else None
        for name, value in values.items():
            setattr(model, name, value)
        backend.normalizer, backend.pre_tokenizer, backend.decoder = self.steps(settings)


def llama_steps(settings: Settings) -> Steps:
    """Llama's, which may put a space before a text."""
    prefix = settings.get("add_prefix_space")
    prefix = True if prefix is None else bool(prefix)
    scheme = "never" if not prefix else "always" if settings.get("legacy", False) else "first"
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    steps += [decoders.Strip(content=" ", left=1)] if prefix else []
    return None, pre_tokenizers.Metaspace("▁", prepend_scheme=scheme, split=False), decoders.Sequence(steps)


def _gemma(settings: Settings) -> Steps:
    words = pre_tokenizers.Split(" ", behavior="merged_with_previous")
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    return normalizers.Replace(" ", "▁"), words, decoders.Sequence(steps)


def _qwen(settings: Settings) -> Steps:
    letters = pre_tokenizers.ByteLevel(add_prefix_space=bool(settings.get("add_prefix_space")), use_regex=False)
    words = pre_tokenizers.Split(Regex(QWEN_WORDS), behavior="isolated")
    return normalizers.NFC(), pre_tokenizers.Sequence([words, letters]), decoders.ByteLevel()


def _gpt2(settings: Settings) -> Steps:
    words = pre_tokenizers.ByteLevel(add_prefix_space=settings.get("add_prefix_space", False))
    return None, words, decoders.ByteLevel()


_SENTENCE_PIECE = {"fuse_unk": True, "byte_fallback": True}
_END = "<|endoftext|>"
CLASSES: dict[str, TokenizerClass | None] = {
    AS_WRITTEN: None,
    "LlamaTokenizer": TokenizerClass(
        llama_steps, {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}, _SENTENCE_PIECE
    ),
    "GemmaTokenizer": TokenizerClass(
        _gemma,
        {f"{name}_token": f"<{name}>" for name in ("bos", "eos", "unk", "pad", "mask")},
        _SENTENCE_PIECE,
        names_unknown=True,
    ),
    "Qwen2Tokenizer": TokenizerClass(_qwen, dict.fromkeys(("eos_token", "unk_token", "pad_token"), _END), adds_special=True),
    "GPT2Tokenizer": TokenizerClass(_gpt2, dict.fromkeys(("bos_token", "eos_token", "unk_token"), _END)),
}
"""The classes that are known here. None takes the file as it is."""


def tokenizer_class(config: Mapping[str, Any], settings: Settings, content: bytes) -> TokenizerClass | None:
    """The class that AutoTokenizer chooses; None if it takes tokenizer.json as it is.

    config: of the model. content: tokenizer.json. UnmappableError for a class or a model type that is not known here."""
    kind, declared = config.get("model_type"), settings.get("tokenizer_class") or config.get("tokenizer_class")
    if kind not in CLASS_OF_TYPE:
        raise UnmappableError(f"has the type {kind!r}, whose tokenizers are not known")
    name = _chosen(kind, AS_WRITTEN if declared == OLD_NAME else (declared or "").removesuffix("Fast"), content)
    if name not in CLASSES:
        raise UnmappableError(f"has the tokenizer class {name!r}")
    return CLASSES[name]


def _chosen(kind: str, declared: str, content: bytes) -> str:
    own = CLASS_OF_TYPE[kind]
    if own == AS_WRITTEN or kind == "qwen2" or not declared:  # checkpoints of Qwen 2 often declare a wrong class
        return own or AS_WRITTEN
    is_llama3 = declared == "LlamaTokenizer" and b'"ByteLevel"' in content  # it declares Llama 2's class
    return AS_WRITTEN if is_llama3 else declared


def expect_rebuilt(backend: Tokenizer, in_file: Mapping[int, AddedToken], added: list[AddedToken]) -> None:
    """UnmappableError unless a tokenizer with the tokens that its file adds, and then `added`, equals one with `added` alone.

    in_file: id -> token."""
    model, tokens = backend.model, backend.get_added_tokens_decoder()
    begin = backend.get_vocab_size(with_added_tokens=False)
    behind = [text for text in dict.fromkeys(one.content for one in added) if model.token_to_id(text) is None]
    misses = {one.content for one in in_file.values()} - {one.content for one in added}
    moved = [backend.token_to_id(text) for text in behind] != [*range(begin, begin + len(behind))]
    final = [(one, tokens[number]) for number, one in in_file.items()]
    stale = any(one.special > last.special or one.normalized > last.normalized for one, last in final)  # the library keeps both
    if misses or moved or stale:
        raise UnmappableError("has a tokenizer.json with other added tokens than its tokenizer_config.json")
