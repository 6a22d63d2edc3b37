"""The HTTP routes over a real socket, with the bundled model: what OpenAI's client, and a rude one, get to see."""

import asyncio
import json
import re
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import fields
from typing import Any

import httpx
import pytest
import torch

import skipstone
from skipstone.engines.model_runner import ModelRunner
from skipstone.methods.auto.auto import Auto
from skipstone.serving.api_schemas import CompletionBody
from skipstone.serving.request_parser import SERVER_SETTINGS, RequestParser
from skipstone.serving.server import Server
from skipstone.serving.settings import ServerSettings
from tests.helpers.hostile import nested
from tests.helpers.served import InThread, in_thread, refusal

TEXTS = [
    "def add(a, b):\n    return",
    "import os\n\n\ndef main():\n",
    "class Stack:\n    def __init__(self):\n",
    "x = [1, 2, 3]\n",
]
KEY = "sk-secret"


@pytest.fixture(scope="module")
def client(nano: InThread) -> Any:
    from openai import OpenAI  # in two seconds, which no other test shall take

    return OpenAI(base_url=f"{nano.url}/v1", api_key="none", max_retries=0)


def expected(loaded: Any, text: str, new: int, **more: Any) -> str:
    model, tokenizer = loaded
    return skipstone.generate(model, text, tokenizer=tokenizer, max_new_tokens=new, **more).text


def post(nano: InThread, path: str = "/v1/completions", **body: Any) -> httpx.Response:
    return nano.http.post(path, json=body)


def test_answers_of_many_clients_at_once_are_those_of_generate(loaded: Any, nano: InThread) -> None:
    def answer(text: str) -> str:
        return post(nano, prompt=text, max_tokens=30, temperature=0).json()["choices"][0]["text"]

    with ThreadPoolExecutor(8) as pool:
        result = list(pool.map(answer, TEXTS * 3))
    assert result == [expected(loaded, text, 30, do_sample=False) for text in TEXTS] * 3


def test_a_stream_has_the_same_text_and_ends_with_the_usage(loaded: Any, client: Any) -> None:
    body: dict[str, Any] = {"model": "skipstone-nano", "prompt": TEXTS[0], "max_tokens": 30, "temperature": 0}
    chunks = list(client.completions.create(**body, stream=True, stream_options={"include_usage": True}))
    choices = [choice for chunk in chunks for choice in chunk.choices]
    assert "".join(choice.text for choice in choices) == expected(loaded, TEXTS[0], 30, do_sample=False)
    assert [bool(choice.finish_reason) for choice in choices] == [False] * (len(choices) - 1) + [True]
    assert chunks[-1].usage is not None
    assert chunks[-1].usage.completion_tokens <= 30
    assert len({chunk.id for chunk in chunks}) == 1


def test_a_seed_says_what_is_drawn_and_every_choice_has_another(loaded: Any, nano: InThread) -> None:
    sampling: dict[str, Any] = {"temperature": 1.0, "top_p": 0.95, "seed": 7}
    three, again = (post(nano, prompt=TEXTS[3], max_tokens=25, n=3, **sampling).json()["choices"] for _ in range(2))
    assert three == again
    assert len({choice["text"] for choice in three}) > 1
    assert three[0]["text"] == expected(loaded, TEXTS[3], 25, do_sample=True, **sampling)


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


def test_log_probabilities_are_those_of_the_model(loaded: Any, nano: InThread) -> None:
    info = post(nano, prompt=TEXTS[0], max_tokens=12, temperature=0, logprobs=3).json()["choices"][0]["logprobs"]
    prompt = loaded[1](TEXTS[0])["input_ids"]
    new: Any = skipstone.generate(loaded[0], torch.tensor([prompt]), max_new_tokens=12, do_sample=False).new_tokens
    right = chances(loaded, prompt + new[0], len(prompt))
    own = right.gather(-1, torch.tensor(new[0])[:, None])[:, 0]
    assert info["token_logprobs"] == pytest.approx(own.tolist(), abs=1e-3)
    assert max(map(len, info["top_logprobs"])) <= 3
    best = [max(each.values()) for each in info["top_logprobs"]]
    assert best == pytest.approx(right.max(-1).values.tolist(), abs=1e-3)


def test_penalties_and_biases_change_what_is_written(nano: InThread, loaded: Any) -> None:
    token = loaded[1](TEXTS[0])["input_ids"][1]
    body: dict[str, Any] = {"prompt": TEXTS[0], "max_tokens": 4, "temperature": 0, "logit_bias": {str(token): 30}}
    biased = post(nano, **body).json()["choices"][0]["text"]
    assert biased == loaded[1].decode([token] * 4)
    penalties = {"presence_penalty": 2.0, "frequency_penalty": 2.0, "repetition_penalty": 9.0}
    assert post(nano, **body, **penalties).json()["choices"][0]["text"] != biased


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


