"""The playground's files and how they are sent. What the page does in a browser: tests/browser."""

import re

import pytest
from fastapi import FastAPI
from starlette.testclient import TestClient

from skipstone.serving import playground

SCRIPTS = [f"/page/{name}.js" for name in ("page", "view", "figures", "map", "bench", "dom")]
KINDS = {"/": "text/html", "/page/page.css": "text/css", **dict.fromkeys(SCRIPTS, "text/javascript")}


@pytest.fixture(scope="module")
def client() -> TestClient:
    app = FastAPI()
    playground.add(app)
    return TestClient(app)


@pytest.fixture(scope="module")
def texts(client: TestClient) -> dict[str, str]:
    return {path: client.get(path).text for path in KINDS}


def test_every_file_comes_with_the_headers_that_shut_others_out_and_loads_nothing_from_elsewhere(client: TestClient) -> None:
    assert set(playground.PATHS) == set(KINDS)
    assert client.get("/page/../playground.py").status_code == client.get("/page/index.html").status_code == 404
    none = ("default-src", "base-uri", "form-action", "frame-ancestors")
    own = ("script-src", "style-src", "connect-src")
    for path, kind in KINDS.items():
        response = client.get(path)
        assert response.headers["content-type"] == f"{kind}; charset=utf-8"
        policy = dict(part.strip().split(" ", 1) for part in response.headers["content-security-policy"].split(";"))
        assert policy == dict.fromkeys(none, "'none'") | dict.fromkeys(own, "'self'") | {"img-src": "'self' data:"}
        assert response.headers["x-content-type-options"] == "nosniff"
        assert response.headers["referrer-policy"] == "no-referrer"
        assert response.headers["cache-control"] == "no-cache"
        assert not re.search(r"""https?://|@import|: url\(|["'(=]//\w""", response.text), path


def test_the_page_has_nothing_inline_and_its_scripts_write_text_as_text_only(texts: dict[str, str]) -> None:
    page = texts["/"]
    assert sorted(re.findall(r'(?:src|href)="([^"]*)"', page)) == ["data:,", "page/page.css", "page/page.js"]
    assert not re.search(r"""<style|<script[^>]*>\s*[^<\s]|<[^>]*\s(style|on\w+)=""", page)
    assert "textContent" in texts["/page/dom.js"]
    forbidden = r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|DOMParser|eval\(|new Function"
    forbidden += r"|XMLHttpRequest|WebSocket|EventSource|sendBeacon|localStorage|sessionStorage|cookie"
    assert not [path for path in SCRIPTS if re.search(forbidden, texts[path])]


def test_every_element_that_the_scripts_look_up_exists_once(texts: dict[str, str]) -> None:
    ids = re.findall(r'\sid="([^"]+)"', texts["/"])
    assert len(ids) == len(set(ids))
    wanted = set(re.findall(r'\$\("([^"]+)"\)', "\n".join(texts[path] for path in SCRIPTS)))
    wanted |= {f"{side}_{part}" for side in ("left", "right") for part in ("text", "title")}
    wanted |= {f"{name}_{part}" for name in ("draft", "verify") for part in ("bar", "ms")}
    assert wanted <= set(ids)
