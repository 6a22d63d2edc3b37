"""The files of deploy/ against what they speak of. There is no container engine here: nothing of them is started."""

import fnmatch
import json
import re
import shlex
import subprocess
import sys
import tomllib
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from threading import Thread
from typing import Any

import pytest
import yaml
from prometheus_client.parser import text_string_to_metric_families
from typer.main import get_command

from skipstone.cli import app as program
from skipstone.cli.serve import API_KEY
from skipstone.serving import tracing
from skipstone.serving.middleware import PUBLIC_PATHS
from skipstone.serving.server import Server
from skipstone.serving.settings import ServerSettings
from skipstone.utils.files import CACHE
from tests.helpers.served import without_socket
from tests.helpers.snippets import ROOT

DEPLOY = ROOT / "deploy"
BOARD = DEPLOY / "grafana" / "dashboards" / "skipstone.json"
SERVE: Any = get_command(program).commands["serve"]  # pyright: ignore


def parsed(path: str) -> Any:
    return yaml.safe_load((DEPLOY / path).read_text())


def rest(word: str) -> list[str]:
    """The arguments of every instruction of a kind in the Dockerfile. Its lines may be continued."""
    text = re.sub(r"^#.*\n", "", (DEPLOY / "Dockerfile").read_text(), flags=re.MULTILINE).replace("\\\n", " ")
    return [line.split(None, 1)[1] for line in text.splitlines() if line.split(None, 1)[:1] == [word]]


def check_serve(words: list[str]) -> None:
    """AssertionError unless these are options of `skipstone serve` with values that it takes."""
    options = {name for one in SERVE.params for name in one.opts}
    assert {word for word in words if word.startswith("--")} <= options
    values = dict(zip(words[::2], words[1::2], strict=True))
    assert values.get("--log-format", "text") in ("text", "json")
    assert values.get("--port", "8000") == "8000"


def test_every_file_that_is_copied_is_there_and_in_the_context() -> None:
    sources = [word for line in rest("COPY") if "--from" not in line for word in line.split()[:-1]]
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert {"src", "constraints.txt", "pyproject.toml", project["readme"], *project["license-files"]} <= set(sources)
    rules = [line for line in (ROOT / ".dockerignore").read_text().splitlines() if line and not line.startswith("#")]
    assert rules[0] == "*"
    assert all((ROOT / source).exists() and f"!{source}" in rules for source in sources)
    left = [rule.removeprefix("**/") for rule in rules[1:] if not rule.startswith("!")]
    package = (ROOT / "src" / "skipstone" / "engines" / "native" / "csrc").iterdir()
    assert not [path.name for path in package if any(fnmatch.fnmatch(path.name, rule) for rule in left)]
    installs = [line for line in rest("RUN") if "pip install" in line]
    assert all("--constraint constraints.txt" in line for line in installs)
    wanted = [name for line in installs for result in re.findall(r'"\.\[(.+?)\]"', line) for name in result.split(",")]
    assert set(wanted) <= set(project["optional-dependencies"])


def test_the_container_serves_at_the_port_that_it_exposes_as_nobody_in_particular() -> None:
    (entry,), (port,), (user,) = rest("ENTRYPOINT"), rest("EXPOSE"), rest("USER")
    words = json.loads(entry)
    assert words[:2] == ["skipstone", "serve"]
    check_serve(words[2:])
    assert words[words.index("--port") + 1] == port
    assert int(user) > 0
    assert f"--uid {user} " in " ".join(rest("RUN"))
    assert f"{CACHE}=/models" in " ".join(rest("ENV"))
    assert rest("FROM") == ["${BASE} AS build", "${BASE}"]


