"""How a server writes. Nothing here imports torch: those who only start replicas need none."""

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Settings:
    """name: that clients call the model by. method: as in `skipstone.generate`. rows: texts that are written at a time.
    capacity: most tokens of a text, its prompt included; None for the model's own limit, MOST_CAPACITY at most. waiting: most
    texts that wait. seconds: that one may take, None for any time. drain: seconds that texts have to end when the server is
    stopped. kv_cache_memory_bytes: what the keys and values of all methods' rows may take together; None for a share of the
    device's memory, and for one text of the default method in any case."""

    name: str = "skipstone-nano"
    method: Any = None
    rows: int = 8
    capacity: int | None = None
    waiting: int = 64
    seconds: float | None = None
    drain: float = 30.0
    kv_cache_memory_bytes: int | None = None
