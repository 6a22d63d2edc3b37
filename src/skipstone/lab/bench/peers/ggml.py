"""llama.cpp as a method of the benchmark, on a GGUF file of the model's weights.

It runs in a process of its own, in any Python that has llama-cpp-python, so the libraries do not share threads. This file is
not called llama_cpp, because its worker would import it instead of the library.
"""

import json
import subprocess
import sys
import tempfile
import time
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import Tensor
from transformers import PreTrainedModel

from skipstone.lab.timing.measure import GeneratedOutput, GenerationBackend

WORKER = Path(__file__).with_name("ggml_worker.py")
SETTLES = 0.05  # seconds, not counted, until its threads stop spinning, before another method runs
MAX_DRAFTS = 511  # a scoring pass has at most 512 rows
FULL = {0: "F32", 1: "F16", 32: "BF16"}  # llama_ftype of files whose weights are not quantised


class LlamaCppProcess:
    """A process of ggml_worker.py. ValueError if it cannot load or do something.

    command: the arguments of ggml_worker.py. known: its first line, parsed.
    """

    def __init__(self, python: str, *command: str) -> None:
        self._errors = tempfile.TemporaryFile("w+")  # noqa: SIM115 - open as long as the process may write to it
        pipes: Any = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": self._errors}
        try:
            self._process = subprocess.Popen([python, str(WORKER), *command], text=True, **pipes)
        except OSError as error:
            raise ValueError(f"llama-cpp: python={python}: {error.strerror}") from error
        self.known = self._answer()

    @property
    def alive(self) -> bool:
        return self._process.poll() is None

    def __call__(self, **question: Any) -> dict[str, Any]:
        """The answer to one request (ggml_worker.py)."""
        assert self._process.stdin is not None
        with suppress(OSError):  # if the process has ended, its last output is the error
            print(json.dumps(question), file=self._process.stdin, flush=True)
        return self._answer()

    def _answer(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        if line := self._process.stdout.readline():
            answer: dict[str, Any] = json.loads(line)
            if "error" in answer:
                raise ValueError(f"llama-cpp: {answer['error']}")
            return answer
        code = self._process.wait()
        self._errors.seek(0)
        said = self._errors.read().strip().rpartition("\n")[2]
        raise ValueError(f"llama-cpp: {said or f'its process has ended with code {code}'}")


_WORKERS: dict[tuple[str, ...], LlamaCppProcess] = {}
"""Command -> its running process."""


def worker(*command: str) -> LlamaCppProcess:
    """The process of a command, started if it is not running."""
    if command not in _WORKERS or not _WORKERS[command].alive:
        _WORKERS[command] = LlamaCppProcess(*command)
    return _WORKERS[command]


@dataclass(frozen=True)
class LlamaCpp(GenerationBackend):
    """llama.cpp, greedily, on the CPU.

    file: the GGUF file. python: the Python that has llama-cpp-python, by default this one. drafts: None for plain decoding,
    "prompt-lookup" for llama-cpp-python's own, or the GGUF file of a draft model. num_draft_tokens: draft tokens per step.
    confidence_threshold: drafting with a model stops before a token whose probability is below it. llama.cpp's own defaults of
    both have changed from release to release; these are those of 2025.
    """

    name: ClassVar[str] = "llama-cpp"
    sampled: ClassVar[bool] = False  # its random numbers are its own, and its sampler's order of warpers is another one
    elsewhere: ClassVar[bool] = True

    file: str
    python: str = sys.executable
    drafts: str | None = None
    num_draft_tokens: int = 16
    confidence_threshold: float = 0.75

    @property
    def settings(self) -> dict[str, Any]:
        """The settings with llama-cpp-python's version."""
        return asdict(self) | {"version": self._worker().known["version"]}

    @property
    def lossless(self) -> bool:
        """Files of quantised weights are other models."""
        return self._worker().known["type"] in FULL

    def refusal(self, model: PreTrainedModel) -> str | None:
        return None if model.device.type == "cpu" else "llama.cpp is run on the CPU, and the model is not there"

    def check(self, model: PreTrainedModel) -> None:
        for name in ("file", "python", "drafts"):
            value = getattr(self, name)
            if not isinstance(value, str) and (name != "drafts" or value is not None):
                raise ValueError(f"llama-cpp: {name} must be a path, found {value!r}")
        super().check(model)
        if self.num_draft_tokens > MAX_DRAFTS:
            raise ValueError(f"llama-cpp: num_draft_tokens must be at most {MAX_DRAFTS}, found {self.num_draft_tokens}")
        head: Any = model.get_output_embeddings()
        if (found := self._worker().known["vocabulary"]) != head.weight.shape[0]:
            raise ValueError(f"llama-cpp: {self.file} has {found} tokens, the model {head.weight.shape[0]}")

    def generate(self, model: PreTrainedModel, prompt: Tensor, options: dict[str, Any], seed: int) -> GeneratedOutput:
        """As `GenerationBackend.generate`. The time includes the pipe to the process."""
        eos: Any = model.generation_config.eos_token_id
        stop = [] if eos is None else [int(one) for one in torch.as_tensor(eos, dtype=torch.int64, device="cpu").flatten()]
        asked = {"ids": prompt[0].tolist(), "new": options["max_new_tokens"], "stop": stop}
        began = time.perf_counter()
        answer = self._worker()(**asked, drafts=self.num_draft_tokens, threshold=self.confidence_threshold)
        ended = time.perf_counter()
        time.sleep(SETTLES)
        return GeneratedOutput(answer["ids"], first_at=began + answer["first_seconds"], ended_at=ended)

    def _worker(self) -> LlamaCppProcess:
        return worker(self.python, self.file, str(torch.get_num_threads()), *([self.drafts] if self.drafts else []))
