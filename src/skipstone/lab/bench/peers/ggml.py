"""llama.cpp as a method of the benchmark, on a GGUF file of the model's weights.

This file is not called llama_cpp, because its worker would import it instead of the library.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

from transformers import PreTrainedModel

from skipstone.lab.bench.peers.worker import WorkerBackend

MAX_DRAFTS = 511  # a scoring pass has at most 512 rows
FULL = {0: "F32", 1: "F16", 32: "BF16"}  # llama_ftype of files whose weights are not quantised


@dataclass(frozen=True, kw_only=True)
class LlamaCpp(WorkerBackend):
    """llama.cpp, greedily, on the CPU.

    file: the GGUF file. python: the Python that has llama-cpp-python, by default this one. drafts: None for plain decoding,
    "prompt-lookup" for llama-cpp-python's own, or the GGUF file of a draft model. num_draft_tokens: draft tokens per step.
    confidence_threshold: drafting with a model stops before a token whose probability is below it. llama.cpp's own defaults of
    both have changed from release to release; these are those of 2025.
    """

    name: ClassVar[str] = "llama-cpp"
    library: ClassVar[str] = "llama.cpp"
    script: ClassVar[Path] = Path(__file__).with_name("ggml_worker.py")

    file: str
    drafts: str | None = None
    num_draft_tokens: int = 16
    confidence_threshold: float = 0.75

    @property
    def weights(self) -> str:
        return self.file

    @property
    def arguments(self) -> tuple[str, ...]:
        return () if self.drafts is None else (self.drafts,)

    @property
    def request(self) -> dict[str, Any]:
        return {"drafts": self.num_draft_tokens, "threshold": self.confidence_threshold}

    @property
    def lossless(self) -> bool:
        """Files of quantised weights are other models."""
        return self.worker.known["type"] in FULL

    def check(self, model: PreTrainedModel) -> None:
        super().check(model)
        if self.num_draft_tokens > MAX_DRAFTS:
            raise ValueError(f"llama-cpp: num_draft_tokens must be at most {MAX_DRAFTS}, found {self.num_draft_tokens}")
