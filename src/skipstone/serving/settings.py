"""The settings of a server. Nothing here imports torch, which starting replicas does not need."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

Load = Callable[[], tuple[Any, Any]]
"""Returns a model and its tokenizer."""


@dataclass(frozen=True)
class ServerSettings:
    """Settings of a server.

    name: of the model, as clients call it. method: as in `skipstone.generate`. max_num_seqs: rows, so texts that are written at
    the same time. max_model_len: tokens of a text, its prompt included; None for the model's limit, at most
    DEFAULT_MAX_MODEL_LEN. max_waiting: requests that may wait for a row. timeout_seconds: limit for one request, None for no
    limit. drain_seconds: time that texts have to end when the server stops. kv_cache_memory_bytes: limit of the keys and values
    of all methods together; None for a share of the device's memory, or as much as one text of the default method needs."""

    name: str = "skipstone-nano"
    method: Any = None
    max_num_seqs: int = 8
    max_model_len: int | None = None
    max_waiting: int = 64
    timeout_seconds: float | None = None
    drain_seconds: float = 30.0
    kv_cache_memory_bytes: int | None = None