def test_any_object_and_what_is_no_schema(nano: InThread) -> None:
    answer = post(nano, prompt="x = ", max_tokens=60, temperature=0, response_format={"type": "json_object"}).json()
    assert answer["choices"][0]["text"].lstrip().startswith("{")
    for schema, more, said in (
        ({"type": "nothing that there is"}, {}, "response_format"),
        (nested(40, "properties"), {}, "deep"),
        ({"enum": ["a" * 70_000]}, {}, "characters"),
        ({"type": "integer"}, {"ignore_eos": True}, "ignore_eos"),
    ):
        format_ = {"type": "json_schema", "json_schema": {"schema": schema}}
        response = post(nano, prompt="x = ", response_format=format_, **more)
        assert (response.status_code, said in refusal(response)) == (400, True)
    assert "missing" in refusal(post(nano, prompt="x = ", response_format={"type": "json_schema"}))


@pytest.mark.parametrize(
    ("body", "said"),
    [
        ({"prompt": "a", "tempreature": 1}, "tempreature: this field is not supported"),
        ({"prompt": "a", "n": 1000}, "n: "),
        ({"prompt": "a", "temperature": "hot"}, "temperature: "),
        ({"prompt": "a", "logit_bias": {"9" * 5000: 1}}, "digit"),
        ({"prompt": "a", "max_tokens": 10**6}, "tokens"),
        ({"prompt": "a", "max_tokens": 0}, "max_tokens=0 needs echo"),
        ({"prompt": "a" * 300_000}, "characters"),
        ({"prompt": [10**6]}, "out of range"),
        ({"prompt": "a", "stop": [""]}, "stop"),
        ({"prompt": "a", "logit_bias": {"x": 1}}, "logit_bias"),
        ({"prompt": "a", "speculative": "warp_drive"}, "warp_drive"),
        ({"prompt": "a", "speculative": "auto log=/tmp/x"}, "files"),
        ({"prompt": "a", "speculative": "auto candidates='swift profile=/etc/passwd'"}, "files"),
        ({"prompt": "a", "speculative": {"method": "speculative", "draft_model": "/etc"}}, "files"),
        ({"prompt": "a", "speculative": "speculative draft-model=/srv/x"}, "files"),
        ({"prompt": "a", "speculative": "layerskip exit_layer=4 draft-vocabulary=/etc/passwd"}, "files"),
        ({"prompt": "a", "speculative": '{"method": "self_speculative", "pro\\u0066ile": "/etc/passwd"}'}, "files"),
        ({"prompt": "a", "speculative": "speculative draft_device=cpu:7"}, "load models"),
        ({"prompt": "a", "speculative": "auto candidates='speculative draft_dtype=float16'"}, "load models"),
        ({"prompt": "a", "speculative": "prompt_lookup prompt_lookup_max=100000"}, "at most 64"),
        ({"prompt": "a", "speculative": "auto max_extra_memory_bytes=1000"}, "limit memory, are the server's"),
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
    settings = [one for method in skipstone.METHODS.values() for one in fields(method)]
    names = {one.name for one in settings if re.search("file|folder|path|hub", str(dict(one.metadata)))}
    assert names == set(SERVER_SETTINGS)


def test_a_request_for_auto_has_the_server_s_limit_of_memory(loaded: Any) -> None:
    model, tokenizer = loaded
    parser = RequestParser(ModelRunner(model), tokenizer, Auto(max_extra_memory_bytes=1000), 128)
    for wanted in ("auto", {"method": "auto", "slack": 0.1}):
        method = parser.parse_method(wanted)
        assert isinstance(method, Auto)
        assert method.max_extra_memory_bytes == 1000


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


def test_what_the_server_says_of_itself(nano: InThread, client: Any) -> None:
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
    layerskip = {"method": "layerskip", "exit_layer": 6}
    answer = post(nano, prompt=TEXTS[1], max_tokens=30, temperature=0, speculative=layerskip, return_metrics=True).json()
    written, read, ended, drafted = (nano.counted(name) - was for name, was in zip(names, before, strict=True))
    assert (written, read) == (answer["usage"]["completion_tokens"], answer["usage"]["prompt_tokens"])
    assert ended == 1
    assert drafted == answer["timings"]["draft_n"] > 0
    assert nano.at_work() == 0


@pytest.mark.parametrize("method", ["prompt_lookup", "off", "auto"])
def test_steps_are_counted_by_what_drafted(nano: InThread, method: str) -> None:
    def counted() -> dict[str, float]:
        lines = [line for line in nano.http.get("/metrics").text.splitlines() if "spec_decode_steps_total{" in line]
        return {line.split('method="')[1].split('"')[0]: float(line.rsplit(" ", 1)[1]) for line in lines}

    before = counted()
    body = {"prompt": TEXTS[1], "max_tokens": 40, "temperature": 0, "ignore_eos": True}
    info = post(nano, **body, speculative=method, return_metrics=True).json()["metrics"]["speculative_decoding"]
    steps = {name: count - before.get(name, 0) for name, count in counted().items() if count != before.get(name, 0)}
    if method == "auto":
        assert steps == info["drafters"]
        return
    name = method.split()[0]
    assert steps.get(name, 0) == info["num_spec_steps"]
    assert (name in steps) == (method != "off")
    assert sum(steps.values()) + info["num_accepted_draft_tokens"] == 39, "the first token is the prompt's"


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


def test_a_client_that_goes_before_anything_is_written_leaves_no_row_behind(loaded: Any) -> None:
    """The updates of its answer are never asked for, so that nothing in them could end it."""

    async def scenario() -> None:
        server = Server(lambda: loaded, ServerSettings(max_num_seqs=1, drain_seconds=0))
        await server.start()
        scheduler = server.model_thread.scheduler
        body = CompletionBody(prompt=TEXTS[0], max_tokens=900, ignore_eos=True, n=2, temperature=0, speculative="off")
        answer, _ = await server.answer(body)
        assert scheduler.num_running + scheduler.num_waiting == 2
        server.abandon(answer)
        end = time.monotonic() + 5
        while scheduler.num_running + scheduler.num_waiting:
            assert time.monotonic() < end
            await asyncio.sleep(0.01)
        assert [choice.finish_reason for choice in answer.choices] == ["cancelled"] * 2
        await server.stop()

    asyncio.run(scenario())


def health_when(running: InThread, status: str) -> httpx.Response:
    for _ in range(200):
        try:
            if (health := running.http.get("/health")).json()["status"] == status:
                return health
        except httpx.ConnectError:
            pass
        time.sleep(0.05)
    raise AssertionError(f"the server is never {status}")


def test_a_key_is_asked_for_and_health_is_public_while_the_model_is_loaded(loaded: Any) -> None:
    gate = threading.Event()

    def load() -> Any:
        gate.wait(30)
        return loaded

    running = InThread(Server(load, ServerSettings(max_num_seqs=1, drain_seconds=1)), api_key=KEY)
    try:
        assert health_when(running, "loading").status_code == 503
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
        assert running.http.get("/page/../playground.py").status_code in (401, 404)
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
        assert health_when(running, "failed").status_code == 503
        answer = running.http.post("/v1/completions", json={"prompt": "a"})
        assert answer.status_code == 503
        assert "secret" not in answer.text
    finally:
        running.stop()


TEXT = "class Stack:\n    def __init__(self):\n        self.items = []\n"
LONG = [100 + number % 300 for number in range(700)]


def chances(loaded: Any, ids: list[int], begin: int = 1) -> torch.Tensor:
    """Log-probabilities [T - begin, V] of the tokens from a place on, by transformers."""
    with torch.inference_mode():
        return loaded[0](torch.tensor([ids])).logits[0, begin - 1 : -1].float().log_softmax(-1)


@pytest.mark.parametrize("prompt", [TEXT, LONG], ids=["text", "tokens"])
def test_the_log_probabilities_of_a_prompt_are_those_of_the_model(nano: InThread, loaded: Any, prompt: Any) -> None:
    ids = loaded[1](prompt)["input_ids"] if isinstance(prompt, str) else prompt
    body = {"prompt": prompt, "max_tokens": 1, "temperature": 0, "echo": True, "logprobs": 2}
    info = post(nano, **body).json()["choices"][0]["logprobs"]
    right = chances(loaded, ids)
    assert {len(each) for each in info.values()} == {len(ids) + 1}
    assert info["token_logprobs"][0] is info["top_logprobs"][0] is None
    own = right.gather(-1, torch.tensor(ids[1:])[:, None])[:, 0]
    assert info["token_logprobs"][1:-1] == pytest.approx(own.tolist(), abs=1e-3)
    best = [max(each.values()) for each in info["top_logprobs"][1:-1]]
    assert best == pytest.approx(right.max(-1).values.tolist(), abs=1e-3)
    special = loaded[1].all_special_tokens  # are no text
    texts = ["" if text in special else text for text in info["tokens"]]
    assert info["text_offset"] == [len("".join(texts[:place])) for place in range(len(ids) + 1)]


MARKED = "é x 你好 😀\n"


def test_offsets_are_places_in_the_text(nano: InThread, loaded: Any) -> None:
    tokenizer = loaded[1]
    ids = tokenizer(MARKED)["input_ids"]
    assert ids[0] in tokenizer.all_special_ids
    assert len(ids) > len(MARKED) + 1
    body = {"prompt": MARKED, "max_tokens": 4, "temperature": 0, "echo": True, "logprobs": 1}
    choice = nano.http.post("/v1/completions", json=body).json()["choices"][0]
    decoded = [tokenizer.decode(ids[:place], skip_special_tokens=True).rstrip("\ufffd") for place in range(len(ids) + 1)]
    assert choice["logprobs"]["text_offset"][: len(ids) + 1] == [len(text) for text in decoded]
    new = zip(choice["logprobs"]["text_offset"], choice["logprobs"]["tokens"], strict=True)
    assert all(choice["text"][place:].startswith(text) for place, text in list(new)[len(ids) :])


def test_a_character_that_the_prompt_begins_and_the_answer_ends_is_whole(nano: InThread, loaded: Any) -> None:
    tokenizer = loaded[1]
    *begin, first, last = tokenizer("a 你")["input_ids"]
    assert tokenizer.decode([first]) == tokenizer.decode([last]) == "\ufffd"
    for token, completed, place in ((last, "你", 2), (tokenizer.convert_tokens_to_ids("b"), "b", 3)):
        body = {"prompt": [*begin, first], "max_tokens": 1, "temperature": 0, "logit_bias": {str(token): 100}}
        plain = nano.http.post("/v1/completions", json=body).json()["choices"][0]["text"]
        assert plain == completed
        echoed = {**body, "echo": True, "logprobs": 0}
        choice = nano.http.post("/v1/completions", json=echoed).json()["choices"][0]
        assert choice["text"] == tokenizer.decode([*begin, first, token], skip_special_tokens=True)
        assert "".join(chunk["text"] for chunk in nano.choices(echoed)) == choice["text"]
        assert choice["logprobs"]["text_offset"][-1] == place


@pytest.mark.parametrize("new", [0, 9])
def test_an_echo_is_the_prompt_and_what_is_written_without_it_streamed_too(nano: InThread, new: int) -> None:
    prompts = [TEXT, "import os\n"]
    body: dict[str, Any] = {"prompt": prompts, "n": 2, "max_tokens": new, "temperature": 0, "logprobs": 1}
    plain = [one["text"] for one in post(nano, **body).json()["choices"]] if new else [""] * 4
    body["echo"] = True
    whole = post(nano, **body).json()["choices"]
    assert [one["text"] for one in whole] == [prompts[place // 2] + text for place, text in enumerate(plain)]
    chunks = nano.choices(body)
    for index, prompt in enumerate(text for text in prompts for _ in range(2)):
        own = [chunk for chunk in chunks if chunk["index"] == index]
        assert own[0]["text"] == prompt
        assert "".join(chunk["text"] for chunk in own) == whole[index]["text"]
        info = [chunk["logprobs"] for chunk in own if chunk["logprobs"]]
        for name, expected in whole[index]["logprobs"].items():
            assert [one for each in info for one in each[name]] == expected
        assert own[-1]["finish_reason"] == whole[index]["finish_reason"] == "length"


def test_of_no_new_tokens_there_is_the_prompt(nano: InThread, loaded: Any) -> None:
    ids = loaded[1](TEXT)["input_ids"]
    for more in ({}, {"logprobs": 0}, {"n": 2}):
        body = {"prompt": TEXT, "max_tokens": 0, "echo": True, **more}
        answer = nano.http.post("/v1/completions", json=body).json()
        assert [one["text"] for one in answer["choices"]] == [TEXT] * more.get("n", 1)
        assert (answer["usage"]["prompt_tokens"], answer["usage"]["completion_tokens"]) == (len(ids), 0)
        info = answer["choices"][0]["logprobs"]
        assert (info is None) is ("logprobs" not in more)
        if info is not None:
            own = chances(loaded, ids).gather(-1, torch.tensor(ids[1:])[:, None])[:, 0]
            assert info["token_logprobs"][1:] == pytest.approx(own.tolist(), abs=1e-3)
    body = {"prompt": [100], "max_tokens": 1, "echo": True, "logprobs": 1}
    info = post(nano, **body).json()["choices"][0]["logprobs"]
    assert (info["token_logprobs"][0], len(info["tokens"])) == (None, 2)
    assert nano.at_work() == 0