@pytest.mark.parametrize(("status", "healthy"), [(200, True), (503, False)])
def test_the_health_check_is_that_of_the_server(status: int, healthy: bool) -> None:
    (check,) = rest("HEALTHCHECK")
    command, request = json.loads(check[check.index("CMD") + 3 :]), list[str]()

    class Stub(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            request.append(self.path)
            self.send_response(status)
            self.end_headers()

    with HTTPServer(("127.0.0.1", 0), Stub) as server:
        Thread(target=server.handle_request, daemon=True).start()
        script = command[2].replace(":8000", f":{server.server_port}")
        assert script != command[2]
        run = subprocess.run([sys.executable, "-S", command[1], script], capture_output=True)
    assert (run.returncode == 0) is healthy
    assert request[0] in PUBLIC_PATHS


def test_the_services_of_compose_fit_each_other() -> None:
    compose, scrape = parsed("compose.yaml"), parsed("prometheus.yml")
    services = compose["services"]
    ours = services["skipstone"]
    assert (DEPLOY / ours["build"]["context"] / ours["build"]["dockerfile"]).resolve() == DEPLOY / "Dockerfile"
    arguments = {line.split("=")[0] for line in rest("ARG")}
    cuda = parsed("compose.cuda.yaml")["services"]
    assert set(cuda) == {"skipstone"}
    assert set(ours["build"]["args"]) == arguments
    assert set(cuda["skipstone"]["build"]["args"]) <= arguments
    check_serve(ours["command"])
    assert set(ours["environment"]) == {API_KEY, tracing.ENDPOINTS[1]}
    for service in services.values():
        assert all(port.startswith("127.0.0.1:") for port in service["ports"])
        assert service["cap_drop"] == ["ALL"]
        for volume in service["volumes"]:
            source = volume.split(":")[0]
            assert (DEPLOY / source).exists() if source.startswith(".") else source in compose["volumes"]
    (job,) = scrape["scrape_configs"]
    assert job["static_configs"] == [{"targets": [f"skipstone:{rest('EXPOSE')[0]}"]}]
    secret = Path(job["authorization"]["credentials_file"])
    assert compose["secrets"][secret.name] == {"environment": API_KEY}
    assert secret.name in services["prometheus"]["secrets"]


def exported_labels(loaded: Any) -> dict[str, set[str]]:
    with without_socket(Server(lambda: loaded, ServerSettings(max_num_seqs=2, drain_seconds=5))) as client:
        body = {"prompt": "def add(a, b):\n    return a + b\n" * 3, "max_tokens": 40, "temperature": 0, "ignore_eos": True}
        for method in ("auto", {"method": "layerskip", "exit_layer": 6}):
            assert client.post("/v1/completions", json={**body, "speculative": method}).status_code == 200
        text = client.get("/metrics").text
    result: dict[str, set[str]] = {}
    for sample in (sample for family in text_string_to_metric_families(text) for sample in family.samples):
        result.setdefault(sample.name, set()).update(sample.labels)
    return result


def test_the_dashboard_and_the_server_have_the_same_metrics_and_labels(loaded: Any) -> None:
    board = json.loads(BOARD.read_text())
    expressions = [one["definition"] for one in board["templating"]["list"] if "definition" in one]
    expressions += [target["expr"] for panel in board["panels"] for target in panel["targets"]]
    exported = exported_labels(loaded)
    for expression in expressions:
        names = re.findall(r"skipstone:\w+", expression)
        assert names, expression
        assert set(names) <= set(exported), expression
        labels = {label for inner in re.findall(r"\{(.*?)\}", expression) for label in re.findall(r"(\w+)\s*[=!]", inner)}
        labels |= {one for inner in re.findall(r"(?:by|ignoring) \((.+?)\)", expression) for one in inner.split(", ")}
        labels |= set(re.findall(r"label_values\(\S+, (\w+)\)", expression))
        assert labels <= set.union(*(exported[name] for name in names)) | {"le"}, expression
        assert expression.count("(") == expression.count(")")
    shown, ends = " ".join(expressions), ("_created", "_sum", "_count")
    assert {name for name in exported if not name.endswith(ends) and name not in shown} == set()


def test_the_unit_runs_the_server_and_gives_texts_time_to_end() -> None:
    lines = [line for line in (DEPLOY / "skipstone.service").read_text().splitlines() if not line.startswith("#")]
    told = dict(line.split("=", 1) for line in lines if "=" in line)
    words = [word for word in shlex.split(told["ExecStart"]) if not word.startswith("$")]
    assert (Path(words[0]).name, words[1]) == ("skipstone", "serve")
    check_serve(words[2:])
    (drain,) = [one.default for one in SERVE.params if one.name == "drain_timeout"]
    assert int(told["TimeoutStopSec"]) > drain
    assert int(parsed("compose.yaml")["services"]["skipstone"]["stop_grace_period"].rstrip("s")) > drain
    assert any(f"{CACHE}=/var/cache/{told['CacheDirectory']}/skipstone" in line for line in lines)
    assert f"/var/cache/{told['CacheDirectory']}" == told["WorkingDirectory"]
