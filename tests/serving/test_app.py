"""The HTTP routes, over a real socket, with the bundled model: what OpenAI's client, and a rude one, get to see."""

from __future__ import annotations

import asyncio
import json
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import fields
from typing import Any

import httpx
import openai
import pytest
import torch

import skipstone
from skipstone.serving.request_parser import SERVER_SETTINGS
from skipstone.serving.schemas import CompletionBody
from skipstone.serving.server import Server
from skipstone.serving.settings import ServerSettings
from tests.helpers.served import InThread, in_thread, refusal

TEXTS = [
    "def add(a, b):\n    return",
    "import os\n\n\ndef main():\n",
    "class Stack:\n    def __init__(self):\n",
    "x = [1, 2, 3]\n",
]
KEY = "sk-secret"


@pytest.fixture(scope="module")
def nano(loaded: Any) -> Iterator[InThread]:
    with in_thread(lambda: loaded, max_num_seqs=4, max_waiting=16, drain_seconds=5) as running:
        yield running


@pytest.fixture(scope="module")
def client(nano: InThread) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{nano.url}/v1", api_key="none", max_retries=0)


def expected(loaded: Any, text: str, new: int, **more: Any) -> str:
    model, tokenizer = loaded
    return skipstone.generate(model, text, tokenizer=tokenizer, max_new_tokens=new, **more).text


def post(nano: InThread, path: str = "/v1/completions", **body: Any) -> httpx.Response:
    return nano.http.post(path, json=body)


# ------------------------------------------------------------------------------------------------------------- texts


def test_answers_of_many_clients_at_once_are_those_of_generate(loaded: Any, client: openai.OpenAI) -> None:
    def asked(text: str) -> str:
        return client.completions.create(model="skipstone-nano", prompt=text, max_tokens=40, temperature=0).choices[0].text

    with ThreadPoolExecutor(8) as pool:
        found = list(pool.map(asked, TEXTS * 3))
    assert found == [expected(loaded, text, 40, do_sample=False) for text in TEXTS] * 3


def test_a_stream_has_the_same_text_and_ends_with_the_usage(loaded: Any, client: openai.OpenAI) -> None:
    chunks = list(
        client.completions.create(
            model="skipstone-nano",
            prompt=TEXTS[0],
            max_tokens=30,
            temperature=0,
            stream=True,
            stream_options={"include_usage": True},
        )
    )
    text = "".join(choice.text for chunk in chunks for choice in chunk.choices)
    assert text == expected(loaded, TEXTS[0], 30, do_sample=False)
    reasons = [choice.finish_reason for chunk in chunks for choice in chunk.choices]
    assert reasons[-1] in ("stop", "length")
    assert not any(reasons[:-1])
    assert chunks[-1].usage is not None
    assert chunks[-1].usage.completion_tokens <= 30
    assert len({chunk.id for chunk in chunks}) == 1


def test_a_stop_string_ends_the_text_before_it(loaded: Any, client: openai.OpenAI) -> None:
    whole = expected(loaded, TEXTS[2], 40, do_sample=False)
    stop = whole[10:16]
    answer = client.completions.create(model="skipstone-nano", prompt=TEXTS[2], max_tokens=40, temperature=0, stop=[stop, "\0"])
    assert answer.choices[0].text == whole[: whole.index(stop)]
    assert answer.choices[0].finish_reason == "stop"
    assert answer.usage is not None
    assert answer.usage.completion_tokens < 40


def test_a_seed_says_what_is_drawn_and_every_choice_has_another(loaded: Any, client: openai.OpenAI) -> None:
    def drawn(count: int) -> list[str]:
        answer = client.completions.create(
            model="skipstone-nano", prompt=TEXTS[3], max_tokens=25, temperature=1.0, top_p=0.95, seed=7, n=count
        )
        return [choice.text for choice in sorted(answer.choices, key=lambda one: one.index)]

    three = drawn(3)
    assert len(set(three)) > 1
    assert drawn(3) == three
    assert three[0] == expected(loaded, TEXTS[3], 25, do_sample=True, temperature=1.0, top_p=0.95, seed=7)


