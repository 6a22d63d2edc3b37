"""The files of deploy/ against what they speak of. There is no container engine here: nothing of them is started."""

from __future__ import annotations

import fnmatch
import importlib
import json
import re
import shlex
import shutil
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
from starlette.testclient import TestClient
from typer.main import get_command

import skipstone
from skipstone.cli import app as program
from skipstone.cli.serve import API_KEY
from skipstone.serving import tracing
from skipstone.serving.app import make_app
from skipstone.serving.middleware import PUBLIC_PATHS
from skipstone.serving.server import Server
from skipstone.serving.settings import ServerSettings
from skipstone.utils.files import CACHE
from tests.helpers.snippets import ROOT

DEPLOY = ROOT / "deploy"
BOARD = DEPLOY / "grafana" / "dashboards" / "skipstone.json"
MADE = {"le"}
"""Labels that Prometheus' histograms bring."""


def parsed(path: str) -> Any:
    return yaml.safe_load((DEPLOY / path).read_text())


def instructions() -> list[tuple[str, str]]:
    """The Dockerfile's instructions, each on one line, as (word, rest)."""
    text = re.sub(r"^#.*\n", "", (DEPLOY / "Dockerfile").read_text(), flags=re.MULTILINE).replace("\\\n", " ")
    return [(line.split(None, 1)[0], line.split(None, 1)[1]) for line in text.splitlines() if line.strip()]


def rest(word: str) -> list[str]:
    """What follows every instruction of a kind."""
    return [rest for found, rest in instructions() if found == word]


def options() -> set[str]:
    """Of `skipstone serve`."""
    command: Any = get_command(program)
    return {name for parameter in command.commands["serve"].params for name in parameter.opts}


def check_serve(words: list[str]) -> None:
    """AssertionError unless these are options of `skipstone serve` with values that it takes."""
    assert {word for word in words if word.startswith("--")} <= options()
    values = dict(zip(words[::2], words[1::2], strict=True))
    assert values.get("--log-format", "text") in ("text", "json")
    assert values.get("--port", "8000") == "8000"


# ---------------------------------------------------------------------------------------------------------- container


def test_every_file_that_is_copied_is_there_and_in_the_context() -> None:
    sources = [word for line in rest("COPY") if "--from" not in line for word in line.split()[:-1]]
    assert "src" in sources
    assert "constraints.txt" in sources
    rules = [line for line in (ROOT / ".dockerignore").read_text().splitlines() if line and not line.startswith("#")]
    assert rules[0] == "*"
    kept = {rule[1:] for rule in rules if rule.startswith("!")}
    for source in sources:
        assert (ROOT / source).exists(), source
        assert source in kept, source
    left = [rule.removeprefix("**/") for rule in rules[1:] if not rule.startswith("!")]
    package = (ROOT / "src" / "skipstone" / "engines" / "native" / "csrc").iterdir()
    assert not [path.name for path in package if any(fnmatch.fnmatch(path.name, rule) for rule in left)]


def test_extras_and_pinned_versions_exist() -> None:
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    installs = [line for line in rest("RUN") if "pip install" in line]
    assert all("--constraint constraints.txt" in line for line in installs)
    wanted = [name for line in installs for found in re.findall(r'"\.\[(.+?)\]"', line) for name in found.split(",")]
    assert wanted == ["serve", "telemetry"]
    pinned = {line.split("==")[0].lower().replace("_", "-") for line in (ROOT / "constraints.txt").read_text().splitlines()}
    for name in wanted:
        assert {re.split(r"[>=<\[]", one)[0] for one in extras[name]} <= pinned


def test_modules_that_are_run_exist() -> None:
    modules = re.findall(r"python -m (\S+) ?(--\S+)?", " ".join(rest("RUN")))
    ours = [(name, option) for name, option in modules if name.startswith("skipstone")]
    assert ours == [("skipstone.engines.native.build", "--if-stale")]
    with pytest.raises(SystemExit) as left:
        importlib.import_module(ours[0][0]).main(["--help"])
    assert left.value.code == 0


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


class Stub(BaseHTTPRequestHandler):
    """A server that is ready, or not."""

    status, asked = 200, ""

    def do_GET(self) -> None:
        type(self).asked = self.path
        self.send_response(self.status)
        self.end_headers()

    def log_message(self, format: str, *args: Any) -> None:
        pass


@pytest.mark.parametrize(("status", "healthy"), [(200, True), (503, False)])
def test_the_health_check_is_that_of_the_server(status: int, healthy: bool) -> None:
    (check,) = rest("HEALTHCHECK")
    command = json.loads(check[check.index("CMD") + 3 :])
    stub = type("Once", (Stub,), {"status": status})
    with HTTPServer(("127.0.0.1", 0), stub) as server:
        Thread(target=server.handle_request, daemon=True).start()
        script = command[2].replace(":8000", f":{server.server_port}")
        assert script != command[2]
        run = subprocess.run([sys.executable, "-S", command[1], script], capture_output=True)
    assert (run.returncode == 0) is healthy
    assert stub.asked in PUBLIC_PATHS


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


