"""Tokenizers without transformers against its AutoTokenizer: ids, texts, special tokens, chats, the class that it chooses."""

import json
import random
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from tokenizers import AddedToken, Tokenizer, models, normalizers, processors
from transformers import AutoTokenizer
from transformers.models.auto.tokenization_auto import TOKENIZER_MAPPING_NAMES

from skipstone.assets import NANO
from skipstone.hf.api import chat_text
from skipstone.hf.detokenizer import detokenize
from skipstone.models import vocabularies
from skipstone.models.mapped_config import DEFAULTS, UnmappableError
from skipstone.models.tokenizer import NAMED, read_tokenizer
from skipstone.models.tokenizer_classes import AS_WRITTEN, CLASS_OF_TYPE, CLASSES, tokenizer_class
from skipstone.models.vocabularies import vocabulary
from tests.helpers import text_tokenizers
from tests.helpers.byte_level import byte_level

TEXTS = [
    *(
        "",
        " ",
        "  Hello world!",
        "Hello  world \n\n\t x",
        "don't DON'T 1234567 + 12",
        "é e\u0301 你好 😀 \x00 �",
        "<s>a</s> <s>b",
        "ab",
    ),
    *("a<think>\n stop </think>", "<new> x <new>", "▁Hello▁world", "two words<0x41>", "ü ber", "<|im_start|>user<|endoftext|>"),
]
LLAMA = {"tokenizer_class": "LlamaTokenizer"}
SENTENCE_PIECE = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}
WITH_PROPERTIES = {"__type": "AddedToken", "content": "</s>", "lstrip": True, "rstrip": False, "normalized": False}
Settings = dict[str, Any]


def pieces(old: bool = False) -> Tokenizer:
    """BPE with byte fallback. old: spaces are replaced by a normalizer, as in the files of Llama 2."""
    core = text_tokenizers.llama().backend_tokenizer
    core.model.ignore_merges, core.model.fuse_unk = True, False
    core.add_special_tokens(["<unk>", "<s>", "</s>"])
    core.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
    if old:
        core.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
        core.pre_tokenizer = None
    return core


def few_added(*texts: str) -> Tokenizer:
    """As `pieces`, with these special tokens alone."""
    core = Tokenizer(models.BPE({"<unk>": 0, "<s>": 1, "</s>": 2, "▁": 3, "a": 4, "▁a": 5}, [("▁", "a")]))
    core.add_special_tokens([AddedToken(text, normalized=False) for text in texts])
    return core


def letters(rule: str = "llama-bpe") -> Tokenizer:
    return byte_level(rule, begins=True).backend_tokenizer


def unigram() -> Tokenizer:
    return text_tokenizers.unigram().backend_tokenizer


def words() -> Tokenizer:
    return text_tokenizers.words().backend_tokenizer


def write(folder: Path, core: Tokenizer, kind: str, settings: Settings, **files: Any) -> Path:
    """A checkpoint's tokenizer. files: name -> JSON values or text, with `__` for a dot."""
    core.save(str(folder / "tokenizer.json"))
    for name, content in {"config__json": {"model_type": kind}, "tokenizer_config__json": settings, **files}.items():
        path = folder / name.replace("__", ".")
        path.parent.mkdir(exist_ok=True)
        path.write_text(content if isinstance(content, str) else json.dumps(content), encoding="utf-8")
    return folder


def expect_same(folder: Path) -> None:
    ours, theirs = read_tokenizer(folder), AutoTokenizer.from_pretrained(folder)
    for name in (*NAMED, *(f"{name}_id" for name in NAMED), "all_special_tokens", "all_special_ids", "chat_template"):
        assert getattr(ours, name) == getattr(theirs, name), name
    assert ours.special_tokens_map == theirs.special_tokens_map
    assert (len(ours), ours.get_vocab()) == (len(theirs), theirs.get_vocab())
    assert steps(ours) == steps(theirs)
    texts = [*TEXTS, *(first + second for first in TEXTS for second in TEXTS[::3])]
    for adds in (True, False):
        assert ours(texts, add_special_tokens=adds)["input_ids"] == theirs(texts, add_special_tokens=adds)["input_ids"]
        for text in TEXTS:
            assert ours(text, add_special_tokens=adds)["input_ids"] == theirs(text, add_special_tokens=adds)["input_ids"]
    draw, size = random.Random(0), len(ours) + 3
    for ids in (*([draw.randrange(size) for _ in range(12)] for _ in range(40)), [], *ours(TEXTS)["input_ids"], 5, size):
        assert ours.convert_ids_to_tokens(ids) == theirs.convert_ids_to_tokens(ids)
        for skips in (True, False):
            assert ours.decode(ids, skip_special_tokens=skips) == theirs.decode(ids, skip_special_tokens=skips)
        if isinstance(ids, list):
            assert detokenize(ours, ids) == detokenize(theirs, ids)
    known = [token for token in ours.convert_ids_to_tokens(range(20)) if token is not None]
    assert ours.convert_tokens_to_string(known) == theirs.convert_tokens_to_string(known)


