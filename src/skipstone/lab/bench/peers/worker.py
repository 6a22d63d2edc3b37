"""Peers that decode in a process of their own, in any Python that has their library. So libraries do not share threads."""

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

SETTLES = 0.05  # seconds, not counted, until its threads stop spinning, before another method runs


class WorkerProcess:
    """A process that answers requests line by line. ValueError if it cannot load or do something.

    name: the peer, in messages. command: a script and its arguments. known: its first line, parsed.
    """

    def __init__(self, name: str, python: str, *command: str) -> None:
        self._name = name
        self._errors = tempfile.TemporaryFile("w+")  # noqa: SIM115 - open as long as the process may write to it
        pipes: Any = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": self._errors}
        try:
            self._process = subprocess.Popen([python, *command], text=True, **pipes)
        except OSError as error:
            raise ValueError(f"{name}: python={python}: {error.strerror}") from error
        self.known = self._answer()

    @property
    def alive(self) -> bool:
        return self._process.poll() is None

    def __call__(self, **question: Any) -> dict[str, Any]:
        """The answer to one request, both as the worker's script describes them."""
        assert self._process.stdin is not None
        with suppress(OSError):  # if the process has ended, its last output is the error
            print(json.dumps(question), file=self._process.stdin, flush=True)
        return self._answer()

    def _answer(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        if line := self._process.stdout.readline():
            answer: dict[str, Any] = json.loads(line)
            if "error" in answer:
                raise ValueError(f"{self._name}: {answer['error']}")
            return answer
        code = self._process.wait()
        self._errors.seek(0)
        said = self._errors.read().strip().rpartition("\n")[2]
        raise ValueError(f"{self._name}: {said or f'its process has ended with code {code}'}")


_WORKERS: dict[tuple[str, ...], WorkerProcess] = {}
"""Peer, Python and command -> the running process."""


def running_worker(*command: str) -> WorkerProcess:
    """The process of a command, started if it is not running."""
    if command not in _WORKERS or not _WORKERS[command].alive:
        _WORKERS[command] = WorkerProcess(*command)
    return _WORKERS[command]


@dataclass(frozen=True, kw_only=True)
class WorkerBackend(GenerationBackend):
    """A library that decodes greedily on the CPU in a worker process.

    python: the Python that has the library, by default this one.
    """

    sampled: ClassVar[bool] = False  # its random numbers are its own, and its sampler's order of warpers is another one
    elsewhere: ClassVar[bool] = True
    library: ClassVar[str]  # its name in messages
    script: ClassVar[Path]  # of the worker

    python: str = sys.executable

    @property
    def weights(self) -> str:
        """The path of its weights."""
        raise NotImplementedError

    @property
    def arguments(self) -> tuple[str, ...]:
        """Further arguments of the worker."""
        return ()

    @property
    def request(self) -> dict[str, Any]:
        """Further fields of every request."""
        return {}

    @property
    def worker(self) -> WorkerProcess:
        """Its process, started if it is not running."""
        command = str(self.script), self.weights, str(torch.get_num_threads()), *self.arguments
        return running_worker(self.name, self.python, *command)

    @property
    def settings(self) -> dict[str, Any]:
        """The settings with the library's version."""
        return asdict(self) | {"version": self.worker.known["version"]}

    def refusal(self, model: PreTrainedModel) -> str | None:
        return None if model.device.type == "cpu" else f"{self.library} is run on the CPU, and the model is not there"

    def check(self, model: PreTrainedModel) -> None:
        for path in (self.python, self.weights, *self.arguments):
            if not isinstance(path, str):
                raise ValueError(f"{self.name}: a path is a string, found {path!r}")
        super().check(model)
        head: Any = model.get_output_embeddings()
        if (found := self.worker.known["vocabulary"]) != head.weight.shape[0]:
            raise ValueError(f"{self.name}: {self.weights} has {found} tokens, the model {head.weight.shape[0]}")

    def generate(self, model: PreTrainedModel, prompt: Tensor, options: dict[str, Any], seed: int) -> GeneratedOutput:
        """As `GenerationBackend.generate`. The time includes the pipe to the process."""
        eos: Any = model.generation_config.eos_token_id
        stop = [] if eos is None else [int(one) for one in torch.as_tensor(eos, dtype=torch.int64, device="cpu").flatten()]
        asked = {"ids": prompt[0].tolist(), "new": options["max_new_tokens"], "stop": stop}
        began = time.perf_counter()
        answer = self.worker(**asked, **self.request)
        ended = time.perf_counter()
        time.sleep(SETTLES)
        return GeneratedOutput(answer["ids"], first_at=began + answer["first_seconds"], ended_at=ended)
