"""The tokenizer of a checkpoint as transformers' AutoTokenizer makes it, without importing transformers, which takes seconds.

tests/models/test_tokenizer.py compares everything here with transformers'.
"""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

from tokenizers import AddedToken, Tokenizer, models

from skipstone.models.mapped_config import UnmappableError
from skipstone.models.tokenizer_classes import expect_rebuilt, tokenizer_class

FILE, SETTINGS, TEMPLATE = "tokenizer.json", "tokenizer_config.json", "chat_template.jinja"
FURTHER_TEMPLATES = "additional_chat_templates"  # a folder
OLD_NAMES, OLD_TOKENS = "special_tokens_map.json", "added_tokens.json"
"""Files of older checkpoints: special tokens by name, and ids of added tokens."""
FURTHER_FILES = (SETTINGS, TEMPLATE, OLD_NAMES, OLD_TOKENS)
"""Files that a checkpoint may lack."""
NAMED = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")
"""Names of special tokens that every tokenizer may have."""
UNKNOWN_SETTINGS = ("auto_map", "fast_tokenizer_files", "init_inputs", "fix_mistral_regex", "split_special_tokens")
"""Settings that change what transformers does in ways that are not known here."""
CLEANS_UP, CLEANS_UP_BPE = (
    "clean_up_tokenization_spaces",
    "clean_up_tokenization_spaces_for_bpe_even_though_it_will_corrupt_output",
)
Token = str | AddedToken


class CheckpointTokenizer:
    """The part of a transformers tokenizer that decoding needs, with the same names and results.

    backend_tokenizer: the tokenizer of the `tokenizers` library. special_tokens_map: name -> special token. chat_template: a
    template, templates by name, or None. Every name of NAMED is an attribute (a token or None), and with `_id` its id.
    """

    bos_token: str | None
    bos_token_id: int | None
    eos_token: str | None
    eos_token_id: int | None
    unk_token: str | None
    unk_token_id: int | None
    pad_token: str | None
    pad_token_id: int | None

    def __init__(
        self, backend: Tokenizer, special: Mapping[str, str], extra: Sequence[str] = (), chat_template: Any = None
    ) -> None:
        self.backend_tokenizer, self.special_tokens_map, self.chat_template = backend, dict(special), chat_template
        self.all_special_tokens = list(dict.fromkeys([*special.values(), *extra]))
        self.all_special_ids = [backend.token_to_id(token) for token in self.all_special_tokens]
        for name in NAMED:
            token = special.get(name)
            setattr(self, name, token)
            setattr(self, f"{name}_id", None if token is None else backend.token_to_id(token))

    def __call__(self, text: str | list[str], add_special_tokens: bool = True) -> dict[str, Any]:
        """{"input_ids": the ids of a text, or one list of ids per text}."""
        if isinstance(text, str):
            return {"input_ids": self.backend_tokenizer.encode(text, add_special_tokens=add_special_tokens).ids}
        encodings = self.backend_tokenizer.encode_batch(text, add_special_tokens=add_special_tokens)
        return {"input_ids": [one.ids for one in encodings]}

    def __len__(self) -> int:
        """Number of ids, those of added tokens included."""
        return self.backend_tokenizer.get_vocab_size(with_added_tokens=True)

    def get_vocab(self) -> dict[str, int]:
        """Token -> id."""
        return self.backend_tokenizer.get_vocab(with_added_tokens=True)

    def decode(self, tokens: int | Sequence[int], skip_special_tokens: bool = False) -> str:
        """The text of ids; ids without a token have none."""
        return self.backend_tokenizer.decode([tokens] if isinstance(tokens, int) else tokens, skip_special_tokens)

    def convert_ids_to_tokens(self, ids: int | Sequence[int]) -> Any:
        """The token of an id, or of every id; None for an id without one."""
        if isinstance(ids, int):
            return self.backend_tokenizer.id_to_token(ids)
        return [*map(self.backend_tokenizer.id_to_token, ids)]

    def convert_tokens_to_string(self, tokens: list[str]) -> str:
        """The text of tokens of the vocabulary."""
        decoder = self.backend_tokenizer.decoder
        return " ".join(tokens) if decoder is None else decoder.decode(tokens)

    def apply_chat_template(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        tokenize: Literal[False],
        tools: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = False,
    ) -> str:
        """The text of a chat. tools: in transformers' format. ValueError without messages or template; any exception that the
        template causes."""
        from skipstone.models.chat_template import render_chat  # imports jinja2, which texts do not need

        if not messages:
            raise ValueError("the chat has no message")
        template = self.chat_template
        if isinstance(template, dict):
            template = template.get("tool_use" if tools is not None and "tool_use" in template else "default")
        if template is None:
            raise ValueError(f"no chat template is the default, found {sorted(self.chat_template or {})}")
        own = {"tools": tools, "documents": None, "add_generation_prompt": add_generation_prompt}
        return render_chat(template, messages, **own, **self.special_tokens_map)


def read_tokenizer(folder: Path) -> CheckpointTokenizer:
    """The tokenizer of a checkpoint, as AutoTokenizer reads it without `trust_remote_code`.

    folder: holds config.json and all files of the tokenizer. UnmappableError if transformers' own class is needed, and for
    broken files."""
    try:
        return _read(folder)
    except UnmappableError:
        raise
    except Exception as error:  # the files may hold anything, and transformers' errors are explained
        raise UnmappableError(f"has a tokenizer that cannot be read ({error})") from error


