"""OpenVINO GenAI as a process that ov.py talks to. It runs in any Python that has openvino-genai.

    python ov_worker.py FOLDER THREADS

FOLDER: an IR with its tokenizer, as `optimum-cli export openvino` writes it. The first line of output says what it is:
{"vocabulary": tokens of the vocabulary, "type": the element type of most weights, "version": openvino-genai's}. Then it reads
lines {"ids": [...], "new": n, "stop": [...]} and answers each with {"ids": [...], "first_seconds": s}: at most n greedy tokens,
to the first of the stop ids, and the time from the question to the first token.

An IR of float32 weights computes and caches in float32, which is what torch does. All others get OpenVINO's defaults; on CPUs
with bfloat16 instructions that is bfloat16. Nothing is kept between requests.
"""

import json
import math
import sys
from collections import Counter
from importlib import import_module
from pathlib import Path
from typing import Any

numpy: Any = import_module("numpy")
openvino: Any = import_module("openvino")
genai: Any = import_module("openvino_genai")


def describe_model(folder: Path) -> dict[str, Any]:
    """The first line's vocabulary and type. sys.exit if the folder has no model."""
    file = folder / "openvino_model.xml"
    if not file.exists():
        sys.exit(f"{folder} has no openvino_model.xml")
    model, sizes = openvino.Core().read_model(str(file)), Counter[str]()
    for operation in model.get_ordered_ops():
        if operation.get_type_name() == "Constant":
            sizes[operation.get_output_element_type(0).get_type_name()] += math.prod(operation.get_output_shape(0))
    return {"vocabulary": model.outputs[0].partial_shape[2].get_length(), "type": sizes.most_common(1)[0][0]}


def load_pipeline(folder: Path, threads: int, weight_type: str) -> Any:
    """The model, ready for requests."""
    scheduler = genai.SchedulerConfig()
    scheduler.enable_prefix_caching = False  # the library's default would reuse the prompts of earlier requests
    scheduler.max_num_batched_tokens = sys.maxsize  # the library's default: a prompt is one pass
    properties = {"INFERENCE_NUM_THREADS": threads}
    if weight_type == "f32":
        properties |= {"INFERENCE_PRECISION_HINT": "f32", "KV_CACHE_PRECISION": "f32"}
    return genai.LLMPipeline(str(folder), "CPU", scheduler_config=scheduler, **properties)


def answer_request(pipeline: Any, asked: dict[str, Any]) -> dict[str, Any]:
    """The answer to one request."""
    settings = genai.GenerationConfig(max_new_tokens=asked["new"], do_sample=False)
    if asked["stop"]:
        settings.eos_token_id = asked["stop"][0]  # else the folder's own would end texts, too
        settings.stop_token_ids = set(asked["stop"])
    else:
        settings.ignore_eos = True
    found = pipeline.generate(openvino.Tensor(numpy.array([asked["ids"]], dtype=numpy.int64)), settings)
    return {"ids": list(found.tokens[0]), "first_seconds": found.perf_metrics.get_ttft().mean / 1000}


def main() -> None:
    """Answer the requests on standard input until it ends. sys.exit for an impossible command line."""
    folder, threads = Path(sys.argv[1]), int(sys.argv[2])
    known = describe_model(folder)
    pipeline = load_pipeline(folder, threads, known["type"])
    print(json.dumps(known | {"version": genai.__version__}), flush=True)
    for line in sys.stdin:
        print(json.dumps(answer_request(pipeline, json.loads(line))), flush=True)


if __name__ == "__main__":
    main()
