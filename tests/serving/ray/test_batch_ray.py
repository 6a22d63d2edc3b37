"""A batch on Ray: the answers of one process, line by line, whichever actor dies."""

import os
import secrets
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from skipstone.assets import DRAFTS
from skipstone.serving.batch_files import batch, ray_batch
from skipstone.serving.batch_files.journal import Journal, is_error, journal_of
from skipstone.serving.batch_files.ray_batch import WORKER_DIED, RayOptions, Worker
from skipstone.serving.batch_files.request_lines import RequestFile
from tests.helpers.batches import batch_settings, greedy, many, read, request, write
from tests.helpers.commandline import assert_refused, run

pytestmark = pytest.mark.ray
ray = pytest.importorskip("ray")

MODEL = str(DRAFTS["nano-draft"])
"""Two layers, which an actor has soon."""
CHOSEN = batch_settings(Path(MODEL), "autoregressive", max_num_seqs=2)
COUNT = 24


@pytest.fixture(scope="module", autouse=True)
def _two_processors() -> Iterator[None]:
    """A cluster of this machine for all tests here. Its token is in no file of the user's."""
    quiet: dict[str, Any] = {"log_to_driver": False, "include_dashboard": False}
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("RAY_AUTH_TOKEN", secrets.token_hex(32))
        ray.init(address="local", num_cpus=2, object_store_memory=100 << 20, _node_ip_address="127.0.0.1", **quiet)
        yield
        ray.shutdown()


@pytest.fixture(scope="module")
def lines(tmp_path_factory: pytest.TempPathFactory) -> RequestFile:
    faults = [request("bad", greedy("x", temperature=9)), request("url", greedy("x"), "/v1/embeddings")]
    return RequestFile(write(tmp_path_factory.mktemp("input") / "in.jsonl", [*many(COUNT), *faults]))


@pytest.fixture(scope="module")
def alone(lines: RequestFile, tmp_path_factory: pytest.TempPathFactory) -> bytes:
    """The output of one process."""
    output = tmp_path_factory.mktemp("alone") / "out.jsonl"
    assert batch.run(CHOSEN, output, lines, lambda *_: None) == 2
    return output.read_bytes()


def killing(signal_file: Path) -> type[Worker]:
    """An actor's class: the first actor that begins an eighth request is killed, as by kill -9, in the middle of it."""

    class Killed(Worker):
        calls = 0

        async def answer(self, line: Any) -> Any:
            type(self).calls += 1
            if type(self).calls >= 8:
                try:
                    signal_file.touch(exist_ok=False)
                    os.kill(os.getpid(), signal.SIGKILL)
                except FileExistsError:
                    pass
            return await super().answer(line)

    return Killed


def test_two_actors_answer_as_one_process_does_though_one_is_killed_and_its_lines_are_answered_once_more(
    lines: RequestFile, alone: bytes, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    output, killed, told = tmp_path / "out.jsonl", tmp_path / "killed", list[tuple[int, int]]()
    kept, add = list[int](), Journal.add

    def counted(self: Journal, *several: Any) -> int:
        kept.extend(index for index, _ in several)
        return add(self, *several)

    monkeypatch.setattr(ray_batch, "Worker", killing(killed))
    monkeypatch.setattr(Journal, "add", counted)
    assert ray_batch.run(CHOSEN, RayOptions(actors=2), output, lines, lambda *done: told.append(done)) == 2
    assert killed.exists()
    assert output.read_bytes() == alone
    assert sorted(kept) == list(range(COUNT + 2)), "each once"
    assert told[-1] == (COUNT + 2, 2)
    assert len(told) > 6, "answers are kept as they come"
    assert not journal_of(output).exists()


def poisoned() -> type[Worker]:
    """An actor's class: one request ends it, whatever is beside."""

    class Poisoned(Worker):
        async def answer(self, line: Any) -> Any:
            if line.custom_id == "request-7":
                os.kill(os.getpid(), signal.SIGKILL)
            return await super().answer(line)

    return Poisoned


def test_a_line_that_kills_two_actors_is_given_up_and_no_other_is(
    lines: RequestFile, alone: bytes, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ray_batch, "Worker", poisoned())
    output = tmp_path / "out.jsonl"
    assert ray_batch.run(CHOSEN, RayOptions(actors=1), output, lines, lambda *_: None) == 3
    found, expected = output.read_text().splitlines(), alone.decode().splitlines()
    assert [one for place, one in enumerate(found) if place != 7] == [one for place, one in enumerate(expected) if place != 7]
    given_up = read(output)[7]
    assert is_error(given_up)
    assert (given_up["response"], given_up["error"]["code"]) == (None, WORKER_DIED)


class Stopped(Exception):
    """What ends a run in these tests."""


def test_one_process_goes_on_with_what_a_cluster_has_begun(
    lines: RequestFile, alone: bytes, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    output = tmp_path / "out.jsonl"

    def stop(done: int, _: int) -> None:
        if done > 8:
            raise Stopped

    with pytest.raises(Stopped):
        ray_batch.run(CHOSEN, RayOptions(actors=1), output, lines, stop)
    assert not output.exists()
    told: list[tuple[int, int]] = []
    assert batch.run(CHOSEN, output, lines, lambda *done: told.append(done)) == 2
    assert told[0][0] > 8
    assert output.read_bytes() == alone


def test_a_cluster_without_room_is_one_sentence(lines: RequestFile, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    output = tmp_path / "out.jsonl"
    common = ("batch", lines.path, output, "--ray")
    assert_refused(run(*common, "--cpus-per-actor", 99), "an actor needs 99 CPU and")
    assert_refused(run(*common, "--actors", 9), "--actors 9: the Ray cluster has room for 2")
    monkeypatch.setattr(ray_batch, "MEMORY_PER_WEIGHTS", 1 << 30)
    assert_refused(run(*common), "GiB, and no machine of the Ray cluster has as much")
    assert not output.exists()
    assert not journal_of(output).exists()


def test_a_model_that_an_actor_cannot_load_is_one_sentence(lines: RequestFile, tmp_path: Path) -> None:
    output = tmp_path / "out.jsonl"
    asked = ("--model", MODEL, "--method", "layerskip exit_layer=99")
    result = run("batch", lines.path, output, "--ray", "--actors", 1, *asked)
    assert_refused(result, "exit_layer")
    assert not journal_of(output).exists()
