"""llama.cpp as a process that ggml.py talks to. It runs in any Python that has llama-cpp-python (`pip install
llama-cpp-python` builds it for the machine at hand) and needs nothing of skipstone.

    python ggml_worker.py MODEL.gguf THREADS [prompt-lookup | DRAFT.gguf]

Its first line says what it is: {"vocabulary": tokens of the vocabulary, "positions": most tokens of a text, "type": the number
of the file's llama_ftype, "version": llama-cpp-python's}. Then it reads lines {"ids": [...], "new": n, "stop": [...],
"drafts": k, "threshold": p} and answers each with {"ids": [...], "first_seconds": s}: at most n greedy tokens, to the first of
the stop ids, and the time from the question to the first token; or with {"error": "a sentence"}. drafts: most draft tokens a
step. threshold: a draft model stops before a token of a lower probability.

A file of float32 weights gets a float32 cache and no flash attention, which is what torch computes in float32. All others get
llama.cpp's defaults. Nothing is put on a GPU.
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

MAX_POSITIONS = 8192  # tokens of prompt and text together, where the model has as many
MAX_ROWS = 512  # tokens of one pass
CANDIDATES = 10  # most likely tokens over which llama.cpp's drafter normalises probabilities
ALL_FLOAT32 = 0  # llama_ftype of a file of float32 weights
FLOAT32, DISABLED = 0, 0  # ggml's type of a float32 cache; no flash attention


class LlamaContext:
    """A model with its KV cache. text: the ids in the cache. sys.exit if the file cannot be loaded."""

    def __init__(self, path: str, threads: int) -> None:
        wanted = cpp.llama_model_default_params()
        wanted.n_gpu_layers = 0
        self._model = cpp.llama_model_load_from_file(path.encode(), wanted)
        if not self._model:
            sys.exit(f"llama.cpp cannot load {path}")
        self.positions = min(cpp.llama_model_n_ctx_train(self._model), MAX_POSITIONS)
        self.type = self._file_type()
        settings = cpp.llama_context_default_params()
        settings.n_ctx, settings.n_batch = self.positions, MAX_ROWS
        settings.n_threads = settings.n_threads_batch = threads
        settings.no_perf = True
        if self.type == ALL_FLOAT32:
            settings.type_k = settings.type_v = FLOAT32
            settings.flash_attn_type = DISABLED
        self._context = cpp.llama_init_from_model(self._model, settings)
        if not self._context:
            sys.exit(f"llama.cpp has no room for {self.positions} tokens of {path}")
        self._memory, self._greedy = cpp.llama_get_memory(self._context), cpp.llama_sampler_init_greedy()
        self._batch = cpp.llama_batch_init(MAX_ROWS, 0, 1)
        self.vocabulary: int = cpp.llama_vocab_n_tokens(cpp.llama_model_get_vocab(self._model))
        self.text: list[int] = []

    def _file_type(self) -> int:
        """The file's llama_ftype, or -1 if it has none."""
        said = ctypes.create_string_buffer(16)
        length = cpp.llama_model_meta_val_str(self._model, b"general.file_type", said, len(said))
        return int(said.value) if length > 0 else -1

    def cut(self, length: int) -> None:
        """Cut the text to its first tokens. RuntimeError for a model that cannot."""
        if length < len(self.text):
            if not cpp.llama_memory_seq_rm(self._memory, 0, length, -1):
                raise RuntimeError("llama.cpp cannot take back drafts of this model")
            del self.text[length:]

    def add(self, ids: Sequence[int], last: int = 1) -> None:
        """Append ids to the text. last: number of final ids with logits. RuntimeError if a pass fails."""
        batch = self._batch
        while ids:
            some, ids = ids[:MAX_ROWS], ids[MAX_ROWS:]
            for row, token in enumerate(some):
                batch.token[row], batch.pos[row] = token, len(self.text) + row
                batch.n_seq_id[row], batch.seq_id[row][0] = 1, 0
                batch.logits[row] = not ids and row >= len(some) - last
            batch.n_tokens = len(some)
            if cpp.llama_decode(self._context, batch):
                raise RuntimeError("llama_decode failed")
            self.text += some

    def choice(self, row: int = -1) -> int:
        """The most likely token after a row of the latest pass, counted from its end."""
        return int(cpp.llama_sampler_sample(self._greedy, self._context, row))

    def probability(self, token: int) -> float:
        """The probability of a token after the text, among the CANDIDATES most likely ones."""
        logits = numpy.ctypeslib.as_array(cpp.llama_get_logits_ith(self._context, -1), (self.vocabulary,))
        few = numpy.partition(logits, -CANDIDATES)[-CANDIDATES:]
        return float(1.0 / numpy.exp(few - logits[token]).sum())