def test_a_method_of_the_request_s_own_writes_the_same_text(loaded: Any, nano: InThread) -> None:
    text = expected(loaded, TEXTS[1], 40, do_sample=False)
    for speculative in ("off", "prompt_lookup", {"method": "layerskip", "exit_layer": 6}):
        answer = post(nano, prompt=TEXTS[1], max_tokens=40, temperature=0, speculative=speculative, return_metrics=True).json()
        assert answer["choices"][0]["text"] == text
        figures = answer["metrics"]["speculative_decoding"]
        assert (figures["num_draft_tokens"] == 0) is (speculative == "off")
        assert answer["timings"]["draft_n_accepted"] == figures["num_accepted_draft_tokens"]
        histogram = figures["acceptance_histogram"]
        assert sum(place * count for place, count in enumerate(histogram)) == figures["num_accepted_draft_tokens"]
        assert sum(histogram) == figures["num_spec_steps"]


def test_log_probabilities_are_those_of_the_model(loaded: Any, client: openai.OpenAI) -> None:
    model, tokenizer = loaded
    answer = client.completions.create(model="skipstone-nano", prompt=TEXTS[0], max_tokens=12, temperature=0, logprobs=3)
    told = answer.choices[0].logprobs
    assert told is not None
    assert told.token_logprobs is not None
    assert told.top_logprobs is not None
    prompt = tokenizer(TEXTS[0])["input_ids"]
    output = skipstone.generate(model, torch.tensor([prompt]), max_new_tokens=12, do_sample=False)
    assert output.new_tokens is not None
    new = output.new_tokens[0]
    with torch.inference_mode():
        logits = model(torch.tensor([prompt + new])).logits[0, len(prompt) - 1 : -1]
    right = logits.float().log_softmax(-1)
    assert len(told.token_logprobs) == len(new)
    for place, token in enumerate(new):
        assert told.token_logprobs[place] == pytest.approx(float(right[place, token]), abs=1e-3)
        assert len(told.top_logprobs[place]) <= 3
        assert max(told.top_logprobs[place].values()) == pytest.approx(float(right[place].max()), abs=1e-3)


def test_penalties_and_biases_change_what_is_written(client: openai.OpenAI, loaded: Any) -> None:
    _, tokenizer = loaded
    token = tokenizer(TEXTS[0])["input_ids"][1]
    biased = client.completions.create(
        model="skipstone-nano", prompt=TEXTS[0], max_tokens=4, temperature=0, logit_bias={str(token): 100}
    )
    assert biased.choices[0].text == tokenizer.decode([token] * 4)
    varied = client.completions.create(
        model="skipstone-nano",
        prompt=TEXTS[0],
        max_tokens=4,
        temperature=0,
        logit_bias={str(token): 30},
        presence_penalty=2.0,
        frequency_penalty=2.0,
        extra_body={"repetition_penalty": 9.0},
    )
    assert varied.choices[0].text != biased.choices[0].text


def test_a_prompt_that_begins_like_the_one_before_is_not_read_twice(nano: InThread, loaded: Any) -> None:
    long = "\n".join(f"def function_{number}(argument):\n    return argument + {number}\n" for number in range(12))
    first = post(nano, prompt=long, max_tokens=8, temperature=0, speculative="off").json()
    second = post(nano, prompt=f"{long}\ndef last", max_tokens=8, temperature=0, speculative="off").json()
    assert first["usage"]["prompt_tokens_details"]["cached_tokens"] == 0
    assert second["usage"]["prompt_tokens_details"]["cached_tokens"] > 100
    assert second["choices"][0]["text"] == expected(loaded, f"{long}\ndef last", 8, do_sample=False)


def test_several_prompts_and_token_ids(nano: InThread, loaded: Any) -> None:
    _, tokenizer = loaded
    answer = post(nano, prompt=TEXTS[:2], n=2, max_tokens=6, temperature=0).json()
    assert [choice["index"] for choice in answer["choices"]] == [0, 1, 2, 3]
    texts = [choice["text"] for choice in answer["choices"]]
    assert texts == [expected(loaded, text, 6, do_sample=False) for text in TEXTS[:2] for _ in range(2)]
    ids = tokenizer(TEXTS[0])["input_ids"]
    assert post(nano, prompt=ids, max_tokens=6, temperature=0).json()["choices"][0]["text"] == texts[0]


