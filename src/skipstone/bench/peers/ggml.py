"""llama.cpp as a method of the benchmark, on a GGUF file of the model's weights. It runs in a process of its own, in any Python
that has llama-cpp-python, so that neither library sees the other one's threads. This file is not called llama_cpp, as the
worker would find it in the place of the library.
"""

import json
import subprocess
import sys
import time
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import Tensor
from transformers import PreTrainedModel

from skipstone.bench.peers.peer import Peer
from skipstone.timing.measure import Emitted

WORKER = Path(__file__).with_name("ggml_worker.py")
SETTLES = 0.05  # seconds in which its threads stop waiting for work in a loop, before anybody else's turn; they are not counted


class Worker:
    """The process. ValueError for what it cannot load.

    command: the arguments of ggml_worker.py. vocabulary: entries of the file's LM head.
    """

    def __init__(self, python: str, *command: str) -> None:
        try:
            self._process = subprocess.Popen(
                [python, str(WORKER), *command],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
            )
        except OSError as error:
            raise ValueError(f"llama-cpp: python={python}: {error.strerror}") from error
        self.vocabulary = int(self._answer()["vocabulary"])

    def __call__(self, **question: Any) -> dict[str, Any]:
        """Its answer to one line (ggml_worker.py)."""
        assert self._process.stdin is not None
        print(json.dumps(question), file=self._process.stdin, flush=True)
        return self._answer()

    def _answer(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        assert self._process.stderr is not None
        if line := self._process.stdout.readline():
            return json.loads(line)
        said = self._process.stderr.read().strip().rpartition("\n")[2]
        raise ValueError(f"llama-cpp: {said or 'its process has ended'}")


worker = cache(Worker)
"""A worker for each command, loaded once."""


@dataclass(frozen=True)
class LlamaCpp(Peer):
    """llama.cpp, greedily.

    file: the GGUF file. python: the Python that has llama-cpp-python, by default this one. drafts: None for plain decoding,
    "prompt-lookup" for llama-cpp-python's own, or the GGUF file of a draft model. num_draft_tokens: most drafts a step;
    confidence_threshold: drafting with a model stops before a token whose probability is below it. Both have the defaults of
    llama-speculative-simple.
    """

    name: ClassVar[str] = "llama-cpp"
    sampled: ClassVar[bool] = False  # its random numbers are its own, and its sampler's order of warpers is another one

    file: str
    python: str = sys.executable
    drafts: str | None = None
    num_draft_tokens: int = 16
    confidence_threshold: float = 0.75

    def check(self, model: PreTrainedModel) -> None:
        super().check(model)
        for name in ("file", "python", "drafts"):
            value = getattr(self, name)
            if not isinstance(value, str) and (name != "drafts" or value is not None):
                raise ValueError(f"llama-cpp: {name} must be a path, found {value!r}")
        head: Any = model.get_output_embeddings()
        if (found := self._worker().vocabulary) != head.weight.shape[0]:
            raise ValueError(f"llama-cpp: {self.file} has {found} tokens, the model {head.weight.shape[0]}")

    def generate(self, model: PreTrainedModel, prompt: Tensor, options: dict[str, Any], seed: int) -> Emitted:
        eos: Any = model.generation_config.eos_token_id
        stop = [] if eos is None else [int(one) for one in torch.as_tensor(eos).flatten()]
        asked = {"ids": prompt[0].tolist(), "new": options["max_new_tokens"], "stop": stop}
        began = time.perf_counter()
        answer = self._worker()(**asked, drafts=self.num_draft_tokens, threshold=self.confidence_threshold)
        ended = time.perf_counter()
        time.sleep(SETTLES)
        return Emitted(answer["ids"], first_at=began + answer["first_seconds"], ended_at=ended)

    def _worker(self) -> Worker:
        return worker(self.python, self.file, str(torch.get_num_threads()), *([self.drafts] if self.drafts else []))