def test_a_vocabulary_has_the_tokens_of_all_files_and_is_none_for_broken_ones(tmp_path: Path) -> None:
    added = {"added_tokens_decoder": {"6": {"content": "<new>", "special": True}}}
    folder = write(tmp_path, few_added("<s>"), "llama", {"tokenizer_class": "PreTrainedTokenizerFast", **added})
    assert vocabulary(str(folder)) == AutoTokenizer.from_pretrained(folder).get_vocab()
    assert "<new>" in (vocabulary(str(folder)) or {})
    vocabularies._vocabulary.cache_clear()
    (folder / "tokenizer.json").write_text("{")
    assert vocabulary(str(folder)) is None


def steps(tokenizer: Any) -> Any:
    """What the `tokenizers` library does, written as JSON, without settings that do nothing."""
    written = json.loads(tokenizer.backend_tokenizer.to_str())
    for name in ("continuing_subword_prefix", "end_of_word_suffix"):
        written["model"][name] = written["model"].get(name) or None
    nothing = written.pop("post_processor") in (None, json.loads(NO_POST_PROCESSING))
    return written | ({} if nothing else {"post_processor": tokenizer.backend_tokenizer.post_processor.__getstate__()})


NO_POST_PROCESSING = processors.TemplateProcessing(single="$A:0", pair="$A:0 $B:1").__getstate__()
ADDED: Settings = {
    "0": {"content": "<unk>", "special": True, "normalized": False, "lstrip": False, "rstrip": False, "single_word": False},
    "1": {"content": "<s>", "special": True, "normalized": False, "lstrip": False, "rstrip": True, "single_word": False},
    "2": {"content": "</s>", "special": True, "normalized": False, "lstrip": False, "rstrip": False, "single_word": False},
}
CHECKPOINTS: dict[str, tuple[Any, str, Settings, dict[str, Any]]] = {
    "llama 3": (letters, "llama", {"tokenizer_class": "PreTrainedTokenizerFast", "clean_up_tokenization_spaces": True}, {}),
    "llama 3 with llama 2's class": (letters, "llama", {"tokenizer_class": "LlamaTokenizerFast", "bos_token": "<s>"}, {}),
    "no settings": (letters, "llama", {}, {}),
    "class in config.json": (
        pieces,
        "llama",
        {},
        {"config__json": {"model_type": "llama", "tokenizer_class": "LlamaTokenizer"}},
    ),
    "smollm3": (lambda: letters("smollm"), "smollm3", {"tokenizer_class": "GPT2Tokenizer", "add_prefix_space": True}, {}),
    "gpt2 with bos": (letters, "llama", {"tokenizer_class": "GPT2Tokenizer", "add_bos_token": True, "eos_token": None}, {}),
    "qwen2": (lambda: letters("qwen2"), "qwen2", {"tokenizer_class": "Qwen2Tokenizer", "pad_token": "<pad>"}, {}),
    "qwen2 with a wrong class": (letters, "qwen2", {"tokenizer_class": "LlamaTokenizerFast", "bos_token": "<s>"}, {}),
    "qwen3": (
        lambda: letters("qwen2"),
        "qwen3",
        {"tokenizer_class": "Qwen2Tokenizer", "additional_special_tokens": ["<think>", "<new>"], "bos_token": None},
        {},
    ),
    "qwen3 as written": (letters, "qwen3", {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "</s>"}, {}),
    "llama 2": (lambda: pieces(old=True), "llama", {"tokenizer_class": "LlamaTokenizer", "legacy": True, **SENTENCE_PIECE}, {}),
    "llama 2, not legacy": (pieces, "llama", {"tokenizer_class": "LlamaTokenizerFast", "legacy": None}, {}),
    "llama 2 without prefix": (pieces, "llama", {"tokenizer_class": "LlamaTokenizer", "add_prefix_space": False}, {}),
    "llama 2 with old names": (
        lambda: pieces(old=True),
        "llama",
        {"tokenizer_class": "LlamaTokenizer", "bos_token": "<unk>"},
        {
            "special_tokens_map__json": {
                **SENTENCE_PIECE,
                "eos_token": {"content": "</s>", "lstrip": True},
                "pad_token": "<new>",
            }
        },
    ),
    "mistral": (lambda: pieces(old=True), "mistral", {"tokenizer_class": "LlamaTokenizer", **SENTENCE_PIECE}, {}),
    "phi3": (lambda: pieces(old=True), "phi3", {"tokenizer_class": "LlamaTokenizer", "eos_token": "<new>"}, {}),
    "gemma": (pieces, "gemma", {"tokenizer_class": "GemmaTokenizer", **SENTENCE_PIECE, "pad_token": "<new>"}, {}),
    "gemma with names of its own": (
        pieces,
        "gemma3_text",
        {"tokenizer_class": "GemmaTokenizerFast", "boi_token": "<a>", "eoi_token": {**WITH_PROPERTIES, "content": "<new>"}}
        | {"extra_special_tokens": {"image_token": "<b>", "boi_token": "<a>"}},
        {},
    ),
    "no class": (pieces, "gemma2", {}, {}),
    "granite": (letters, "granite", {"tokenizer_class": "GPT2Tokenizer", "extra_special_tokens": ["<x>", WITH_PROPERTIES]}, {}),
    "olmo2": (unigram, "olmo2", {"tokenizer_class": "GPTNeoXTokenizer", "eos_token": "</s>"}, {}),
    "word level": (words, "llama", {"tokenizer_class": "TokenizersBackend", "unk_token": "[UNK]", "sep_token": "<new>"}, {}),
    "properties in the settings": (unigram, "llama", {"added_tokens_decoder": ADDED, "eos_token": WITH_PROPERTIES}, {}),
    "properties, rebuilt": (
        lambda: few_added("<unk>", "<s>", "</s>"),
        "llama",
        {
            "tokenizer_class": "LlamaTokenizer",
            "added_tokens_decoder": {"0": ADDED["0"], "1": ADDED["1"], "900": {"content": "ü"}},
        },
        {},
    ),
    "names of one token": (
        letters,
        "llama",
        {"eos_token": "a", "unk_token": {**WITH_PROPERTIES, "content": "a"}, "boi_token": "a"}
        | {"extra_special_tokens": {"image_token": "<b>"}, "additional_special_tokens": ["<c>"]},
        {},
    ),
    "specific names": (letters, "llama", {"model_specific_special_tokens": {"q_token": "<q>"}}, {}),
    "templates": (
        letters,
        "llama",
        {"chat_template": "ignored"},
        {"chat_template__jinja": "one\r\n", "additional_chat_templates/tool_use__jinja": "two"},
    ),
    "one template": (letters, "llama", {"chat_template": "ignored"}, {"chat_template__jinja": "one\n"}),
    "listed templates": (letters, "llama", {"chat_template": [{"name": "default", "template": "x"}]}, {}),
}


