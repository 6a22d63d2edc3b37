"""Bodies that a machine made up from our own OpenAPI document, right ones and wrong ones: none of them is a defect."""

import json
import os
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings

from tests.helpers.served import SLOW, serving, with_template

pytestmark = pytest.mark.soak

CASES = int(os.environ.get("SKIPSTONE_SOAK_CASES", "2000"))
"""Requests in all, about, to a model with a chat template; a tenth as many to one without."""
UNSUITED = [HealthCheck.too_slow, HealthCheck.filter_too_much, HealthCheck.data_too_large, HealthCheck.large_base_example]
"""What hypothesis complains about where a strategy is somebody else's."""
FEW = 10
FINE = {200, 400, 404, 413, 429}
"""What may be answered: an answer, or a word on what is wrong with the request or with asking now."""


def checked(status: int, kind: str, text: str) -> None:
    """An answer that is one of FINE, an error in OpenAI's shape, a stream in which nothing went wrong."""
    assert status in FINE, f"{status}: {text}"
    if status >= 400:
        error = json.loads(text)["error"]
        assert set(error) == {"message", "type", "param", "code"}
        assert error["code"] in (status, "context_length_exceeded")
        assert error["message"]
    elif kind.startswith("text/event-stream"):
        chunks = [json.loads(line[5:]) for line in text.splitlines() if line.startswith("data: {")]
        assert not any((chunk.get("error") or {"code": 0})["code"] >= 500 for chunk in chunks), text


def ask(operation: Any, mode: Any, count: int, seen: Counter[tuple[str, str, int]]) -> None:
    @given(case=operation.as_strategy(generation_mode=mode))
    @settings(max_examples=count, deadline=None, database=None, suppress_health_check=UNSUITED)
    def request(case: Any) -> None:
        answer = case.call(timeout=SLOW)
        seen[f"{operation.method.upper()} {operation.path}", mode.name, answer.status_code] += 1
        checked(answer.status_code, answer.headers.get("content-type", [""])[0], answer.text)

    request()


@pytest.mark.parametrize("template", [True, False], ids=["with a template", "without"])
def test_no_body_made_from_the_openapi_document_is_a_defect_and_every_error_is_in_openai_s_shape(
    tmp_path: Path, template: bool
) -> None:
    schemathesis = pytest.importorskip("schemathesis", reason="it comes with the extra `soak`")
    modes = (schemathesis.GenerationMode.POSITIVE, schemathesis.GenerationMode.NEGATIVE)
    seen: Counter[tuple[str, str, int]] = Counter()
    cases, model = (CASES, [str(with_template(tmp_path))]) if template else (CASES // 10, [])
    with serving(*model, "--max-waiting", "256") as served:
        document = schemathesis.openapi.from_url(f"{served.url}/openapi.json")
        operations = [result.ok() for result in document.get_all_operations()]
        with_body = [one for one in operations if one.body]
        plan = [(one, mode, max(cases // (2 * len(with_body)), 1)) for one in with_body for mode in modes]
        plan += [(one, modes[0], FEW) for one in operations if not one.body]
        for operation, mode, count in plan:
            ask(operation, mode, count, seen)
        served.until_idle()
    for (label, kind, status), count in sorted(seen.items()):
        print(f"\n{label}, {kind.lower()}: {count} times {status}", end="")
    print(f"\n{seen.total()} requests")
    assert seen.total() >= 0.9 * cases
    if template:
        assert seen["POST /v1/chat/completions", "POSITIVE", 200], "no chat was answered"
