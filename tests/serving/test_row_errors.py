"""A text whose logits are NaN is an error of its own request, whatever is written next to it."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from skipstone.serving.batch_files import batch
from skipstone.serving.batch_files.batch import LoadedModel, ModelSettings
from skipstone.serving.batch_files.request_lines import RequestFile
from tests.helpers.batches import greedy, read, request, write
from tests.helpers.served import InThread, caller, in_thread, refusal

BAD = 500
"""The token whose embedding is NaN."""


@pytest.fixture(scope="module")
def spoiled(loaded: Any) -> Any:
    model, tokenizer = loaded
    head = model.get_output_embeddings()
    with torch.no_grad():
        if model.get_input_embeddings().weight is head.weight:
            head.weight = nn.Parameter(head.weight.clone())
        model.get_input_embeddings().weight[BAD] = float("nan")
    return model, tokenizer


@pytest.fixture(scope="module")
def server(spoiled: Any) -> Iterator[InThread]:
    with in_thread(lambda: spoiled, max_num_seqs=4, max_waiting=64, drain_seconds=5) as running:
        yield running


def body(prompt: Any, **more: Any) -> dict[str, Any]:
    return {"prompt": prompt, "max_tokens": 12, "temperature": 0, "ignore_eos": True, **more}


def test_only_the_request_that_met_nan_fails(server: InThread) -> None:
    async def asked() -> list[Any]:
        async with caller(server.url) as http:
            bodies = [body("def add("), body([5, 6, BAD]), body("def add("), body([BAD, 5], temperature=1), body("def add(")]
            return list(await asyncio.gather(*(http.post("/v1/completions", json=one) for one in bodies)))

    answers = asyncio.run(asked())
    assert [one.status_code for one in answers] == [200, 500, 200, 500, 200]
    assert "not finite" in refusal(answers[1])
    assert len({one.json()["choices"][0]["text"] for one in answers[::2]}) == 1


def test_a_stream_tells_of_the_error(server: InThread) -> None:
    async def told() -> list[str]:
        asked = {"json": body([5, 6, BAD], stream=True)}
        async with caller(server.url) as http, http.stream("POST", "/v1/completions", **asked) as response:
            return [line async for line in response.aiter_lines() if line.startswith("data: {")]

    assert "not finite" in json.loads(asyncio.run(told())[-1][6:])["error"]["message"]


def test_a_batch_writes_an_error_for_that_line_only(spoiled: Any, tmp_path: Path) -> None:
    lines = [request("good", greedy("def add(")), request("bad", greedy([5, 6, BAD])), request("more", greedy("import"))]
    output = tmp_path / "out.jsonl"
    source = write(tmp_path / "in.jsonl", lines)
    assert batch.run(LoadedModel(ModelSettings(), *spoiled), output, RequestFile(source), lambda *_: None) == 1
    assert [one["response"]["status_code"] for one in read(output)] == [200, 500, 200]
