"""A checkpoint's tokenizer without transformers: tokenizer.json by the `tokenizers` library, chat templates by jinja2.

It gives what AutoTokenizer gives, or leaves the checkpoint to it. transformers takes tokenizer.json as it is, or builds the
tokenizer of a class from its vocabulary. The second is the same only if the file has the parts that the class builds.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer

NAMED = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")
"""transformers' names of special tokens, in its order."""
AS_STORED = ("TokenizersBackend", "PreTrainedTokenizer", "PythonBackend")
"""Classes that take tokenizer.json as it is."""
OF_TYPE = {
    **dict.fromkeys(("mistral", "granite", "olmo2", "phi3"), "TokenizersBackend"),
    **dict.fromkeys(("qwen2", "qwen3"), "Qwen2Tokenizer"),
    **dict.fromkeys(("gemma", "gemma2", "gemma3_text"), "GemmaTokenizer"),
    **dict.fromkeys(("llama", "smollm3"), None),
}
"""transformers' tokenizer class of a model type, by which it may replace the class that a checkpoint names."""
OWN_CLASS = ("qwen2", "phi3")
"""Model types whose own class replaces any other."""
LARGE_VOCABULARY = 100_000  # from here on transformers may repair Mistral's pre-tokenizer
FILES_OF_OTHERS = ("added_tokens.json", "tekken.json", "additional_chat_templates")
"""Files that change what transformers loads."""
FLAGS = ("lstrip", "rstrip", "normalized", "single_word", "special")
"""Of an added token."""
_BYTE_LEVEL = {"type": "ByteLevel", "add_prefix_space": True, "trim_offsets": True, "use_regex": True}
_SPACES = {"type": "Replace", "pattern": {"String": "▁"}, "content": " "}
_SPLIT = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"


@dataclass(frozen=True)
class BuiltClass:
    """The parts that a class of transformers builds, and its special tokens, where a checkpoint names none. model: settings."""

    normalizer: Any
    pre_tokenizer: Any
    decoder: Any
    model: Mapping[str, Any]
    special: Mapping[str, str]


_GPT2_MODEL = {
    "unk_token": None,
    "continuing_subword_prefix": "",
    "end_of_word_suffix": "",
    "fuse_unk": False,
    "byte_fallback": False,
}
_END = "<|endoftext|>"
BUILT = {
    "Qwen2Tokenizer": BuiltClass(
        {"type": "NFC"},
        {
            "type": "Sequence",
            "pretokenizers": [
                {"type": "Split", "pattern": {"Regex": _SPLIT}, "behavior": "Isolated", "invert": False},
                {**_BYTE_LEVEL, "add_prefix_space": False, "use_regex": False},
            ],
        },
        _BYTE_LEVEL,
        _GPT2_MODEL,
        {"eos_token": _END, "unk_token": _END, "pad_token": _END},
    ),
    "GPT2Tokenizer": BuiltClass(
        None,
        {**_BYTE_LEVEL, "add_prefix_space": False},
        _BYTE_LEVEL,
        _GPT2_MODEL,
        {"bos_token": _END, "eos_token": _END, "unk_token": _END},
    ),
    "GemmaTokenizer": BuiltClass(
        {"type": "Replace", "pattern": {"String": " "}, "content": "▁"},
        {"type": "Split", "pattern": {"String": " "}, "behavior": "MergedWithPrevious", "invert": False},
        {"type": "Sequence", "decoders": [_SPACES, {"type": "ByteFallback"}, {"type": "Fuse"}]},
        {
            "unk_token": "<unk>",
            "continuing_subword_prefix": None,
            "end_of_word_suffix": None,
            "fuse_unk": True,
            "byte_fallback": True,
        },
        {"bos_token": "<bos>", "eos_token": "<eos>", "unk_token": "<unk>", "pad_token": "<pad>", "mask_token": "<mask>"},
    ),
}