def test_a_page_is_told_where_every_token_comes_from(nano: InThread) -> None:
    body = {"prompt": TEXTS[1], "max_tokens": 30, "temperature": 0, "ignore_eos": True, "speculative": "auto"}
    body |= {"stream": True, "stream_speculative": True}
    told: list[dict[str, Any]] = []
    with nano.http.stream("POST", "/v1/completions", json=body) as response:
        assert response.headers["content-type"].startswith("text/event-stream")
        lines = [line for line in response.iter_lines() if line.startswith("data:")]
    assert lines[-1] == "data: [DONE]"
    for line in lines[:-1]:
        told += [json.loads(line[5:])["speculative"]] if "speculative" in json.loads(line[5:]) else []
    tokens = [token for step in told for token in step["tokens"]]
    assert len(tokens) == 30
    assert tokens[0]["origin"] == "prefill"
    assert {token["origin"] for token in tokens} <= {"prefill", "draft", "recovered", "bonus"}
    assert all(step["verify_ms"] >= 0 and step["drafter"] for step in told[1:])
    assert [step["step"] for step in told] == list(range(len(told)))


SCHEMA = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 12}, "count": {"type": "integer", "minimum": 0, "maximum": 99}},
    "required": ["name", "count"],
    "additionalProperties": False,
}


@pytest.mark.parametrize("speculative", ["auto", {"method": "layerskip", "exit_layer": 6}])
def test_structured_output_obeys_its_schema_whatever_drafts(nano: InThread, speculative: Any) -> None:
    """The text is that without drafts, greedily and, of methods that draw with the target's noise, with a seed."""
    format_ = {"type": "json_schema", "json_schema": {"name": "thing", "schema": SCHEMA}}
    asked = {"prompt": 'thing = {"name": "stack", "count": 3}\nthing = ', "max_tokens": 80, "response_format": format_}
    for settings in ({"temperature": 0}, {"temperature": 1.0, "seed": 5, "n": 3}):
        answer = post(nano, **asked, **settings, speculative=speculative).json()
        plain = post(nano, **asked, **settings, speculative="off").json()
        for choice, same in zip(answer["choices"], plain["choices"], strict=True):
            assert choice["text"] == same["text"] or (settings["temperature"] and isinstance(speculative, dict))
            assert choice["finish_reason"] == "stop"
            found = json.loads(choice["text"])
            assert set(found) == {"name", "count"}
            assert len(found["name"]) <= 12
            assert 0 <= found["count"] <= 99


def test_any_object_and_what_is_no_schema(nano: InThread) -> None:
    answer = post(nano, prompt="x = ", max_tokens=60, temperature=0, response_format={"type": "json_object"}).json()
    assert answer["choices"][0]["text"].lstrip().startswith("{")

    def wrong(schema: Any, **more: Any) -> str:
        format_ = {"type": "json_schema", "json_schema": {"schema": schema}}
        response = post(nano, prompt="x = ", response_format=format_, **more)
        assert response.status_code == 400
        return refusal(response)

    assert "response_format" in wrong({"type": "nothing that there is"})
    deep: dict[str, Any] = {}
    for _ in range(40):
        deep = {"properties": {"a": deep}}
    assert "deep" in wrong(deep)
    assert "characters" in wrong({"enum": ["a" * 70_000]})
    assert "ignore_eos" in wrong(SCHEMA, ignore_eos=True)
    missing = post(nano, prompt="x = ", response_format={"type": "json_schema"})
    assert "missing" in refusal(missing)


# ---------------------------------------------------------------------------------------------------------- refusals


