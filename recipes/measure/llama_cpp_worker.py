"""llama.cpp as a process that `engines.py` talks to. It runs in any Python that has llama-cpp-python (`pip install
llama-cpp-python` builds it for the machine at hand) and needs nothing of skipstone.

    python recipes/measure/llama_cpp_worker.py MODEL.gguf THREADS

Reads lines {"ids": [...], "new": n} and answers each with {"ids": [...], "seconds": s}: n greedy tokens, end of sequence or
not, and the time from the call to the last of them, prefill included. A file with F32 in its name gets a float32 cache and no
flash attention, which is what torch computes in float32; all others get llama.cpp's defaults.
"""

import ctypes
import json
import sys
import time
from importlib import import_module
from typing import Any

cpp: Any = import_module("llama_cpp")

CONTEXT = 2048  # tokens of prompt and text together
SETTLES = 0.05  # seconds in which its threads stop waiting for work in a loop, before anybody else's turn
FLOAT32, DISABLED = 0, 0  # ggml's type of a float32 cache; no flash attention


def main() -> None:
    path, threads = sys.argv[1], int(sys.argv[2])
    quiet = cpp.llama_log_callback(lambda level, text, user: None)
    cpp.llama_log_set(quiet, ctypes.c_void_p(0))
    cpp.llama_backend_init()
    model = cpp.llama_model_load_from_file(path.encode(), cpp.llama_model_default_params())
    if not model:
        sys.exit(f"llama.cpp cannot load {path}")
    settings = cpp.llama_context_default_params()
    settings.n_ctx = settings.n_batch = CONTEXT
    settings.n_threads = settings.n_threads_batch = threads
    settings.no_perf = True
    if "F32" in path:
        settings.type_k = settings.type_v = FLOAT32
        settings.flash_attn_type = DISABLED
    context = cpp.llama_init_from_model(model, settings)
    memory, greedy = cpp.llama_get_memory(context), cpp.llama_sampler_init_greedy()

    def fed(ids: list[int]) -> int:
        tokens = (cpp.llama_token * len(ids))(*ids)
        if cpp.llama_decode(context, cpp.llama_batch_get_one(tokens, len(ids))):
            raise RuntimeError("llama_decode failed")
        return int(cpp.llama_sampler_sample(greedy, context, -1))

    for line in sys.stdin:
        asked = json.loads(line)
        cpp.llama_memory_clear(memory, True)
        began = time.perf_counter()
        new = [fed(asked["ids"])]
        while len(new) < asked["new"]:
            new.append(fed(new[-1:]))
        seconds = time.perf_counter() - began
        time.sleep(SETTLES)
        print(json.dumps({"ids": new, "seconds": seconds}), flush=True)


if __name__ == "__main__":
    main()
