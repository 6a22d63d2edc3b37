"""Several replicas without a cluster: the gateway, the names of conversations, the places of a cluster."""

import asyncio
import json
import sys
from collections.abc import AsyncGenerator
from pathlib import Path
from typing import Any

import httpx
import pytest

from skipstone.assets import NANO
from skipstone.serving.errors import RequestError
from skipstone.serving.middleware import MAX_BODY_BYTES, AccessMiddleware
from skipstone.serving.ray.cluster import NodeShare, connect, count_places, weight_bytes
from skipstone.serving.ray.gateway import MAX_ATTEMPTS, CallReplica, Gateway, ReplicaLost
from skipstone.serving.ray.serve import load_error
from skipstone.serving.ray.session_affinity import HEADER, PREFIX_LENGTH, session_id
from tests.helpers.commandline import run
from tests.helpers.served import free_port

Message = dict[str, Any]
START = {"type": "http.response.start", "status": 200, "headers": [(b"content-type", b"text/event-stream")]}
PLAIN = {**START, "headers": [(b"content-type", b"application/json")]}


def part(text: str, more: bool = True) -> Message:
    return {"type": "http.response.body", "body": text.encode(), "more_body": more}


class Replicas:
    """Each request is answered by the next of some scripts: messages, or an exception. asked: what they were told."""

    def __init__(self, *scripts: list[Any], running: int = 2) -> None:
        self.scripts, self.asked, self.running = list(scripts), list[tuple[dict[str, Any], bytes, str]](), running

    async def ask(self, scope: dict[str, Any], body: bytes, named: str) -> AsyncGenerator[Message, None]:
        self.asked.append((scope, body, named))
        for one in self.scripts.pop(0):
            if isinstance(one, Exception):
                raise one
            yield one

    async def count(self) -> int:
        return self.running


def front(replicas: Replicas) -> Gateway:
    ask: CallReplica = replicas.ask
    return Gateway(ask, replicas.count)


SCOPE = {"type": "http", "method": "POST", "path": "/v1/completions", "headers": []}


def sent(replicas: Replicas, method: str = "POST", path: str = "/v1/completions", key: str | None = None, **more: Any) -> Any:
    async def go() -> httpx.Response:
        transport = httpx.ASGITransport(AccessMiddleware(front(replicas), key), raise_app_exceptions=False)
        async with httpx.AsyncClient(transport=transport, base_url="http://front") as client:
            return await client.request(method, path, **more)

    return asyncio.run(go())


def test_a_replica_gets_the_request_and_the_client_its_answer() -> None:
    replicas = Replicas([START, part("data: a\n\n"), part("data: b\n\n"), part("", more=False)])
    body = {"prompt": "x" * 400}
    answer = sent(replicas, json=body, params={"a": "1"})
    assert (answer.status_code, answer.text) == (200, "data: a\n\ndata: b\n\n")
    assert answer.headers["content-type"] == "text/event-stream"
    ((scope, came, named),) = replicas.asked
    assert (scope["method"], scope["path"], scope["query_string"]) == ("POST", "/v1/completions", b"a=1")
    assert json.loads(came) == body
    assert named == session_id([], came) != ""


def test_a_request_of_which_nothing_was_seen_is_asked_once_more() -> None:
    replicas = Replicas([START, ReplicaLost()], [START, part("data: a\n\n", more=False)])
    assert sent(replicas).text == "data: a\n\n"
    assert len(replicas.asked) == MAX_ATTEMPTS == 2
    assert replicas.asked[0] == replicas.asked[1]


def test_after_that_or_where_all_are_taken_the_client_is_told_to_come_again() -> None:
    answer = sent(Replicas([ReplicaLost()], [START, ReplicaLost()]))
    assert (answer.status_code, answer.headers["retry-after"]) == (503, "5")
    assert answer.json()["error"]["message"] == "the replica that was to answer has ended"
    answer = sent(Replicas([RequestError(429, "full", retry_after=1)]))
    assert (answer.status_code, answer.headers["retry-after"]) == (429, "1")
    assert answer.json()["error"]["type"] == "rate_limit_error"