def test_grafana_finds_prometheus_and_the_dashboard() -> None:
    (source,) = parsed("grafana/provisioning/datasources/prometheus.yaml")["datasources"]
    (provider,) = parsed("grafana/provisioning/dashboards/skipstone.yaml")["providers"]
    services = parsed("compose.yaml")["services"]
    assert source["url"] == "http://prometheus:9090"
    assert "127.0.0.1:9090:9090" in services["prometheus"]["ports"]
    mounts = dict(volume.split(":")[:2] for volume in services["grafana"]["volumes"])
    assert mounts["./grafana/dashboards"] == provider["options"]["path"]
    home = services["grafana"]["environment"]["GF_DASHBOARDS_DEFAULT_HOME_DASHBOARD_PATH"]
    assert home == f"{provider['options']['path']}/{BOARD.name}"


# ---------------------------------------------------------------------------------------------------------- dashboard


def expressions() -> list[str]:
    board = json.loads(BOARD.read_text())
    names = [one["definition"] for one in board["templating"]["list"] if "definition" in one]
    return names + [target["expr"] for panel in board["panels"] for target in panel["targets"]]


@pytest.fixture(scope="module")
def exported() -> dict[str, set[str]]:
    """Every sample of /metrics after a few requests -> its labels."""
    model = skipstone.load(None)
    with TestClient(make_app(Server(lambda: model, ServerSettings(max_num_seqs=2, drain_seconds=5)))) as client:
        while client.get("/health").status_code != 200:
            pass
        body = {"prompt": "def add(a, b):\n    return a + b\n" * 3, "max_tokens": 40, "temperature": 0, "ignore_eos": True}
        assert client.post("/v1/completions", json={**body, "speculative": "auto"}).status_code == 200
        layerskip = {"method": "layerskip", "exit_layer": 6}
        assert client.post("/v1/completions", json={**body, "speculative": layerskip}).status_code == 200
        text = client.get("/metrics").text
    samples = [sample for family in text_string_to_metric_families(text) for sample in family.samples]
    return {name: {key for one in samples if one.name == name for key in one.labels} for name in {one.name for one in samples}}


def test_every_metric_and_label_of_the_dashboard_is_exported(exported: dict[str, set[str]]) -> None:
    seen = set[str]()
    for expression in expressions():
        names = re.findall(r"skipstone:\w+", expression)
        assert names, expression
        assert set(names) <= set(exported), expression
        seen |= set(names)
        labels = {label for inner in re.findall(r"\{(.*?)\}", expression) for label in re.findall(r"(\w+)\s*[=!]", inner)}
        labels |= {one for inner in re.findall(r"(?:by|ignoring) \((.+?)\)", expression) for one in inner.split(", ")}
        labels |= set(re.findall(r"label_values\(\S+, (\w+)\)", expression))
        assert labels <= set.union(*(exported[name] for name in names)) | MADE, expression
        for name, inner in re.findall(r"(skipstone:\w+)\{(.*?)\}", expression):
            assert set(re.findall(r"(\w+)\s*[=!]", inner)) <= exported[name], expression
    assert len(seen) >= 18


def test_every_metric_of_the_server_is_on_the_dashboard(exported: dict[str, set[str]]) -> None:
    shown = " ".join(expressions())
    ends = ("_created", "_sum", "_count")
    assert {name for name in exported if not name.endswith(ends) and name not in shown} == set()


def test_legends_name_labels_that_their_expression_keeps() -> None:
    for panel in json.loads(BOARD.read_text())["panels"]:
        assert len({target["refId"] for target in panel["targets"]}) == len(panel["targets"])
        for target in panel["targets"]:
            kept = {one for inner in re.findall(r"by \((.+?)\)", target["expr"]) for one in inner.split(", ")} - MADE
            assert set(re.findall(r"\{\{(\w+)\}\}", target["legendFormat"])) == kept, target["expr"]


# -------------------------------------------------------------------------------------------------------- the unit


def unit() -> list[tuple[str, str]]:
    lines = (DEPLOY / "skipstone.service").read_text().splitlines()
    return [
        (name, value) for line in lines if "=" in line and not line.startswith("#") for name, _, value in [line.partition("=")]
    ]


def test_the_unit_runs_the_server_and_gives_texts_time_to_end() -> None:
    told = dict(unit())
    words = [word for word in shlex.split(told["ExecStart"]) if not word.startswith("$")]
    assert Path(words[0]).name == "skipstone"
    assert words[1] == "serve"
    check_serve(words[2:])
    (drain,) = [one.default for one in get_command(program).commands["serve"].params if one.name == "drain_timeout"]  # pyright: ignore
    assert int(told["TimeoutStopSec"]) > drain
    assert int(parsed("compose.yaml")["services"]["skipstone"]["stop_grace_period"].rstrip("s")) > drain
    places = [value for name, value in unit() if name == "Environment"]
    assert f"{CACHE}=/var/cache/{told['CacheDirectory']}/skipstone" in " ".join(places)
    assert f"/var/cache/{told['CacheDirectory']}" == told["WorkingDirectory"]


@pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="needs systemd-analyze")
def test_systemd_takes_the_unit(tmp_path: Path) -> None:
    text = (DEPLOY / "skipstone.service").read_text()
    copy = tmp_path / "skipstone.service"
    copy.write_text(text.replace("/opt/skipstone/bin/skipstone", sys.executable))
    verify = subprocess.run(["systemd-analyze", "verify", "--man=no", copy], capture_output=True, text=True)
    assert (verify.returncode, [line for line in verify.stderr.splitlines() if "skipstone" in line]) == (0, [])
    exposure = ["systemd-analyze", "security", "--offline=true", "--threshold=20", "--no-pager", copy]  # 2.0 of 10, "OK"
    assert subprocess.run(exposure, capture_output=True).returncode == 0
