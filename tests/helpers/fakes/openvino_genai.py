"""The part of OpenVINO GenAI that the benchmark's worker uses, over the text of numbers of llama_cpp."""

import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from llama_cpp import following  # type: ignore[import-not-found]
from openvino import Tensor, read_settings  # type: ignore[import-not-found]

__version__ = "0.0.0"
PLAIN = {"INFERENCE_PRECISION_HINT": "f32", "KV_CACHE_PRECISION": "f32"}


class SchedulerConfig:
    enable_prefix_caching = True
    max_num_batched_tokens = 256


class GenerationConfig:
    def __init__(self, max_new_tokens: int, do_sample: bool) -> None:
        self.max_new_tokens, self.do_sample = max_new_tokens, do_sample
        self.eos_token_id, self.stop_token_ids, self.ignore_eos = -1, set[int](), False


class LLMPipeline:
    def __init__(self, folder: str, device: str, scheduler_config: SchedulerConfig, **properties: Any) -> None:
        self._model = read_settings(Path(folder) / "openvino_model.xml")
        assert device == "CPU"
        assert not scheduler_config.enable_prefix_caching, "prompts of earlier requests would be reused"
        assert scheduler_config.max_num_batched_tokens > 8192
        assert properties.pop("INFERENCE_NUM_THREADS") > 0
        assert properties == (PLAIN if "f32" in self._model.constants else {}), "float32 weights compute in float32"

    def generate(self, ids: Tensor, settings: GenerationConfig) -> Any:
        assert not settings.do_sample
        (text,), new = ids.values.tolist(), list[int]()
        eos = self._model.own_eos if settings.eos_token_id == -1 else settings.eos_token_id
        ends = set() if settings.ignore_eos else {eos, *settings.stop_token_ids}
        while len(new) < settings.max_new_tokens and not (new and new[-1] in ends):
            new.append(following(self._model, [*text, *new]))
            if self._model.ends_at is not None and len(text) + len(new) >= self._model.ends_at:
                sys.exit("out of luck")
        times = SimpleNamespace(get_ttft=lambda: SimpleNamespace(mean=0.001))
        return SimpleNamespace(tokens=[new], perf_metrics=times)
