"""Structured output: only tokens that a JSON schema allows, in drafts as well.

llguidance follows the text. A draft must not change the text, but llguidance's limits count all that a matcher has looked at.
So each text has two matchers: one sees only committed tokens and decides where the text ends, the other follows drafts.
"""

import json
import re
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from copy import copy
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any
from weakref import WeakSet

import numpy as np
import torch
from torch import Tensor

from skipstone.decoding.token_bytes import decoder_kinds, token_bytes
from skipstone.models.gguf.sentence_piece import SPACE, SentencePieceBackend
from skipstone.serving.prefix_cache import common_length
from skipstone.serving.schema_satisfiability import has_finite_value
from skipstone.utils.extras import installed
from skipstone.utils.limits import GRAMMAR_BYTES, MAX_LEXER_STATES, SMALL_GRAMMAR_BYTES

MAX_SCHEMA_CHARACTERS, MAX_SCHEMA_DEPTH = 1 << 16, 32
"""Limits of a schema's length and nesting."""
SPACES = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}
"""How JSON is written. A model that may write spaces anywhere may write nothing else."""
ANY_OBJECT = {"type": "object"}
"""The schema of response_format {"type": "json_object"}."""
MAX_COMPILE_SECONDS, MAX_COMPILE_BYTES = 2, 2 << 30
"""Processor time and memory that one schema may take to compile. A few thousand characters can take days and all memory, and
nothing in this process could stop them. So another process compiles every schema first."""
COMPILE_TIMEOUT_SECONDS = 30.0
"""Limit of wall-clock time for that process, on a busy machine."""
MEASURE_SCRIPT = Path(__file__).with_name("measure_grammar.py")
MEASUREMENTS_CACHED = 256
"""Number of schemas with a remembered result."""
MAX_RECOMPILE_SECONDS = 5.0
"""Seconds of a processor that one text may spend on new matchers for drafts, after llguidance has run into its limits."""
PATTERN_SYNTAX = "write patterns in the syntax of Rust's regex crate, without look-around and back-references"
SOURCE_LINE = re.compile(r"\d+ \| ")
"""How llguidance quotes a line of the grammar. No client wrote that line."""
COMPILED_PER_TEXT = 2
"""Compiled grammars per text: one for committed tokens, one for drafts."""
COMPLETE, DEAD_END = "complete", "dead end"
"""Why a grammar ends a text: its document is complete, or no token leads to a document."""
NO_EXTENSION = "NoExtension"
"""The beginning of llguidance's error if no token leads on. Any other error is a limit."""


class GrammarMemoryError(Exception):
    """The grammars of other requests take too much memory."""


@dataclass(eq=False)
class GrammarMemory:
    """Memory of the grammars of one request. It counts while one of them lives."""

    nbytes: int