@pytest.mark.parametrize("name", CHECKPOINTS)
def test_a_tokenizer_does_what_transformers_does(name: str, tmp_path: Path) -> None:
    core, kind, settings, files = CHECKPOINTS[name]
    expect_same(write(tmp_path, core(), kind, settings, **files))


@pytest.mark.parametrize("name", CHECKPOINTS)
def test_so_does_one_that_transformers_has_saved(name: str, tmp_path: Path) -> None:
    core, kind, settings, files = CHECKPOINTS[name]
    theirs = AutoTokenizer.from_pretrained(write(tmp_path, core(), kind, settings, **files))
    saved = tmp_path / "saved"
    theirs.save_pretrained(saved)
    (saved / "config.json").write_text(json.dumps({"model_type": kind}))
    expect_same(saved)


def test_the_bundled_models_tokenizer_is_that_of_transformers() -> None:
    expect_same(Path(NANO))


def truncating() -> Tokenizer:
    core = letters()
    core.enable_truncation(8)
    return core


def padding() -> Tokenizer:
    core = letters()
    core.enable_padding()
    return core


def suffixed() -> Tokenizer:
    return Tokenizer(models.BPE({"<unk>": 0, "a</w>": 1}, [], end_of_word_suffix="</w>"))


TRANSFORMERS_ONLY: dict[str, tuple[Any, str, Settings, dict[str, Any]]] = {
    **{
        f"setting {name!r}": (letters, "llama", {name: value}, {})
        for name, value in {
            **{
                "auto_map": {"AutoTokenizer": ["a.B", None]},
                "fast_tokenizer_files": ["tokenizer.4.0.json"],
                "init_inputs": [1],
            },
            **{"fix_mistral_regex": True, "split_special_tokens": True},
        }.items()
    },
    "cleans texts up": (words, "llama", {"clean_up_tokenization_spaces": True}, {}),
    "pads or truncates": (truncating, "llama", {}, {}),
    "truncates texts": (padding, "llama", {}, {}),
    "tokenizer class 'CodeLlamaTokenizer'": (pieces, "llama", {"tokenizer_class": "CodeLlamaTokenizer"}, {}),
    "type 'gpt2'": (letters, "gpt2", {}, {}),
    "type None": (letters, "llama", {}, {"config__json": {}}),
    "another kind than its class": (unigram, "gemma", {}, {}),
    "another kind": (suffixed, "llama", {"tokenizer_class": "GPT2Tokenizer"}, {}),
    "tekken": (letters, "mistral", {}, {"tekken__json": {}}),
    "older form": (letters, "llama", {}, {"added_tokens__json": {}}),
    "older": (letters, "llama", {}, {"special_tokens_map__json": {"additional_special_tokens": ["<x>"]}}),
    "no texts": (letters, "llama", {"extra_special_tokens": [{"content": "<x>"}]}, {}),
    "special tokens that are no texts": (letters, "llama", {"bos_token": {"content": "<s>"}}, {}),
    "other added tokens": (lambda: few_added("<s>", "<x>"), "llama", {**LLAMA, "added_tokens_decoder": ADDED}, {}),
    "added tokens than its": (
        lambda: few_added("<s>", "<x>", "<y>"),
        "llama",
        {
            **LLAMA,
            "added_tokens_decoder": {**ADDED, "6": {**ADDED["2"], "content": "<y>"}, "7": {**ADDED["2"], "content": "<x>"}},
        },
        {},
    ),
    "other added tokens than": (
        lambda: few_added("<s>"),
        "llama",
        {**LLAMA, "added_tokens_decoder": {**ADDED, "1": {**ADDED["1"], "special": False}}, "bos_token": None},
        {},
    ),
    "cannot be read": (letters, "llama", {}, {"tokenizer_config__json": "{"}),
    "is no JSON object": (letters, "llama", {}, {"tokenizer_config__json": "[]"}),
    "a tokenizer that cannot": (letters, "llama", {}, {"tokenizer__json": "{}"}),
}


