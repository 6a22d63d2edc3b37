"""Converts a byte-level BPE tokenizer to the fields of a GGUF file."""

import json
from dataclasses import dataclass
from typing import Any

from skipstone.models.gguf.pre_tokenizers import PRE_TOKENIZERS
from skipstone.utils.extras import installed


@dataclass(frozen=True)
class Vocabulary:
    """A tokenizer's fields in a GGUF file.

    tokens: of every id, spelled as in the tokenizer, with a letter for each byte. types: llama.cpp's type of every id. merges:
    the two parts of each, separated by a space. rule: llama.cpp's name of the pre-tokenizer. known: whether it is the
    tokenizer's own. ids: name of a special token -> id. adds: "bos" and "eos" -> whether a text gets one. template: of chats.
    """

    tokens: list[str]
    types: list[int]
    merges: list[str]
    rule: str
    known: bool
    ids: dict[str, int]
    adds: dict[str, bool]
    template: str | None

    def write(self, writer: Any) -> None:
        """Write the fields with a GGUFWriter."""
        writer.add_tokenizer_model("gpt2")
        writer.add_tokenizer_pre(self.rule)
        writer.add_token_list(self.tokens)
        writer.add_token_types(self.types)
        writer.add_token_merges(self.merges)
        for name, number in self.ids.items():
            getattr(writer, f"add_{name}_token_id")(number)
        for name, added in self.adds.items():
            getattr(writer, f"add_add_{name}_token")(added)
        if self.template is not None:
            writer.add_chat_template(self.template)


def vocabulary_of(tokenizer: Any, model: Any, rule: str | None = None) -> Vocabulary:
    """The vocabulary of a tokenizer for a model, which defines the number of ids and the ids that end a text.

    rule: one of PRE_TOKENIZERS, used if the tokenizer's own is none of them; texts then become other tokens. ValueError for a
    tokenizer that is no byte-level BPE, or that has features a GGUF file cannot express.
    """
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is None:
        raise ValueError(f"the tokenizer is a {type(tokenizer).__name__}, expected one with a tokenizer.json")
    said = json.loads(backend.to_str())
    _expect_bytes(said)
    own = _own_rule(said)
    if rule is not None and rule not in PRE_TOKENIZERS:
        raise ValueError(f"a pre-tokenizer must be one of {', '.join(PRE_TOKENIZERS)}, found {rule!r}")
    if own is None and rule is None:
        known = f"llama.cpp knows those of {', '.join(PRE_TOKENIZERS)}: --pre-tokenizer writes one of them all the same"
        raise ValueError(f"the tokenizer cuts texts into words by a rule of its own, and {known}")
    tokens, types = _tokens(said, model.get_input_embeddings().weight.shape[0])
    template = tokenizer.chat_template
    return Vocabulary(
        tokens=tokens,
        types=types,
        merges=[merge if isinstance(merge, str) else " ".join(merge) for merge in said["model"]["merges"]],
        rule=own or str(rule),
        known=own is not None,
        ids=_special(tokenizer, model),
        adds=_added(tokenizer),
        template=template.get("default") if isinstance(template, dict) else template,
    )


def _expect_bytes(said: dict[str, Any]) -> None:
    """ValueError for a tokenizer that is no byte-level BPE. said: its tokenizer.json."""
    model, normalizer = said["model"], said["normalizer"] or {}
    if model["type"] != "BPE":
        raise ValueError(f"the tokenizer is of the type {model['type']}, expected a byte-level BPE")
    if model.get("byte_fallback") or (said["decoder"] or {}).get("type") != "ByteLevel":
        raise ValueError("the tokenizer is a BPE over characters (SentencePiece's), expected a byte-level one")
    if not model["merges"]:
        raise ValueError("the tokenizer has no merges, and llama.cpp loads no byte-level BPE without any")
    if odd := [name for name in ("continuing_subword_prefix", "end_of_word_suffix", "dropout") if model.get(name)]:
        raise ValueError(f"the tokenizer has {', '.join(odd)}, which a GGUF file does not say")
    parts = normalizer.get("normalizers", [normalizer] if normalizer else [])
    if other := {one["type"] for one in parts} - {"NFC"}:
        raise ValueError(f"the tokenizer normalises texts by {', '.join(sorted(other))}, which a GGUF file does not say")


def _own_rule(said: dict[str, Any]) -> str | None:
    """llama.cpp's name of a tokenizer's rule; None where it has none."""
    before = said["pre_tokenizer"] or {}
    steps = tuple(_step(one) for one in before.get("pretokenizers", [before]))
    own = steps, bool(said["model"].get("ignore_merges"))
    return next((name for name, rule in PRE_TOKENIZERS.items() if (rule.steps, rule.ignore_merges) == own), None)


def _step(said: dict[str, Any]) -> tuple[str, Any]:
    """One step of a rule; of a kind that no known rule has for what is not known."""
    match said:
        case {"type": "Split", "pattern": {"Regex": regex}, "behavior": "Isolated", "invert": False}:
            return "split", regex
        case {"type": "Digits", "individual_digits": alone}:
            return "digits", alone
        case {"type": "ByteLevel", "add_prefix_space": False, "use_regex": regex}:
            return "bytes", regex
    return "unknown", said.get("type")


def _tokens(said: dict[str, Any], size: int) -> tuple[list[str], list[int]]:
    """The token of every id and its type. size: ids that the model has. ValueError where the tokenizer has more."""
    kinds = installed("gguf", "GGUF files need gguf", "export").TokenType
    found = {number: (token, kinds.NORMAL) for token, number in said["model"]["vocab"].items()}
    for one in said["added_tokens"]:
        found[one["id"]] = one["content"], kinds.CONTROL if one["special"] else kinds.USER_DEFINED
    if (last := max(found)) >= size:
        raise ValueError(f"the tokenizer has the id {last}, and the model has embeddings of {size} ids")
    every = [found.get(number, (f"[PAD{number}]", kinds.UNUSED)) for number in range(size)]
    return [token for token, _ in every], [int(kind) for _, kind in every]


def _special(tokenizer: Any, model: Any) -> dict[str, int]:
    """Names and ids of the tokens that begin, end, pad a text. Where several end it, the second is the end of a turn and the
    third that of a message."""
    ends = model.generation_config.eos_token_id
    ends = dict.fromkeys([tokenizer.eos_token_id, *(ends if isinstance(ends, list) else [ends])])
    ends.pop(None, None)
    others = {name: getattr(tokenizer, f"{name}_token_id") for name in ("bos", "unk", "pad")}
    ids = dict(zip(("eos", "eot", "eom"), ends, strict=False)) | others
    return {name: number for name, number in ids.items() if number is not None}


def _added(tokenizer: Any) -> dict[str, bool]:
    """Whether a text gets a token of the beginning, and one of the end. ValueError where it gets others."""
    bare, whole = (list(tokenizer("a", add_special_tokens=added)["input_ids"]) for added in (False, True))
    for bos, eos in ((False, False), (True, False), (False, True), (True, True)):
        if whole == [tokenizer.bos_token_id] * bos + bare + [tokenizer.eos_token_id] * eos:
            return {"bos": bos, "eos": eos}
    raise ValueError(f"the tokenizer makes {whole} of a text of {bare}, expected a token at its beginning and end at most")