class GrammarCompiler:
    """Compiles grammars for one tokenizer. vocabulary: number of the model's token ids. ends: ids of end-of-text tokens, may be
    empty."""

    def __init__(self, tokenizer: Any, vocabulary: int, ends: Sequence[int]) -> None:
        self._llguidance = installed("llguidance", "structured output needs llguidance", "serve")
        self._limits = self._llguidance.LLParserLimits(max_lexer_states=MAX_LEXER_STATES)
        self._taken: WeakSet[GrammarMemory] = WeakSet()
        self._lock = threading.Lock()
        self.ends = tuple(ends)
        eos = list(ends) if ends else None
        backend = copy(getattr(tokenizer, "backend_tokenizer", None))
        if backend is None:
            raise ValueError("structured output needs a tokenizer with a tokenizer.json; this model's is written in Python")
        if isinstance(backend, SentencePieceBackend):
            written = self._llguidance.TokenizerWrapper(_token_bytes(tokenizer))
        else:
            backend.no_padding()
            backend.no_truncation()
            written = backend.to_str()
        self._tokenizer = self._llguidance.LLTokenizer(written, vocabulary, eos)
        self.no_end: int | None = None if ends else self._tokenizer.eos_token  # what llguidance takes for an end

    def compile_schema(self, schema: dict[str, Any], prompt: int = 0, choices: int = 1) -> "Grammar":
        """The grammar of texts that fulfil a JSON schema. prompt: number of tokens before a text. choices: number of its texts.

        ValueError if the schema is wrong, too large or impossible. TimeoutError if the machine is too busy,
        GrammarMemoryError if the grammars of others take too much memory.
        """
        field = "response_format"
        check_schema(schema, field)
        compiled = self._llguidance.LLMatcher.grammar_from_json_schema(json.dumps(schema), overrides=SPACES)
        return self._compile(compiled, field, prompt, choices, is_known=schema == ANY_OBJECT)

    def compile_calls(self, parameters: Sequence[tuple[str, dict[str, Any]]], choices: int = 1) -> "Grammar":
        """The grammar of one tool call. parameters: (name, JSON schema of the arguments) of every tool.

        Every schema stays a document of its own, so that its references keep their meaning.
        """
        field, rules = "tools", [f"start: {' | '.join(f'call_{place}' for place in range(len(parameters)))}"]
        for place, (name, schema) in enumerate(parameters):
            check_schema(schema, field)
            opening = json.dumps(f'{{"name": {json.dumps(name)}, "arguments": ')
            rules.append(f'call_{place}: {opening} %json {json.dumps({**schema, "x-guidance": SPACES})} "}}"')
        if (length := sum(map(len, rules))) > MAX_SCHEMA_CHARACTERS:
            raise ValueError(f"{field}: all schemas together have at most {MAX_SCHEMA_CHARACTERS} characters, found {length}")
        compiled = self._llguidance.LLMatcher.grammar_from_lark("\n".join(rules))
        return self._compile(compiled, field, 0, choices)

    def _compile(self, compiled: str, field: str, prompt: int, choices: int, *, is_known: bool = False) -> "Grammar":
        """The processor of a grammar, if it compiles and allows a text. field: of the request, for messages. is_known: whether
        it compiles quickly."""
        try:
            nbytes = SMALL_GRAMMAR_BYTES if is_known else max(measure_grammar(compiled), SMALL_GRAMMAR_BYTES)
        except (ValueError, TimeoutError) as error:
            raise type(error)(f"{field}: {error}") from None
        memory = self._memory(field, nbytes, choices)
        began = time.thread_time()
        matcher = self.new_matcher(compiled)
        seconds = time.thread_time() - began
        if matcher.is_error():
            raise ValueError(f"{field}: {_error_text(matcher.get_error())}")
        if choices > 1 and choices * seconds > MAX_COMPILE_SECONDS:
            raise ValueError(f"{field}: the schema takes {seconds:.1f} s to compile for each of {choices} texts; ask for fewer")
        grammar = Grammar(self, compiled, matcher, prompt, memory)
        if grammar.end_of([]):
            raise ValueError(f"{field}: no text fulfils the schema; check that its parts do not contradict each other")
        return grammar

    def _memory(self, field: str, nbytes: int, choices: int) -> GrammarMemory:
        """Reserve memory for the grammars of a request. nbytes: of one compiled grammar."""
        needed = nbytes * (COMPILED_PER_TEXT * choices + 1)
        if needed > GRAMMAR_BYTES:
            said = f"{field}: the compiled schema takes {nbytes} bytes, {needed} for {choices} texts"
            raise ValueError(f"{said}, and {GRAMMAR_BYTES} are allowed; ask for fewer texts, or shorten the schema")
        with self._lock:
            if (taken := sum(one.nbytes for one in self._taken)) + needed > GRAMMAR_BYTES:
                said = f"this schema needs {needed} bytes, {taken} of {GRAMMAR_BYTES} are taken by those of other requests"
                raise GrammarMemoryError(f"{said}; ask again later")
            memory = GrammarMemory(needed)
            self._taken.add(memory)
        return memory

    def new_matcher(self, compiled: str) -> Any:
        """A matcher of the empty text."""
        return self._llguidance.LLMatcher(self._tokenizer, compiled, log_level=0, limits=self._limits)


@dataclass(frozen=True)
class _TokenBytes:
    """A tokenizer as llguidance takes it if there is no tokenizer.json. eos_token_id: replaced by the model's own, or never
    allowed."""

    backend: SentencePieceBackend
    tokens: list[bytes]
    special_token_ids: list[int]
    eos_token_id: int
    bos_token_id: None = None

    def __call__(self, text: str) -> list[int]:
        return self.backend.encode(text, add_special_tokens=False).ids