@pytest.mark.parametrize(
    ("body", "said"),
    [
        ({"prompt": "a", "tempreature": 1}, "tempreature: this field is not supported"),
        ({"prompt": "a", "n": 1000}, "n: "),
        ({"prompt": "a", "temperature": "hot"}, "temperature: "),
        ({"prompt": [[]]}, "prompt"),
        ({"prompt": ["a"] * 1000}, "prompt"),
        ({"prompt": "a", "logit_bias": {"9" * 5000: 1}}, "digit"),
        ({"prompt": []}, "prompt"),
        ({"prompt": "a", "max_tokens": 10**6}, "tokens"),
        ({"prompt": "a" * 300_000}, "characters"),
        ({"prompt": [10**6]}, "out of range"),
        ({"prompt": "a", "stop": [""]}, "stop"),
        ({"prompt": "a", "logit_bias": {"x": 1}}, "logit_bias"),
        ({"prompt": "a", "logit_bias": {"99999": 1}}, "vocabulary"),
        ({"prompt": "a", "speculative": "warp_drive"}, "warp_drive"),
        ({"prompt": "a", "speculative": "auto log=/tmp/x"}, "files"),
        ({"prompt": "a", "speculative": "self_speculative profile=/etc/passwd"}, "files"),
        ({"prompt": "a", "speculative": "auto candidates='swift profile=/etc/passwd'"}, "files"),
        ({"prompt": "a", "speculative": {"method": "speculative", "draft_model": "/etc"}}, "files"),
        ({"prompt": "a", "speculative": "speculative model=/srv/x"}, "files"),
        ({"prompt": "a", "speculative": {"method": "speculative", "assistant_model": "org/name"}}, "files"),
        ({"prompt": "a", "speculative": "speculative draft-model=/srv/x"}, "files"),
        ({"prompt": "a", "speculative": "layerskip exit_layer=4 draft-vocabulary=/etc/passwd"}, "files"),
        ({"prompt": "a", "speculative": '{"method": "self_speculative", "pro\\u0066ile": "/etc/passwd"}'}, "files"),
        ({"prompt": "a", "speculative": "speculative draft_device=cpu:7"}, "load models"),
        ({"prompt": "a", "speculative": "auto candidates='speculative draft_dtype=float16'"}, "load models"),
        ({"prompt": "a", "speculative": "prompt_lookup prompt_lookup_max=100000"}, "at most 64"),
        ({"prompt": "a", "speculative": "auto candidates='lookahead ngram=1000'"}, "at most 64"),
        ({"prompt": [99999999], "stream": True}, "out of range"),
        ({"prompt": "a", "stream_options": {"include_usage": True}}, "stream=true"),
        ({}, "prompt"),
    ],
)
def test_what_cannot_be_done_is_refused_in_a_sentence(nano: InThread, body: dict[str, Any], said: str) -> None:
    response = post(nano, **body)
    assert response.status_code == 400
    assert said in refusal(response)


def test_every_setting_that_names_a_file_or_a_model_is_the_server_s() -> None:
    names = set[str]()
    for method in skipstone.METHODS.values():
        for one in fields(method):
            help_ = " ".join(str(value) for value in one.metadata.values())
            if any(word in help_ for word in ("file", "folder", "path", "hub")):
                names.add(one.name)
    assert names == set(SERVER_SETTINGS)


def test_other_mistakes_have_their_own_status(nano: InThread) -> None:
    assert nano.http.post("/v1/completions", content=b"{").status_code == 400
    assert post(nano, prompt="a", model="gpt-4").status_code == 404
    assert "no model" in refusal(post(nano, prompt="a", model="gpt-4"))
    assert "there is no /v1/nothing" in refusal(nano.http.get("/v1/nothing"))
    assert nano.http.get("/v1/completions").status_code == 405
    assert nano.http.post("/v1/completions", content=b" " * (5 << 20)).status_code == 413
    chat = post(nano, "/v1/chat/completions", messages=[{"role": "user", "content": "hi"}])
    assert chat.status_code == 400
    assert "chat template" in refusal(chat)


# ----------------------------------------------------------------------------------------------------- other routes