@pytest.mark.parametrize("reason", TRANSFORMERS_ONLY)
def test_what_is_not_known_here_is_left_to_transformers(reason: str, tmp_path: Path) -> None:
    core, kind, settings, files = TRANSFORMERS_ONLY[reason]
    with pytest.raises(UnmappableError, match=reason):
        read_tokenizer(write(tmp_path, core(), kind, settings, **files))


@pytest.mark.parametrize("kind", CLASS_OF_TYPE)
def test_the_class_is_the_one_that_transformers_chooses(kind: str, tmp_path: Path) -> None:
    assert CLASS_OF_TYPE.keys() == DEFAULTS.keys()
    assert (CLASS_OF_TYPE[kind] or AS_WRITTEN) == (TOKENIZER_MAPPING_NAMES.get(kind) or AS_WRITTEN)
    for core in (letters(), pieces()):
        for declared in (None, "PreTrainedTokenizerFast", *CLASSES, "Qwen2TokenizerFast", "GemmaTokenizerFast"):
            write(tmp_path, core, kind, settings := {} if declared is None else {"tokenizer_class": declared})
            chosen = tokenizer_class({"model_type": kind}, settings, (tmp_path / "tokenizer.json").read_bytes())
            theirs = type(AutoTokenizer.from_pretrained(tmp_path)).__name__
            assert CLASSES[theirs] is chosen, declared