def _read(folder: Path) -> CheckpointTokenizer:
    settings, config = _json(folder / SETTINGS, _as_token), _json(folder / "config.json")
    content = (folder / FILE).read_bytes()
    rules = tokenizer_class(config, settings, content)
    if config["model_type"] == "mistral" and (folder / "tekken.json").exists():
        raise UnmappableError("has a tekken.json, which mistral-common may read")
    backend = Tokenizer.from_buffer(content)
    _expect_usable(settings, backend)
    in_file = dict(sorted(backend.get_added_tokens_decoder().items()))
    settings, added = _added_tokens(folder, settings, in_file)
    special, extra = _special_tokens({**rules.special, **settings} if rules else settings)
    names = {name: str(token) for name, token in special.items()}
    tokens = [*added.values()]
    known = {token.content for token in (*tokens, *(in_file.values() if rules is None else ()))}
    new = [token for token in (*special.values(), *extra) if str(token) not in known]
    tokens += [_added(token) for place, token in enumerate(new) if token not in new[:place]]
    for token in tokens:
        token.special |= token.content in names.values()
    if rules is not None:
        rules.rebuild(backend, settings, names)
        if rules.adds_special:
            tokens += map(_added, dict.fromkeys([*names.values(), *map(str, extra)]))
    backend.add_tokens(tokens)
    if rules is not None:
        expect_rebuilt(backend, in_file, tokens)
    return CheckpointTokenizer(backend, names, [*map(str, extra)], _chat_template(folder, settings))


def _json(path: Path, hook: Any = None) -> dict[str, Any]:
    """The JSON object of a file; empty without the file."""
    values = json.loads(path.read_text(encoding="utf-8"), object_hook=hook) if path.exists() else {}
    if not isinstance(values, dict):
        raise TypeError(f"{path.name} is no JSON object")
    return values


def _as_token(value: dict[str, Any]) -> Any:
    """An AddedToken where a JSON object stands for one."""
    if value.get("__type") != "AddedToken":
        return value
    return AddedToken(**{name: one for name, one in value.items() if name != "__type"})


def _added(token: Token) -> AddedToken:
    return AddedToken(token, special=True) if isinstance(token, str) else token


def _expect_usable(settings: Mapping[str, Any], backend: Tokenizer) -> None:
    if unknown := [name for name in UNKNOWN_SETTINGS if settings.get(name)]:
        raise UnmappableError(f"has the tokenizer setting {unknown[0]!r}")
    if backend.padding is not None or backend.truncation is not None:
        raise UnmappableError("has a tokenizer that pads or truncates texts")
    if settings.get(CLEANS_UP) and (not isinstance(backend.model, models.BPE) or settings.get(CLEANS_UP_BPE)):
        raise UnmappableError("has a tokenizer that cleans texts up")


def _added_tokens(
    folder: Path, settings: dict[str, Any], in_file: dict[int, AddedToken]
) -> tuple[dict[str, Any], dict[int, AddedToken]]:
    """(settings, id -> token that is added to the vocabulary). Older checkpoints keep special tokens in a file of their own."""
    if "added_tokens_decoder" in settings:
        given = {int(number): token for number, token in settings["added_tokens_decoder"].items()}
        tokens = {number: AddedToken(**token) if isinstance(token, dict) else token for number, token in given.items()}
        return settings, dict(sorted(tokens.items()))
    names = _json(folder / OLD_NAMES)
    if (folder / OLD_TOKENS).exists() or not names.keys() <= set(NAMED):
        raise UnmappableError(f"has special tokens in an older form ({OLD_TOKENS} or {OLD_NAMES})")
    for name, token in names.items():
        names[name] = AddedToken(**{**token, "special": True}) if isinstance(token, dict) else token
    return {**settings, **names}, in_file


def _special_tokens(settings: Mapping[str, Any]) -> tuple[dict[str, Token], list[Token]]:
    """(name -> special token, special tokens without a name)"""
    named = {name: settings[name] for name in NAMED if settings.get(name) is not None}
    further = {name: token for name, token in settings.items() if name.endswith("_token") and name not in NAMED}
    texts = {name: token for name, token in further.items() if isinstance(token, str)}
    older = settings.get("additional_special_tokens") or []
    extra = settings.get("extra_special_tokens") or older
    if isinstance(extra, dict):
        texts, extra = {**texts, **extra}, older
    texts = texts or settings.get("model_specific_special_tokens") or {}
    with_properties = {name: token for name, token in further.items() if isinstance(token, AddedToken)}
    special = {**named, **with_properties, **texts}
    if not all(isinstance(token, Token) and str(token) for token in (*special.values(), *extra)):
        raise UnmappableError("has special tokens that are no texts")
    return special, list(extra)


def _chat_template(folder: Path, settings: Mapping[str, Any]) -> Any:
    """A template, templates by name, or None."""
    paths = {"default": folder / TEMPLATE} if (folder / TEMPLATE).is_file() else {}
    paths |= {path.stem: path for path in (folder / FURTHER_TEMPLATES).glob("*.jinja")}
    if paths:
        templates = {name: path.read_text(encoding="utf-8") for name, path in paths.items()}
        return templates["default"] if [*templates] == ["default"] else templates
    given = settings.get("chat_template")
    return {one["name"]: one["template"] for one in given} if isinstance(given, list) else given