def test_what_the_server_says_of_itself(nano: InThread, client: openai.OpenAI) -> None:
    assert [model.id for model in client.models.list()] == ["skipstone-nano"]
    info = nano.http.get("/server_info").json()
    assert info["method"].startswith("layerskip exit_layer=6")
    assert info["max_num_seqs"] == 4
    tokens = post(nano, "/tokenize", prompt=TEXTS[0]).json()
    assert tokens["count"] == len(tokens["tokens"])
    assert post(nano, "/detokenize", tokens=tokens["tokens"]).json()["prompt"].endswith(TEXTS[0])
    assert "vocabulary" in refusal(post(nano, "/detokenize", tokens=[-1]))
    assert "either" in refusal(post(nano, "/tokenize"))


def test_counters_go_up_by_what_was_done(nano: InThread) -> None:
    names = ("generation_tokens_total", "prompt_tokens_total", "request_success_total", "spec_decode_num_draft_tokens_total")
    before = [nano.counted(name) for name in names]
    answer = post(
        nano,
        prompt=TEXTS[1],
        max_tokens=30,
        temperature=0,
        speculative={"method": "layerskip", "exit_layer": 6},
        return_metrics=True,
    ).json()
    written, read, ended, drafted = (nano.counted(name) - was for name, was in zip(names, before, strict=True))
    assert written == answer["usage"]["completion_tokens"]
    assert read == answer["usage"]["prompt_tokens"]
    assert ended == 1
    assert drafted == answer["timings"]["draft_n"] > 0
    assert nano.at_work() == 0


@pytest.mark.parametrize("method", ["layerskip exit_layer=6", "prompt_lookup", "off", "auto"])
def test_steps_are_counted_by_what_drafted(nano: InThread, method: str) -> None:
    def counted() -> dict[str, float]:
        lines = [line for line in nano.http.get("/metrics").text.splitlines() if "spec_decode_steps_total{" in line]
        return {line.split('method="')[1].split('"')[0]: float(line.rsplit(" ", 1)[1]) for line in lines}

    before = counted()
    body = {"prompt": TEXTS[1], "max_tokens": 40, "temperature": 0, "ignore_eos": True}
    told = post(nano, **body, speculative=method, return_metrics=True).json()["metrics"]["speculative_decoding"]
    steps = {name: count - before.get(name, 0) for name, count in counted().items() if count != before.get(name, 0)}
    if method == "auto":
        assert steps == told["drafters"]
        return
    name = method.split()[0]
    assert steps.get(name, 0) == told["num_spec_steps"]
    assert (name in steps) == (method != "off")
    assert sum(steps.values()) + told["num_accepted_draft_tokens"] == 39, "the first token is the prompt's"


