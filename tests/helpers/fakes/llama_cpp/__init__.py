"""The part of llama-cpp-python's low-level interface that the benchmark's worker uses, over a text of numbers. A "model" is a
JSON file {"vocabulary": V, "wrong": n, ...}: behind ..., a, b comes (3 a + b + 1) mod V, and where b is a multiple of n one
more. Passes that leave a gap, take a place twice, are too wide or too long are errors here, as in the real library.
"""

import json
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np


def _nothing(*_: Any) -> None:
    return None


def _same(value: Any) -> Any:
    return value


__version__ = "0.0.0"
llama_log_set = llama_backend_init = llama_sampler_init_greedy = _nothing
llama_log_callback = llama_get_memory = llama_model_get_vocab = _same
llama_model_default_params = SimpleNamespace


def llama_context_default_params() -> SimpleNamespace:
    return SimpleNamespace(type_k=1, type_v=1, flash_attn_type=-1)


def llama_model_load_from_file(path: bytes, _: Any) -> Any:
    usual = {"positions": 4096, "type": 0, "room": True, "sure": 9.0, "ends_at": None}
    file = Path(path.decode())
    return SimpleNamespace(**usual | json.loads(file.read_text())) if file.exists() else None


def llama_model_n_ctx_train(model: Any) -> int:
    return model.positions


def llama_model_meta_val_str(model: Any, name: bytes, said: Any, length: int) -> int:
    assert name == b"general.file_type"
    said.value = str(model.type).encode()
    return len(said.value)


def llama_init_from_model(model: Any, settings: Any) -> Any:
    assert (settings.type_k == 0) == (model.type == 0), "float32 weights have a float32 cache"
    if not model.room:
        return None
    return SimpleNamespace(model=model, settings=settings, text=[], outputs=[])


def llama_vocab_n_tokens(model: Any) -> int:
    return model.vocabulary


def llama_batch_init(rows: int, _: int, most: int) -> Any:
    columns = {name: [None] * rows for name in ("token", "pos", "n_seq_id", "logits")}
    return SimpleNamespace(**columns, seq_id=[[None] * most for _ in range(rows)], n_tokens=0)


def llama_memory_seq_rm(context: Any, sequence: int, first: int, last: int) -> bool:
    assert (sequence, last) == (0, -1)
    assert 0 <= first <= len(context.text)
    del context.text[first:]
    return True


def llama_decode(context: Any, batch: Any) -> int:
    context.outputs = []
    assert 0 < batch.n_tokens <= context.settings.n_batch
    if len(context.text) + batch.n_tokens > context.settings.n_ctx:
        return 1
    if context.model.ends_at is not None and len(context.text) >= context.model.ends_at:
        sys.exit("out of luck")
    for row in range(batch.n_tokens):
        assert batch.pos[row] == len(context.text), "the real one refuses gaps and places that are taken"
        assert (batch.n_seq_id[row], batch.seq_id[row][0]) == (1, 0)
        context.text.append(batch.token[row])
        if batch.logits[row]:
            context.outputs.append(following(context.model, context.text))
    return 0


def following(model: Any, text: list[int]) -> int:
    before, last = ([0, *text])[-2:]
    return (3 * before + last + 1 + (last % model.wrong == 0)) % model.vocabulary


def llama_sampler_sample(_: None, context: Any, row: int) -> int:
    return context.outputs[row]


def llama_get_logits_ith(context: Any, row: int) -> Any:
    logits = np.zeros(context.model.vocabulary, dtype=np.float32)
    logits[context.outputs[row]] = context.model.sure
    return np.ctypeslib.as_ctypes(logits)
