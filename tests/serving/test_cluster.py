"""Whether a cluster has room for replicas, and what is said where it has none or does not answer; without a cluster."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest

from skipstone.assets import NANO
from skipstone.serving.ray.cluster import NodeShare, connect, count_places, weight_bytes
from skipstone.serving.ray.serve import load_error
from tests.helpers.commandline import run
from tests.helpers.served import free_port


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
    traceback = (
        "Traceback (most recent call last):\n  File 'a.py'\n    raise ValueError(told)\n  ValueError: /model: no such folder\n"
    )
    assert load_error(["", f"The deployment failed to start 2 times:\n{traceback}. Retrying"]) == "/model: no such folder"
    assert load_error(["The deployment waits for a node."]) == ""


@pytest.mark.parametrize("address", ["nowhere", "127.0.0.1:port", "ray://", ":6379", "auto"])
def test_what_is_no_address_is_said(address: str) -> None:
    with pytest.raises(ValueError, match="a Ray address is HOST:PORT"):
        connect(address)


@pytest.mark.parametrize("form", ["127.0.0.1:{}", "ray://127.0.0.1:{}"])
def test_an_address_where_nobody_listens_is_said(form: str) -> None:
    address = form.format(free_port())
    with pytest.raises(ConnectionError, match=f"no Ray cluster answers at {address}: Connection refused"):
        connect(address)


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        ("--replicas 2", "need --ray"),
        ("--ray-address 127.0.0.1:1", "need --ray"),
        ("--cpus-per-replica 2", "need --ray"),
        ("--ray --replicas 2 --min-replicas 1", "--replicas is a number that stays"),
        ("--ray --min-replicas 3 --max-replicas 2", "--min-replicas 3 is more than --max-replicas 2"),
        ("--ray --port 0", "--port 0 is no port"),
        ("--ray --replicas 0", "should be greater than or equal to 1"),
    ],
)
def test_numbers_of_replicas_that_contradict_each_other_are_said(flags: str, said: str) -> None:
    result = run("serve", *flags.split())
    assert result.exit_code == 2
    assert said in result.stderr
    assert result.stderr.count("\n") == 1


def test_without_ray_the_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ray.serve", None)
    result = run("serve", "--ray")
    assert result.exit_code == 2
    assert result.stderr == 'skipstone: --ray needs Ray Serve: pip install "skipstone[ray]"\n'