@dataclass(eq=False)
class CheckpointTokenizer:
    """A checkpoint's tokenizer, with transformers' names. special_tokens_map: named special tokens. extra: further ones."""

    backend_tokenizer: Tokenizer
    special_tokens_map: dict[str, str]
    extra: Sequence[str]
    chat_template: Any
    clean_up_tokenization_spaces: bool
    name_or_path: str = ""
    clean_up_tokenization_spaces_for_bpe_even_though_it_will_corrupt_output: bool = False
    is_fast: bool = field(default=True, init=False)

    def __getattr__(self, name: str) -> Any:
        """Special tokens and their ids, such as `eos_token` and `eos_token_id`; None for one that is not set."""
        token = name.removesuffix("_id")
        if token not in NAMED:
            raise AttributeError(name)
        text = self.special_tokens_map.get(token)
        return text if text is None or token == name else self.backend_tokenizer.token_to_id(text)

    def __len__(self) -> int:
        return self.backend_tokenizer.get_vocab_size()

    @property
    def vocab_size(self) -> int:
        """Size of the vocabulary without added tokens."""
        return self.backend_tokenizer.get_vocab_size(with_added_tokens=False)

    @property
    def all_special_tokens(self) -> list[str]:
        """All special tokens, each once."""
        return list(dict.fromkeys((*self.special_tokens_map.values(), *self.extra)))

    @property
    def all_special_ids(self) -> list[int | None]:
        """Their ids."""
        return [self.backend_tokenizer.token_to_id(token) for token in self.all_special_tokens]

    def __call__(self, text: str, add_special_tokens: bool = True) -> dict[str, list[int]]:
        """{"input_ids", "attention_mask"} of a text."""
        ids = self.backend_tokenizer.encode(text, add_special_tokens=add_special_tokens).ids
        return {"input_ids": ids, "attention_mask": [1] * len(ids)}

    def get_vocab(self) -> dict[str, int]:
        """Token -> id."""
        return self.backend_tokenizer.get_vocab()

    def decode(self, token_ids: Any, skip_special_tokens: bool = False) -> str:
        """The text of token ids, a list or a tensor."""
        ids = token_ids.tolist() if hasattr(token_ids, "tolist") else token_ids
        return self.backend_tokenizer.decode([ids] if isinstance(ids, int) else list(ids), skip_special_tokens)

    def convert_ids_to_tokens(self, ids: Any) -> Any:
        """The token of an id, or those of a list."""
        return (
            self.backend_tokenizer.id_to_token(ids) if isinstance(ids, int) else [*map(self.backend_tokenizer.id_to_token, ids)]
        )

    def convert_tokens_to_ids(self, tokens: Any) -> Any:
        """The id of a token, or those of a list; of an unknown token that of `unk_token`."""
        if not isinstance(tokens, str):
            return [*map(self.convert_tokens_to_ids, tokens)]
        known = self.backend_tokenizer.token_to_id(tokens)
        return self.unk_token_id if known is None else known

    def convert_tokens_to_string(self, tokens: list[str]) -> str:
        """The text of tokens."""
        decoder = self.backend_tokenizer.decoder
        return " ".join(tokens) if decoder is None else decoder.decode(tokens)

    def apply_chat_template(
        self,
        conversation: Sequence[Mapping[str, Any]],
        tools: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = False,
        tokenize: bool = False,
        **values: Any,
    ) -> str:
        """The text of a chat. values: further variables of the template."""
        from skipstone.models.chat_template import render

        template = self.chat_template
        if isinstance(template, dict):
            name = "tool_use" if tools is not None and "tool_use" in template else "default"
            template = template[name]
        return render(template, conversation, tools, add_generation_prompt, {**self.special_tokens_map, **values})


