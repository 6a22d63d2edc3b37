"""Structured output: only tokens that a JSON schema allows, in drafts as well. llguidance follows the text; what it took for a
draft that was not kept is rolled back."""

import json
import subprocess
import sys
from collections.abc import Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from skipstone.extras import installed

LONGEST, DEEPEST = 1 << 16, 32
"""Characters of a schema, and how deep it may be nested."""
SPACES = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}
"""How JSON is set: a model that may put spaces anywhere may do nothing else."""
ANY_OBJECT = {"type": "object"}
"""The schema of response_format {"type": "json_object"}."""
MOST_SECONDS, MOST_BYTES = 2, 2 << 30
"""Of a processor, and of memory, that a schema takes until it is compiled. A few thousand characters can ask for days and for
all memory that there is, and nothing in this process could stop them: so another one compiles every schema first."""
LONGEST_TRIAL = 30.0
"""Seconds that a trial takes on a machine with much else to do."""
TRIAL = Path(__file__).with_name("trial.py")
TRIALS_KEPT = 256
"""Schemas of which it is known that they compile."""


class Grammars:
    """Makes processors for one tokenizer. entries: of the model's vocabulary. ends: token ids that end a text."""

    def __init__(self, tokenizer: Any, entries: int, ends: Sequence[int]) -> None:
        need = "structured output needs llguidance"
        self._matcher = installed("llguidance", need, "serve").LLMatcher
        self.ends = tuple(ends)
        eos = list(ends) if ends else None
        self._tokenizer = installed("llguidance.hf", need, "serve").from_tokenizer(tokenizer, entries, eos)

    def of_schema(self, schema: dict[str, Any], prompt: int = 0) -> "Grammar":
        """A processor for texts behind so many tokens. ValueError for a schema that is none, or too large. TimeoutError where
        the machine has no time to find that out."""
        if too_deep(schema):
            raise ValueError(f"response_format: a schema is nested at most {DEEPEST} deep")
        text = json.dumps(schema)
        if len(text) > LONGEST:
            raise ValueError(f"response_format: a schema has at most {LONGEST} characters, found {len(text)}")
        grammar = self._matcher.grammar_from_json_schema(text, overrides=SPACES)
        if schema != ANY_OBJECT:
            try_out(grammar)
        matcher = self._matcher(self._tokenizer, grammar, log_level=0)
        if matcher.is_error():
            raise ValueError(f"response_format: {str(matcher.get_error()).splitlines()[0]}")
        return Grammar(matcher, prompt, self.ends)


@lru_cache(TRIALS_KEPT)
def try_out(grammar: str) -> None:
    """Compile a grammar of llguidance's in another process, which is ended where that takes too much. ValueError if so.
    TimeoutError where it is not the grammar's fault."""
    command = [sys.executable, "-P", str(TRIAL), str(MOST_SECONDS), str(MOST_BYTES)]
    try:
        done = subprocess.run(command, input=grammar, capture_output=True, encoding="utf-8", timeout=LONGEST_TRIAL)
    except subprocess.TimeoutExpired:
        raise TimeoutError("response_format: there was no time to compile the schema; ask again later") from None
    if done.returncode < 0:
        said = f"{MOST_SECONDS} s of a processor, or {MOST_BYTES >> 30} GiB of memory"
        raise ValueError(f"response_format: the schema takes more than {said} to compile")
    if done.returncode:
        raise RuntimeError(f"a schema could not be tried out: {done.stderr[-2000:]}")


def too_deep(value: Any, deepest: int = DEEPEST) -> bool:
    """Whether a JSON value is nested deeper than that: level by level, as a function that calls itself may run out of
    stack."""
    level = [value]
    for _ in range(deepest):
        inner = [one.values() if isinstance(one, dict) else one for one in level if isinstance(one, dict | list)]
        level = [one for several in inner for one in several]
    return bool(level)


class Grammar:
    """A logits processor of one text. matcher: llguidance's, which has taken `taken`. prompt: tokens before the text. ends: the
    only tokens that are left where the grammar cannot go on."""

    def __init__(self, matcher: Any, prompt: int, ends: tuple[int, ...]) -> None:
        self.matcher, self.prompt, self.ends = matcher, prompt, ends
        self.taken: list[int] = []

    def fresh(self, prompt: int | None = None) -> "Grammar":
        """The same for another text. prompt: tokens before it, None for as many."""
        other = self.matcher.deep_copy()
        other.reset()
        return Grammar(other, self.prompt if prompt is None else prompt, self.ends)

    def __call__(self, ids: Tensor, scores: Tensor) -> Tensor:
        """ids: [1, T]. scores: [1, V]. Behind a draft that the grammar does not allow, which is never kept, all is left as it
        is."""
        if not self._goes_to(ids[0, self.prompt :].tolist()):
            return scores
        allowed = self._allowed(scores.shape[-1])
        return scores.masked_fill(~allowed.to(scores.device), float("-inf"))

    def _goes_to(self, text: list[int]) -> bool:
        """Bring the matcher behind a text. False where the grammar does not allow it."""
        taken = self.taken
        most = min(len(taken), len(text))
        common = next((place for place in range(most) if taken[place] != text[place]), most)
        if common < len(taken):
            self.matcher.rollback(len(taken) - common)
        rest = text[common:]
        count = self.matcher.try_consume_tokens(rest) if rest else 0
        self.taken = [*taken[:common], *rest[:count]]
        return count == len(rest)

    def _allowed(self, entries: int) -> Tensor:
        """[1, V] bool."""
        if self.matcher.is_error():  # it ran into a limit of its own: the text ends here
            allowed = torch.zeros(entries, dtype=torch.bool, device="cpu")
            allowed[list(self.ends)] = True
            return allowed[None]
        bits = np.frombuffer(self.matcher.compute_bitmask(), dtype=np.uint8)
        return torch.from_numpy(np.unpackbits(bits, bitorder="little", count=entries).astype(bool))[None]