def look_up(text: list[int], count: int, threshold: float) -> list[int]:
    """At most `count` drafts of llama-cpp-python's own, without a model; the threshold is not used."""
    drafter = import_module("llama_cpp.llama_speculative").LlamaPromptLookupDecoding(num_pred_tokens=count)
    return [int(token) for token in drafter(numpy.array(text, dtype=numpy.intc))]


class LlamaDraftModel:
    """Drafts of a smaller model, as in llama.cpp's speculative decoding: greedy, up to a probability below the threshold."""

    def __init__(self, path: str, threads: int) -> None:
        self.context = LlamaContext(path, threads)

    def __call__(self, text: list[int], count: int, threshold: float) -> list[int]:
        """At most `count` drafts after a text."""
        held = self.context.text
        same = next((n for n, (a, b) in enumerate(zip(held, text, strict=False)) if a != b), min(len(held), len(text)))
        self.context.cut(min(same, len(text) - 1))
        new, drafts = text[len(self.context.text) :], list[int]()
        while len(drafts) < count:
            self.context.add(new)
            token = self.context.choice()
            if threshold > 0 and self.context.probability(token) < threshold:
                break
            drafts.append(token)
            new = [token]
        return drafts


def written(target: LlamaContext, drafter: Any, asked: dict[str, Any]) -> dict[str, Any]:
    """The answer to one request. drafter: None, look_up or a LlamaDraftModel."""
    most = len(asked["ids"]) + asked["new"]
    if most > target.positions:
        return {"error": f"prompt and text have {most} tokens, and there is room for {target.positions}"}
    began = time.perf_counter()
    target.cut(0)
    if isinstance(drafter, LlamaDraftModel):
        drafter.context.cut(0)  # nothing is kept between requests
    target.add(asked["ids"])
    new = [target.choice()]
    first = time.perf_counter() - began
    while len(new) < asked["new"] and new[-1] not in asked["stop"]:
        room = min(asked["drafts"], asked["new"] - len(new) - 1)
        drafts = drafter([*asked["ids"], *new], room, asked["threshold"]) if drafter and room else []
        before, rows = len(target.text), 1 + len(drafts)
        target.add([new[-1], *drafts], rows)
        for row in range(rows):
            new.append(target.choice(row - rows))
            if row == len(drafts) or new[-1] != drafts[row] or new[-1] in asked["stop"]:
                target.cut(before + 1 + row)
                break
    return {"ids": new, "first_seconds": first}


def main() -> None:
    """Answer the requests on standard input until it ends. sys.exit for an impossible command line."""
    path, threads, *drafts = sys.argv[1:]
    quiet = cpp.llama_log_callback(lambda level, text, user: None)
    cpp.llama_log_set(quiet, ctypes.c_void_p(0))
    cpp.llama_backend_init()
    target = LlamaContext(path, int(threads))
    drafter: Any = None
    if drafts:
        drafter = look_up if drafts[0] == "prompt-lookup" else LlamaDraftModel(drafts[0], int(threads))
    if isinstance(drafter, LlamaDraftModel) and drafter.context.vocabulary != target.vocabulary:
        sys.exit(f"{drafts[0]} has {drafter.context.vocabulary} tokens, {path} has {target.vocabulary}")
    known = {"vocabulary": target.vocabulary, "positions": target.positions, "type": target.type}
    print(json.dumps(known | {"version": cpp.__version__}), flush=True)
    for line in sys.stdin:
        print(json.dumps(written(target, drafter, json.loads(line))), flush=True)


if __name__ == "__main__":
    main()