def test_a_stream_that_was_seen_ends_with_an_error_and_is_not_begun_again() -> None:
    replicas = Replicas([START, part("data: a\n\n"), ReplicaLost()])
    lines = sent(replicas).text.splitlines()
    assert lines[0] == "data: a"
    assert json.loads(lines[2].removeprefix("data: "))["error"]["code"] == 503
    assert "[DONE]" not in lines[2]
    assert len(replicas.asked) == 1


@pytest.mark.parametrize("answer", [[START, part("data: a\n\n"), part("", more=False)], [PLAIN, part("", more=False)]])
def test_a_replica_that_is_lost_after_its_answer_changes_nothing(answer: list[Message]) -> None:
    came = list[Message]()

    async def send(message: Message) -> None:
        came.append(message)

    async def receive() -> Message:
        return {"type": "http.request", "body": b"", "more_body": False}

    asyncio.run(front(Replicas([*answer, ReplicaLost()]))(SCOPE, receive, send))
    assert came == answer


def test_an_answer_that_is_no_stream_is_not_passed_off_as_whole() -> None:
    async def send(message: Message) -> None:
        assert not message.get("body") or message["more_body"], "nothing says that the answer is whole"

    async def receive() -> Message:
        return {"type": "http.request", "body": b"", "more_body": False}

    answer = front(Replicas([PLAIN, part('{"a":'), ReplicaLost()]))(SCOPE, receive, send)
    with pytest.raises(RuntimeError, match="in the middle of an answer"):
        asyncio.run(answer)


def test_health_counts_replicas_and_asks_none() -> None:
    for running, status in ((2, 200), (0, 503)):
        replicas = Replicas(running=running)
        answer = sent(replicas, "GET", "/health", key="sk")
        assert (answer.status_code, answer.json()["replicas"]) == (status, running)
        assert replicas.asked == []