CHAT = [
    {"role": "system", "content": "Be brief.\n"},
    {"role": "user", "content": "<b> é 'x' & \"y\"", "name": None},
    {
        "role": "assistant",
        "content": "",
        "thinking": "hm",
        "tool_calls": [{"function": {"name": "f", "arguments": {"é": [1.5]}}}],
    },
]
TOOLS = [{"type": "function", "function": {"name": "f", "description": "ü", "parameters": {"type": "object"}}}]
TEMPLATES = [
    "{%- for m in messages %}\n  {% if m.role == 'user' %}\n{{ bos_token }}{{ m['content'] | trim }}{% endif %}\n{% endfor %}",
    "{% for m in messages %}{{ m.reasoning_content }}|{{ m.thinking }}|{{m.name is defined}}{{m|tojson(indent=1)}}{% endfor %}",
    "{{ tools | tojson }}{{ documents }}{{ add_generation_prompt }}{{ pad_token }}{{ unknown }}{{ eos_token }}",
    "{% for m in messages %}{% if loop.first %}{% continue %}{% endif %}{{ loop.index }}{% break %}{% endfor %}",
    "{% set ns = namespace(x=1) %}{% generation %}{% set ns.x = 2 %}{% set y = 3 %}{{ y }}{% endgeneration %}{{ ns.x }}{{y}}",
    "{{ strftime_now('%Y') }}{{ dict(a=1) | tojson }}{{ dict.fromkeys([1, 2]) }}{{ namespace(self=1).self }}",
    *(
        "{{ raise_exception('no ' + messages[0].role) }}",
        "{{ messages[9].content }}",
        "{% for %}",
        "{{ tools | tojson(indent=x) }}",
    ),
    *("{{ ''.__class__ }}", "{{ ''.__class__.__mro__ }}", "{{ messages.append(1) }}", "{% set ns = namespace(_a=1) %}"),
    *("{% set ns = namespace() %}{% set ns._a = 1 %}", "{{ dict.get({}, 1) }}", "{{ raise_exception.__globals__ }}"),
    *(
        "{{ messages[2].tool_calls[0].function.arguments | tojson }}",
        "{{ 'a' | tojson(ensure_ascii=true) }}",
        "{{ [] | first }}",
    ),
    [{"name": "default", "template": "default"}, {"name": "tool_use", "template": "{{ tools | length }}"}],
    [{"name": "rag", "template": "x"}],
]


@pytest.mark.parametrize("template", TEMPLATES, ids=str)
def test_chats_are_written_as_transformers_writes_them(template: Any, tmp_path: Path) -> None:
    settings = {"bos_token": "<s>", "eos_token": "</s>", "chat_template": template}
    folder = write(tmp_path, letters(), "llama", settings)
    both = read_tokenizer(folder), AutoTokenizer.from_pretrained(folder)
    for messages in (CHAT, CHAT[1:], [{"role": "user", "content": "x", "reasoning": "r"}]):
        for tools in ([], TOOLS):
            ours, theirs = (outcome(tokenizer, messages, tools) for tokenizer in both)
            assert ours == theirs


def outcome(tokenizer: Any, messages: Any, tools: Any) -> Any:
    try:
        return chat_text(messages, tokenizer, tools)
    except ValueError as error:
        cause = error.__cause__
        says_the_same = type(cause).__name__ in ("TemplateError", "TemplateSyntaxError")
        return type(cause), str(cause) if says_the_same else None


def test_neither_torch_nor_transformers_is_imported() -> None:
    lines = [
        "import sys; from pathlib import Path; from skipstone.models.tokenizer import read_tokenizer",
        f"made = read_tokenizer(Path({str(NANO)!r})); made.decode(made('x')['input_ids'])",
        "assert sys.modules.keys().isdisjoint({'torch', 'transformers', 'jinja2', 'numpy'})",
    ]
    subprocess.run([sys.executable, "-c", "\n".join(lines)], check=True)