def _token_bytes(tokenizer: Any) -> _TokenBytes:
    backend, kinds = tokenizer.backend_tokenizer, decoder_kinds(tokenizer)
    tokens = [token_bytes(token, kinds) or token.replace(SPACE, " ").encode() for token in backend.get_vocab()]
    special = [number for number, token in backend.get_added_tokens_decoder().items() if token.special]
    return _TokenBytes(backend, tokens, special, backend.unknown_id)


def check_schema(schema: dict[str, Any], field: str) -> None:
    """ValueError for a schema that is too deep, too long or endless. field: of the request."""
    if is_too_deep(schema):
        raise ValueError(f"{field}: a schema is nested at most {MAX_SCHEMA_DEPTH} deep")
    if (length := len(json.dumps(schema))) > MAX_SCHEMA_CHARACTERS:
        raise ValueError(f"{field}: a schema has at most {MAX_SCHEMA_CHARACTERS} characters, found {length}")
    if not has_finite_value(schema):
        reasons = "its parts contradict each other, or every value needs a further one without end"
        raise ValueError(f"{field}: the schema has no finite value: {reasons}; correct it, or make recursive parts optional")


def _error_text(error: str) -> str:
    """llguidance's error in one line, with a remedy if it is about a pattern."""
    lines = [line.strip() for line in error.partition("<state>")[0].splitlines()]
    said = " ".join(line for line in lines if line.strip("^ ") and not SOURCE_LINE.match(line))
    return f"{PATTERN_SYNTAX}: {said}" if re.search("regex parse error|in regex", said) else said


@lru_cache(MEASUREMENTS_CACHED)
def measure_grammar(grammar: str) -> int:
    """Bytes that a grammar takes when compiled, measured in another process. ValueError if it takes too much. TimeoutError if
    the machine is too busy."""
    command = [sys.executable, "-P", str(MEASURE_SCRIPT), str(MAX_COMPILE_SECONDS), str(MAX_COMPILE_BYTES)]
    try:
        done = subprocess.run(command, input=grammar, capture_output=True, encoding="utf-8", timeout=COMPILE_TIMEOUT_SECONDS)
    except subprocess.TimeoutExpired:
        raise TimeoutError("there was no time to compile the schema; ask again later") from None
    if done.returncode < 0:
        said = f"{MAX_COMPILE_SECONDS} s of a processor, or {MAX_COMPILE_BYTES >> 30} GiB of memory"
        raise ValueError(f"the schema takes more than {said} to compile")
    if done.returncode:
        raise RuntimeError(f"a schema could not be tried out: {done.stderr[-2000:]}")
    return int(done.stdout)


def is_too_deep(value: Any, deepest: int = MAX_SCHEMA_DEPTH) -> bool:
    """Whether a JSON value is nested deeper. It goes level by level, because recursion may run out of stack."""
    level = [value]
    for _ in range(deepest):
        inner = [one.values() if isinstance(one, dict) else one for one in level if isinstance(one, dict | list)]
        level = [one for several in inner for one in several]
    return bool(level)


