"""`skipstone serve`, as a process: it starts, answers, logs in JSON, and leaves in order when it is told to."""

import json
import os
import signal
import socket
import subprocess
import sys
import time

import httpx

from skipstone.cli.serve import API_KEY


def test_it_starts_answers_and_ends_in_order() -> None:
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        port = one.getsockname()[1]
    command = [sys.executable, "-m", "skipstone", "serve", "--port", str(port), "--max-num-seqs", "2", "--drain-timeout", "5"]
    command += ["--log-format", "json"]
    process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True, env={**os.environ, API_KEY: "sk-test"})
    try:
        url, headers = f"http://127.0.0.1:{port}", {"Authorization": "Bearer sk-test"}
        for _ in range(600):
            try:
                if httpx.get(f"{url}/health", timeout=60).status_code == 200:
                    break
            except httpx.ConnectError:
                assert process.poll() is None, process.stderr and process.stderr.read()
            time.sleep(0.1)
        body = {"prompt": "def add(a, b):", "max_tokens": 8, "temperature": 0}
        assert httpx.post(f"{url}/v1/completions", json=body).status_code == 401
        answer = httpx.post(f"{url}/v1/completions", json=body, headers=headers, timeout=60)
        assert answer.json()["usage"]["completion_tokens"] <= 8
    finally:
        process.send_signal(signal.SIGTERM)
        code = process.wait(30)
    assert code == 0
    assert process.stderr is not None
    written = process.stderr.read()
    lines = [json.loads(line) for line in written.splitlines()]
    told = [(line["route"], line["status"]) for line in lines if line["message"] == "request"]
    assert told == [("/v1/completions", 401), ("/v1/completions", 200)]
    assert any(line["logger"].startswith("skipstone.") and f"ready: {url}" in line["message"] for line in lines)
    assert "def add" not in written
    assert "sk-test" not in written