def test_nobody_waits_for_a_schema_but_those_who_bring_one(loaded: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    begun, gate = threading.Event(), threading.Event()

    def slow(text: str) -> int:
        begun.set()
        assert gate.wait(60)
        return 0

    monkeypatch.setattr("skipstone.serving.grammar.measure_grammar", slow)
    compile_schema = {"type": "json_schema", "json_schema": {"schema": {"enum": ["slow"]}}}
    restricted = {"prompt": "x = ", "max_tokens": 20, "temperature": 0, "response_format": compile_schema}
    with in_thread(lambda: loaded, max_num_seqs=1, max_waiting=2, drain_seconds=5) as nano, ThreadPoolExecutor(2) as pool:
        waiting = [pool.submit(post, nano, **restricted) for _ in range(2)]
        assert begun.wait(60)
        while nano.server._num_compiling < 2:
            time.sleep(0.01)
        third = post(nano, **restricted)
        assert third.status_code == 429
        assert "schemas" in refusal(third)
        assert third.headers["Retry-After"]
        text = post(nano, prompt=TEXTS[0], max_tokens=10, temperature=0).json()["choices"][0]["text"]
        assert text == expected(loaded, TEXTS[0], 10, do_sample=False)
        assert post(nano, "/tokenize", prompt=TEXTS[0]).status_code == 200
        assert not any(one.done() for one in waiting)
        gate.set()
        for one in waiting:
            assert json.loads(one.result().json()["choices"][0]["text"]) == "slow"
        assert nano.server._num_compiling == 0


def test_a_client_that_goes_leaves_no_row_behind(nano: InThread) -> None:
    for streams in (True, False):
        body = {"prompt": TEXTS[0], "max_tokens": 900, "ignore_eos": True, "stream": streams, "speculative": "off"}
        with httpx.Client(base_url=nano.url, timeout=0.2) as rude:
            if streams:
                with rude.stream("POST", "/v1/completions", json=body) as response:
                    next(response.iter_lines())
            else:
                with pytest.raises(httpx.ReadTimeout):
                    rude.post("/v1/completions", json=body)
        began = time.monotonic()
        model_thread = nano.server.model_thread
        while model_thread.scheduler.num_running and time.monotonic() - began < 5:
            time.sleep(0.01)
        assert model_thread.scheduler.num_running == 0


def test_a_client_that_goes_before_anything_is_written_leaves_no_row_behind(loaded: Any) -> None:
    """The updates of its answer are never asked for, so that nothing in them could end it."""

    async def scenario() -> None:
        server = Server(lambda: loaded, ServerSettings(max_num_seqs=1, drain_seconds=0))
        await server.start()
        body = CompletionBody(prompt=TEXTS[0], max_tokens=900, ignore_eos=True, n=2, temperature=0, speculative="off")
        answer, _ = await server.answer(body)
        assert server.model_thread.scheduler.num_running + server.model_thread.scheduler.num_waiting == 2
        server.abandon(answer)
        for _ in range(500):
            if server.model_thread.scheduler.num_running + server.model_thread.scheduler.num_waiting == 0:
                break
            await asyncio.sleep(0.01)
        assert server.model_thread.scheduler.num_running + server.model_thread.scheduler.num_waiting == 0
        assert [choice.finish_reason for choice in answer.choices] == ["cancelled"] * 2
        await server.stop()

    asyncio.run(scenario())


def test_a_key_is_asked_for_and_health_is_public_while_the_model_is_loaded(loaded: Any) -> None:
    gate = threading.Event()

    def load() -> Any:
        gate.wait(30)
        return loaded

    running = InThread(Server(load, ServerSettings(max_num_seqs=1, drain_seconds=1)), api_key=KEY)
    try:
        for _ in range(200):
            try:
                health = running.http.get("/health")
                break
            except httpx.ConnectError:
                time.sleep(0.05)
        assert health.status_code == 503
        assert health.json() == {"status": "loading"}
        headers = {"Authorization": f"Bearer {KEY}"}
        early = running.http.post("/v1/completions", json={"prompt": "a"}, headers=headers)
        assert early.status_code == 503
        assert early.headers["Retry-After"]
        gate.set()
        running.until_ready()
        for path in ("/", "/page/page.js", "/page/page.css"):  # browsers send no key when they open a page
            page = running.http.get(path)
            assert page.status_code == 200
            assert "default-src 'none'" in page.headers["Content-Security-Policy"]
        assert running.http.get("/metrics").status_code == 401
        for wrong in ({}, {"Authorization": "Bearer sk-other"}, {"Authorization": KEY}):
            assert running.http.post("/v1/completions", json={"prompt": "a"}, headers=wrong).status_code == 401
        assert running.http.post("/v1/completions", json={"prompt": "a", "max_tokens": 2}, headers=headers).status_code == 200
    finally:
        gate.set()
        running.stop()


def test_a_model_that_cannot_be_loaded_is_said_in_health_and_nothing_of_it_in_errors() -> None:
    def load() -> Any:
        raise OSError("/a/secret/path is no model")

    running = InThread(Server(load, ServerSettings()))
    try:
        for _ in range(200):
            try:
                if (health := running.http.get("/health")).json()["status"] == "failed":
                    break
            except httpx.ConnectError:
                pass
            time.sleep(0.05)
        assert health.status_code == 503
        answer = running.http.post("/v1/completions", json={"prompt": "a"})
        assert answer.status_code == 503
        assert "secret" not in answer.text
    finally:
        running.stop()
