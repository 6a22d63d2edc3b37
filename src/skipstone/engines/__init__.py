"""How a decoder is computed: `ModelRunner`, `KVCache`, `PartialForward`, and the eager, compiled and native engines."""
