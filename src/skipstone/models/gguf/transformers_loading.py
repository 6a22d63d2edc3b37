"""Models in GGUF files, as transformers unpacks them."""

import errno
import struct
from pathlib import Path
from typing import Any

from skipstone.utils.extras import installed

SUFFIX = ".gguf"
MAGIC = b"GGUF"
"""The first bytes of every GGUF file."""
TOO_SHORT = ("cannot reshape", "buffer", "must be a divisor")
"""Parts of NumPy's messages about an array with too few bytes."""


FAILURES = (OSError, ValueError, LookupError, NotImplementedError, struct.error)
"""Errors of transformers about a GGUF file."""


def expect_gguf(path: Path) -> None:
    """OSError for a file that is no GGUF file."""
    if path.suffix != SUFFIX:
        raise NotADirectoryError(errno.ENOTDIR, f"a model is a folder, this is a file that does not end in {SUFFIX}", str(path))
    with path.open("rb") as file:
        start = file.read(len(MAGIC))
    if start != MAGIC:
        raise OSError(errno.EINVAL, f"not a GGUF file, it begins with {start!r}, expected {MAGIC!r}", str(path))


def options(path: Path) -> dict[str, Any]:
    """Options of `from_pretrained` for a GGUF file. OSError for another file, ImportError without the packages that read it."""
    expect_gguf(path)
    for package in ("gguf", "accelerate"):
        installed(package, f"GGUF files need {package}", "quantised")
    return {"gguf_file": path.name}


def unpacked() -> dict[str, Any]:
    """Options that make transformers unpack all weights, even if kernels are installed. Older versions always do."""
    import transformers  # the command line checks names of files before it imports torch

    config: Any = getattr(transformers, "GgufConfig", None)
    return {} if config is None else {"quantization_config": config(dequantize=True)}


def explained(path: Path, error: Exception) -> ValueError:
    """One sentence with the cause and the remedy, for one of FAILURES."""
    message = str(error)
    if isinstance(error, (OSError, struct.error, UnicodeError)) or any(words in message for words in TOO_SHORT):
        size = path.stat().st_size
        return ValueError(f"the GGUF file {path} is cut off or damaged, it has {size} bytes: fetch it again ({message})")
    remedy = "fetch it again, or load the model's safetensors"
    return ValueError(f"the GGUF file {path} cannot be loaded by transformers: {remedy} ({message})")