def test_who_has_no_key_and_what_is_too_long_come_to_no_replica() -> None:
    replicas = Replicas()
    assert sent(replicas, key="sk").status_code == 401
    assert sent(replicas, content=b"x" * (MAX_BODY_BYTES + 1)).status_code == 413

    async def parts() -> AsyncGenerator[bytes, None]:
        for _ in range(MAX_BODY_BYTES // 2**20 + 1):
            yield b"x" * 2**20

    assert sent(replicas, content=parts()).status_code == 413, "a body that does not say how long it is"
    assert replicas.asked == []


def test_a_client_that_goes_before_its_request_is_whole_is_no_request() -> None:
    replicas = Replicas()

    async def receive() -> Message:
        return {"type": "http.disconnect"}

    asyncio.run(front(replicas)(SCOPE, receive, lambda message: pytest.fail(f"nobody reads {message}")))
    assert replicas.asked == []


def of(body: Any, **headers: str) -> str:
    sent = [(name.replace("_", "-").encode(), value.encode()) for name, value in headers.items()]
    return session_id(sent, json.dumps(body).encode())


SYSTEM = {"role": "system", "content": "Answer in one sentence."}
FIRST = {"role": "user", "content": "What is a skipstone?"}
LATER = [{"role": "assistant", "content": "A stone."}, {"role": "user", "content": "Why?"}]


def test_the_turns_of_a_chat_have_one_name_and_other_chats_have_others() -> None:
    chat = of({"messages": [SYSTEM, FIRST], "temperature": 0})
    assert len(chat) == 32
    assert chat == of({"messages": [SYSTEM, FIRST, *LATER], "max_tokens": 9})
    assert chat not in (of({"messages": [FIRST]}), of({"messages": [SYSTEM, {**FIRST, "content": "What is a stone?"}]}))
    with_parts = {"role": "user", "content": [{"type": "text", "text": "What?"}]}
    assert of({"messages": [with_parts]}) == of({"messages": [with_parts, *LATER]}) != ""
    response = of({"instructions": "Be short.", "input": [FIRST]})
    assert response == of({"instructions": "Be short.", "input": [FIRST, *LATER]}) != ""
    assert response != of({"instructions": "Be long.", "input": [FIRST]})
    assert of({"input": "What?"}) != ""


@pytest.mark.parametrize("prompt", ["def add(a, b):\n" * 40, list(range(400))])
def test_a_bare_prompt_is_named_by_a_beginning_that_later_ones_repeat(prompt: Any) -> None:
    long, longer = prompt[: PREFIX_LENGTH + 1], prompt[: PREFIX_LENGTH + 40]
    assert of({"prompt": long}) == of({"prompt": longer}) != ""
    assert of({"prompt": prompt[: PREFIX_LENGTH - 1]}) == "", "the next prompt may be longer, and would have another name"
    changed = prompt[:5] + prompt[6:]
    assert of({"prompt": changed}) != of({"prompt": long})


def test_what_the_client_says_counts_before_the_text_and_the_header_before_all() -> None:
    one, other = {"messages": [FIRST]}, {"messages": [SYSTEM, FIRST]}
    assert of(one, x_session_id="a") == of(other, x_session_id="a") != of(one, x_session_id="b")
    assert of({**one, "prompt_cache_key": "a"}) == of({**other, "prompt_cache_key": "a", "user": "b"}) != of(one)
    assert of({**one, "user": "a"}) == of({**other, "user": "a"})
    assert of({**one, "user": "a"}, x_session_id="a") == of(other, x_session_id="a")
    assert HEADER == "x-session-id"


@pytest.mark.parametrize(
    "body",
    [b"", b"{", b"\xff", b"[1]", b"[" * 100_000, b'{"messages": 3}', b'{"messages": [3]}', b'{"input": []}', b'{"prompt": {}}'],
    ids=range(9),
)
def test_a_request_that_shows_no_conversation_has_no_name(body: bytes) -> None:
    assert session_id([], body) == ""
    assert of({"prompt": "a", "prompt_cache_key": "", "user": ""}, x_session_id="") == "", "an empty name is none"


def node(cpus: float, memory: float, gpus: float = 0, alive: bool = True) -> dict[str, Any]:
    resources = {"CPU": cpus, "memory": memory} | ({"GPU": gpus} if gpus else {})
    return {"Alive": alive, "Resources": resources}


def test_a_node_has_room_for_as_many_replicas_as_its_scarcest_resource_allows() -> None:
    nodes = [node(4, 10e9), node(3, 5e9), node(64, 1e12, alive=False), {"Alive": True, "Resources": {}}]
    assert count_places(nodes, NodeShare(cpus=1, memory=0)) == 7
    assert count_places(nodes, NodeShare(cpus=2, memory=0)) == 2 + 1, "half a replica on each of two nodes is none"
    assert count_places(nodes, NodeShare(cpus=1, memory=4 * 10**9)) == 2 + 1
    assert count_places(nodes, NodeShare(cpus=1, gpus=1)) == 0
    assert count_places([node(4, 10e9, gpus=2)], NodeShare(cpus=1, gpus=1)) == 2


def test_weights_are_those_of_the_files(tmp_path: Path) -> None:
    (tmp_path / "a.safetensors").write_bytes(b"x" * 10)
    (tmp_path / "b.bin").write_bytes(b"x" * 5)
    (tmp_path / "README.md").write_bytes(b"x" * 100)
    assert weight_bytes(str(tmp_path)) == 15
    assert weight_bytes(str(tmp_path / "a.safetensors")) == 10
    assert weight_bytes("owner/name") == 0
    assert weight_bytes(None) == sum(file.stat().st_size for file in NANO.glob("*.safetensors"))


def test_why_a_replica_does_not_start_is_the_last_line_of_its_traceback() -> None:
    traceback = "Traceback (most recent call last):\n  File 'a.py'\n  ValueError: /model: no such folder\n"
    assert load_error(["", f"The deployment failed to start 2 times:\n{traceback}. Retrying"]) == "/model: no such folder"
    assert load_error(["The deployment waits for a node."]) == ""


def test_what_is_no_address_or_where_nobody_listens_is_said() -> None:
    for address in ("nowhere", "127.0.0.1:port", "ray://", ":6379", "auto"):
        with pytest.raises(ValueError, match="a Ray address is HOST:PORT"):
            connect(address)
    for form in ("127.0.0.1:{}", "ray://127.0.0.1:{}"):
        address = form.format(free_port())
        with pytest.raises(ConnectionError, match=f"no Ray cluster answers at {address}: Connection refused"):
            connect(address)


def test_without_ray_the_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ray.serve", None)
    result = run("serve", "--ray")
    assert result.exit_code == 2
    assert result.stderr == 'skipstone: --ray needs Ray Serve: pip install "skipstone[ray]"\n'
