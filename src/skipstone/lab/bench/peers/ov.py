"""OpenVINO as a method of the benchmark, on an IR of the model (`optimum-cli export openvino`).

This file is not called openvino, because its worker would import it instead of the library.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

from skipstone.lab.bench.peers.worker import WorkerBackend

FULL = "f32", "f16", "bf16"  # element types of weights that are not quantised


@dataclass(frozen=True, kw_only=True)
class OpenVino(WorkerBackend):
    """OpenVINO GenAI, greedily, on the CPU.

    folder: the IR. python: the Python that has openvino-genai, by default this one.
    """

    name: ClassVar[str] = "openvino"
    library: ClassVar[str] = "OpenVINO"
    script: ClassVar[Path] = Path(__file__).with_name("ov_worker.py")

    folder: str

    @property
    def weights(self) -> str:
        return self.folder

    @property
    def lossless(self) -> bool:
        """IRs of quantised weights are other models."""
        return self.worker.known["type"] in FULL
