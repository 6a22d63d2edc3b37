"""llama.cpp as a process that ggml.py talks to. It runs in any Python that has llama-cpp-python (`pip install
llama-cpp-python` builds it for the machine at hand) and needs nothing of skipstone.

    python ggml_worker.py MODEL.gguf THREADS [prompt-lookup | DRAFT.gguf]

Its first line says {"vocabulary": V}. Then it reads lines {"ids": [...], "new": n, "stop": [...], "drafts": k, "threshold": p}
and answers each with {"ids": [...], "first_seconds": s}: at most n greedy tokens, to the first of the stop ids, and the time
from the question to the first token. drafts: most draft tokens a step. threshold: a draft model stops before a token of a
lower probability. A file with F32 in its name gets a float32 cache and no flash attention, which is what torch computes in
float32; all others get llama.cpp's defaults.
"""

import ctypes
import json
import sys
import time
from collections.abc import Sequence
from importlib import import_module
from typing import Any

cpp: Any = import_module("llama_cpp")
numpy: Any = import_module("numpy")

CONTEXT = 4096  # tokens of prompt and text together
MOST_ROWS = 512  # tokens of one pass
FLOAT32, DISABLED = 0, 0  # ggml's type of a float32 cache; no flash attention


class Context:
    """A model's text so far and the passes over it. text: the ids whose keys and values it holds."""

    def __init__(self, path: str, threads: int) -> None:
        self._model = cpp.llama_model_load_from_file(path.encode(), cpp.llama_model_default_params())
        if not self._model:
            sys.exit(f"llama.cpp cannot load {path}")
        settings = cpp.llama_context_default_params()
        settings.n_ctx, settings.n_batch = CONTEXT, MOST_ROWS
        settings.n_threads = settings.n_threads_batch = threads
        settings.no_perf = True
        if "F32" in path:
            settings.type_k = settings.type_v = FLOAT32
            settings.flash_attn_type = DISABLED
        self._context = cpp.llama_init_from_model(self._model, settings)
        self._memory, self._greedy = cpp.llama_get_memory(self._context), cpp.llama_sampler_init_greedy()
        self._batch = cpp.llama_batch_init(MOST_ROWS, 0, 1)
        self.vocabulary: int = cpp.llama_vocab_n_tokens(cpp.llama_model_get_vocab(self._model))
        self.text: list[int] = []

    def cut(self, length: int) -> None:
        """Forget all but the first tokens of the text."""
        if length < len(self.text):
            cpp.llama_memory_seq_rm(self._memory, 0, length, -1)
            del self.text[length:]

    def choices(self, ids: Sequence[int], last: int) -> list[int]:
        """Add ids to the text; the likeliest token behind each of the last ones."""
        batch = self._batch
        while ids:
            some, ids = ids[:MOST_ROWS], ids[MOST_ROWS:]
            for row, token in enumerate(some):
                batch.token[row], batch.pos[row] = token, len(self.text) + row
                batch.n_seq_id[row], batch.seq_id[row][0] = 1, 0
                batch.logits[row] = not ids and row >= len(some) - last
            batch.n_tokens = len(some)
            if cpp.llama_decode(self._context, batch):
                raise RuntimeError("llama_decode failed")
            self.text += some
        return [int(cpp.llama_sampler_sample(self._greedy, self._context, row - last)) for row in range(last)]

    def probability(self, token: int) -> float:
        """Of a token behind the whole text, from the logits of the latest pass."""
        logits = numpy.ctypeslib.as_array(cpp.llama_get_logits_ith(self._context, -1), (self.vocabulary,))
        return float(1.0 / numpy.exp(logits - logits[token]).sum())


class PromptLookup:
    """llama-cpp-python's own drafts without a model."""

    def __call__(self, text: list[int], count: int, threshold: float) -> list[int]:
        """Drafts behind a text; no threshold is asked for."""
        drafter = import_module("llama_cpp.llama_speculative").LlamaPromptLookupDecoding(num_pred_tokens=count)
        return [int(token) for token in drafter(numpy.array(text, dtype=numpy.intc))]


class DraftModel:
    """Drafts of a smaller model, as llama-speculative-simple makes them."""

    def __init__(self, path: str, threads: int) -> None:
        self._context = Context(path, threads)

    def __call__(self, text: list[int], count: int, threshold: float) -> list[int]:
        """Drafts behind a text."""
        held = self._context.text
        same = next((n for n, (a, b) in enumerate(zip(held, text, strict=False)) if a != b), min(len(held), len(text)))
        self._context.cut(min(same, len(text) - 1))
        new, drafts = text[len(self._context.text) :], list[int]()
        while len(drafts) < count:
            (token,) = self._context.choices(new, 1)
            if self._context.probability(token) < threshold:
                break
            drafts.append(token)
            new = [token]
        return drafts


def written(target: Context, drafter: Any, asked: dict[str, Any]) -> dict[str, Any]:
    """The answer to one question."""
    began = time.perf_counter()
    target.cut(0)
    new = target.choices(asked["ids"], 1)
    first = time.perf_counter() - began
    while len(new) < asked["new"] and new[-1] not in asked["stop"]:
        room = min(asked["drafts"], asked["new"] - len(new) - 1)
        drafts = drafter([*asked["ids"], *new], room, asked["threshold"]) if drafter and room else []
        before = len(target.text)
        found = target.choices([new[-1], *drafts], 1 + len(drafts))
        right = next((n for n, (a, b) in enumerate(zip(drafts, found, strict=False)) if a != b), len(drafts))
        target.cut(before + 1 + right)
        for token in found[: right + 1]:
            new.append(token)
            if token in asked["stop"]:
                break
    return {"ids": new, "first_seconds": first}


def main() -> None:
    path, threads, *drafts = sys.argv[1:]
    quiet = cpp.llama_log_callback(lambda level, text, user: None)
    cpp.llama_log_set(quiet, ctypes.c_void_p(0))
    cpp.llama_backend_init()
    target = Context(path, int(threads))
    drafter: Any = None
    if drafts:
        drafter = PromptLookup() if drafts[0] == "prompt-lookup" else DraftModel(drafts[0], int(threads))
    print(json.dumps({"vocabulary": target.vocabulary}), flush=True)
    for line in sys.stdin:
        print(json.dumps(written(target, drafter, json.loads(line))), flush=True)


if __name__ == "__main__":
    main()
