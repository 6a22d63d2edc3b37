"""generate, chat and batch answer in a process that cannot import transformers, if the native engine runs the model."""

import json
import subprocess
import sys
from pathlib import Path

from tests.helpers.batches import greedy, read, request, write

RUN_ALL = """
import json, sys
sys.modules["transformers"] = None  # an import of it fails
from typer.main import get_command
from skipstone.cli import app
for arguments in json.loads(sys.argv[1]):
    try:
        get_command(app)(arguments)
    except SystemExit as exit:
        assert exit.code == 0, arguments
slow_to_import = {"torch._dynamo", "torch.distributed.tensor"}
assert not slow_to_import & sys.modules.keys()
"""
GENERATE = ["generate", "--prompt", "def add(a, b):", "--max-new-tokens", "6"]
SAMPLED = ["--temperature", "0.7", "--top-k", "9", "--top-p", "0.9", "--min-p", "0.01", "--seed", "3", "--stop", "never met"]


def test_common_calls_import_no_transformers(tmp_path: Path) -> None:
    body = {"max_tokens": 6, "temperature": 0.8, "seed": 1, "repetition_penalty": 1.1, "logit_bias": {"5": 1.0}}
    lines = [request("a", greedy("def f", 6)), request("b", {"prompt": "def f", **body})]
    requests, output = write(tmp_path / "in.jsonl", lines), tmp_path / "out.jsonl"
    calls = [
        *([*GENERATE, "--method", method, "--stats"] for method in ("auto", "layerskip", "speculative", "adasd", "swift")),
        *([*GENERATE, *SAMPLED], ["chat", "--max-new-tokens", "6"], ["batch", str(requests), str(output)]),
    ]
    program = [sys.executable, "-c", RUN_ALL, json.dumps(calls)]
    done = subprocess.run(program, input="hello\n", capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    assert [line["response"]["status_code"] for line in read(output)] == [200, 200]
