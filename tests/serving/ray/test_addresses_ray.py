"""What is said of an address where no cluster answers, by a process that is connected to none."""

import socket
from pathlib import Path

import pytest

from skipstone.serving.ray import cluster
from tests.helpers.batches import greedy, request, write
from tests.helpers.commandline import assert_refused, run

pytestmark = pytest.mark.ray
pytest.importorskip("ray")


def test_where_somebody_listens_and_says_nothing_it_is_one_sentence_soon(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cluster, "CONNECT_TIMEOUT_SECONDS", 1.0)
    for name, value in (cluster.CONNECT_VARIABLES | cluster.NO_USAGE_STATS).items():
        monkeypatch.setenv(name, value)  # they are gone again when a cluster is started by this process
    path = write(tmp_path / "in.jsonl", [request("a", greedy("x"))])
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        one.listen()
        address = f"127.0.0.1:{one.getsockname()[1]}"
        result = run("batch", path, tmp_path / "out.jsonl", "--ray", "--address", address)
    assert_refused(result, f"skipstone: no Ray cluster answers at {address}: what listens there does not answer within 1 s\n")
    assert list(tmp_path.iterdir()) == [path]