class Grammar:
    """A logits processor and a stopping criterion of one text.

    compiler: makes further matchers of the compiled grammar. matcher: of the empty text. prompt: number of tokens before the
    text. memory: shared with other choices.
    """

    def __init__(self, compiler: GrammarCompiler, compiled: str, matcher: Any, prompt: int, memory: GrammarMemory) -> None:
        self._compiler, self._compiled, self.prompt, self._memory = compiler, compiled, prompt, memory
        self.ends = compiler.ends
        self._committed = _FollowedText(matcher, compiler.no_end)
        self._committed.go_to([])
        self._drafted: _FollowedText | None = None
        self._beyond_limits: list[list[int]] = []  # drafts after which llguidance cannot go on
        self._seconds_left = MAX_RECOMPILE_SECONDS

    def for_new_text(self, prompt: int | None = None) -> "Grammar":
        """A grammar for another text, fully compiled. prompt: number of tokens before it, None for the same."""
        prompt, matcher = self.prompt if prompt is None else prompt, self._compiler.new_matcher(self._compiled)
        other = Grammar(self._compiler, self._compiled, matcher, prompt, self._memory)
        other._recompile()
        return other

    def __call__(self, ids: Tensor, scores: Tensor) -> Tensor:
        """ids: [1, T]. scores: [1, V]. They stay as they are after a draft that the grammar does not allow and at a dead end:
        no token drawn from them is kept."""
        bits = self._allowed_after(ids[0, self.prompt :].tolist())
        if bits is None:
            return scores
        allowed = torch.from_numpy(np.unpackbits(bits, bitorder="little", count=scores.shape[-1]).astype(bool))
        return scores.masked_fill(~allowed.to(scores.device), float("-inf"))

    def has_ended(self, ids: Tensor, scores: Tensor | None = None) -> Tensor:
        """A stopping criterion: whether nothing may follow the committed ids [1, T]. Returns a bool tensor [1]."""
        return torch.tensor([self.end_of(ids[0, self.prompt :].tolist()) is not None], dtype=torch.bool, device="cpu")

    def end_of(self, text: list[int]) -> str | None:
        """Why a committed text ends with these tokens; None if it may go on."""
        self._committed.go_to(text)
        return DEAD_END if self._seconds_left < 0 else self._committed.ended

    def _allowed_after(self, text: list[int]) -> Any:
        """The tokens that may follow a text; None if there are none."""
        if text == self._committed.text:
            return self._committed.bits
        if any(text[: len(one)] == one for one in self._beyond_limits):
            return None
        drafted = self._drafted or self._recompile()
        drafted.go_to(text)
        if drafted.hit_limit and self._seconds_left >= 0:  # earlier drafts may have used it up
            began = time.thread_time()
            drafted = self._recompile()
            drafted.go_to(text)
            if drafted.hit_limit:
                self._beyond_limits.append(text)
                self._recompile()
            self._seconds_left -= time.thread_time() - began
        return drafted.bits

    def _recompile(self) -> "_FollowedText":
        """Follow drafts with a fresh matcher from now on."""
        self._drafted = _FollowedText(self._compiler.new_matcher(self._compiled), self._compiler.no_end)
        return self._drafted


class _FollowedText:
    """A text that a matcher follows.

    start: a matcher of the empty text. no_end: a token that may never follow. bits: mask of the tokens that may follow, None
    for none. ended: why the text ends here, None if it may go on. hit_limit: whether the reason is a limit of llguidance; then
    this matcher is unusable."""

    def __init__(self, start: Any, no_end: int | None) -> None:
        self._start, self._matcher, self._no_end = start, start.deep_copy(), no_end
        self._taken: list[int] = []  # by the matcher
        self.text: list[int] | None = None
        self.bits: Any = None
        self.ended: str | None = None
        self.hit_limit = False

    def go_to(self, text: list[int]) -> None:
        """Follow another text from the common prefix on. Every token is checked on its own, so that the limits count the same
        for the same texts."""
        if self.text == text:
            return
        self.text, known = text, self._taken
        if self._matcher.is_error():  # it stays in error, rollback does not help
            self._matcher, known = self._start.deep_copy(), []
        common = common_length(known, text)
        if common < len(known):
            self._matcher.rollback(len(known) - common)
        self._taken = known[:common]
        if common == len(text):
            self._update_allowed()
        for token in text[common:]:
            if not self._matcher.try_consume_tokens([token]):
                self.bits, self.ended = None, DEAD_END
                return
            self._taken.append(token)
            self._update_allowed()

    def _update_allowed(self) -> None:
        """Ask the matcher what may follow."""
        bits = np.frombuffer(self._matcher.compute_bitmask(), dtype=np.uint8)
        if self._no_end is not None:
            bits = bits.copy()
            bits[self._no_end // 8] &= ~np.uint8(1 << self._no_end % 8)
        self.bits, self.ended = bits if bits.any() else None, None
        if self._matcher.is_error():
            self.bits, self.ended, self.hit_limit = None, DEAD_END, not self._matcher.get_error().startswith(NO_EXTENSION)
        elif self._matcher.is_stopped() or self.bits is None:
            self.ended = COMPLETE if self._matcher.is_accepting() else DEAD_END