def read_tokenizer(folder: Path) -> CheckpointTokenizer | None:
    """The tokenizer of a checkpoint in a folder; None if transformers may load another one. OSError or ValueError for files
    that cannot be read."""
    path = folder / "tokenizer.json"
    if not path.exists() or any((folder / name).exists() for name in FILES_OF_OTHERS):
        return None
    settings = json.loads((folder / "tokenizer_config.json").read_bytes())
    kind = _class_of(settings, json.loads((folder / "config.json").read_bytes()), path)
    if kind is None or settings.get("split_special_tokens") or settings.get("add_prefix_space") is not None:
        return None
    if "added_tokens_decoder" not in settings and (folder / "special_tokens_map.json").exists():
        settings |= json.loads((folder / "special_tokens_map.json").read_bytes())
    backend = Tokenizer.from_str(path.read_text(encoding="utf-8"))
    built = BUILT.get(kind)
    if (built is not None and not _is_built_alike(backend, built)) or not _has_added_tokens(
        backend, settings, built is not None
    ):
        return None
    special = {name: _text(settings.get(name, (built.special if built else {}).get(name))) for name in NAMED}
    special = {name: token for name, token in special.items() if token is not None}
    others = {name: _text(token) for name, token in settings.items() if name.endswith("_token") and name not in NAMED}
    special |= {name: token for name, token in others.items() if token is not None}
    extra = settings.get("extra_special_tokens") or settings.get("additional_special_tokens") or []
    if isinstance(extra, dict):
        special, extra = special | {name: _text(token) or "" for name, token in extra.items()}, []
    extra = [_text(token) or "" for token in extra]
    added = {token.content for token in backend.get_added_tokens_decoder().values() if token.special}
    if not {*special.values(), *extra} <= added:
        return None
    backend.no_truncation()
    backend.no_padding()
    cleans = bool(settings.get("clean_up_tokenization_spaces", False))
    return CheckpointTokenizer(backend, special, extra, _template(folder, settings), cleans, str(folder))


def _text(token: Any) -> str | None:
    """The text of a special token in a file of settings."""
    return token["content"] if isinstance(token, dict) else token


def _class_of(settings: Mapping[str, Any], config: Mapping[str, Any], path: Path) -> str | None:
    """The class that AutoTokenizer takes, one of AS_STORED or BUILT; None for another."""
    kind, named = config.get("model_type"), settings.get("tokenizer_class") or config.get("tokenizer_class")
    if kind not in OF_TYPE or "auto_map" in settings or not isinstance(named, str):
        return None
    named, own = named.removesuffix("Fast"), OF_TYPE[kind]
    if named == "LlamaTokenizer" and kind not in OWN_CLASS and '"ByteLevel"' in path.read_text(encoding="utf-8"):
        named = AS_STORED[0]
    elif own is not None and own != named:
        named = own if own in AS_STORED or kind in OWN_CLASS else named
    if named in AS_STORED and not _may_repair(kind, path):
        return named
    return named if named in BUILT and not _may_repair(kind, path) else None


def _may_repair(kind: str, path: Path) -> bool:
    """Whether transformers may exchange parts of the tokenizer because of the model type: it does for Mistral's."""
    return kind == "mistral" and (
        _installed("mistral_common") or len(json.loads(path.read_bytes())["model"]["vocab"]) > LARGE_VOCABULARY
    )


@lru_cache(maxsize=1)
def _installed(package: str) -> bool:
    from importlib.util import find_spec

    return find_spec(package) is not None


def _is_built_alike(backend: Tokenizer, built: BuiltClass) -> bool:
    """Whether a tokenizer has the parts that a class builds."""
    parts = {name: getattr(backend, name) for name in ("normalizer", "pre_tokenizer", "decoder")}
    states = {name: None if part is None else json.loads(part.__getstate__()) for name, part in parts.items()}
    model = backend.model
    if type(model).__name__ != "BPE" or model.dropout is not None or model.ignore_merges:
        return False
    same_model = all(getattr(model, name) == value for name, value in built.model.items())
    return same_model and all(states[name] == getattr(built, name) for name in states)


def _has_added_tokens(backend: Tokenizer, settings: Mapping[str, Any], all_of_them: bool) -> bool:
    """Whether tokenizer.json has the added tokens that the settings name. all_of_them: and no others."""
    named = settings.get("added_tokens_decoder")
    if named is None:
        return True
    stored = {
        number: (token.content, *(getattr(token, flag) for flag in FLAGS))
        for number, token in backend.get_added_tokens_decoder().items()
    }
    given = {int(number): (token["content"], *(token.get(flag) for flag in FLAGS)) for number, token in named.items()}
    return given == stored if all_of_them else given.items() <= stored.items()


def _template(folder: Path, settings: Mapping[str, Any]) -> Any:
    """The chat template: a text, texts by name, or None."""
    path = folder / "chat_template.jinja"
    template = path.read_text(encoding="utf-8") if path.exists() else settings.get("chat_template")
    return {one["name"]: one["template"] for one in template} if isinstance(template, list) else template
