"""The playground's files and how they are sent. What the page does in a browser: tests/browser."""

from __future__ import annotations

import re
from html.parser import HTMLParser

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


class Tags(HTMLParser):
    """Every tag of a page with its attributes, and the text of its scripts and styles."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.inline: list[str] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))

    def handle_data(self, data: str) -> None:
        if self.tags and self.tags[-1][0] in ("script", "style") and data.strip():
            self.inline.append(data)


@pytest.mark.parametrize("path", KINDS)
def test_every_file_comes_with_its_type_and_the_headers_that_shut_others_out(client: TestClient, path: str) -> None:
    response = client.get(path)
    assert response.status_code == 200
    assert response.headers["content-type"].split(";")[0] == KINDS[path]
    assert "charset=utf-8" in response.headers["content-type"]
    policy = dict(part.strip().split(" ", 1) for part in response.headers["content-security-policy"].split(";"))
    none = ("default-src", "base-uri", "form-action", "frame-ancestors")
    own = ("script-src", "style-src", "connect-src")
    assert policy == dict.fromkeys(none, "'none'") | dict.fromkeys(own, "'self'") | {"img-src": "'self' data:"}
    assert response.headers["x-content-type-options"] == "nosniff"
    assert response.headers["referrer-policy"] == "no-referrer"
    assert response.headers["cache-control"] == "no-cache"


def test_nothing_is_loaded_from_elsewhere(texts: dict[str, str]) -> None:
    for path, text in texts.items():
        assert "http://" not in text, path
        assert "https://" not in text, path
        assert not re.search(r"""["'(=]//\w""", text), path
    assert "@import" not in texts["/page/page.css"]
    assert "url(" not in texts["/page/page.css"]
    links = [attributes.get(name) for _, attributes in Tags(texts["/"]).tags for name in ("src", "href") if name in attributes]
    assert sorted(links) == ["data:,", "page/page.css", "page/page.js"]


def test_the_page_has_nothing_inline_that_its_policy_forbids(texts: dict[str, str]) -> None:
    page = Tags(texts["/"])
    assert not page.inline
    assert "style" not in [tag for tag, _ in page.tags]
    for tag, attributes in page.tags:
        wrong = [name for name in attributes if name == "style" or name.startswith("on")]
        assert not wrong, (tag, wrong)


def test_the_scripts_write_text_as_text_only(texts: dict[str, str]) -> None:
    assert "textContent" in texts["/page/dom.js"]
    for path in SCRIPTS:
        for word in ("innerHTML", "outerHTML", "insertAdjacentHTML", "document.write", "DOMParser", "eval(", "new Function"):
            assert word not in texts[path], path


def test_only_what_asks_the_server_asks_anybody(texts: dict[str, str]) -> None:
    """Files of results are read where nothing can be sent."""
    words = ("fetch(", "XMLHttpRequest", "WebSocket", "EventSource", "sendBeacon", "localStorage", "sessionStorage", "cookie")
    for path in SCRIPTS:
        assert [word for word in words if word in texts[path]] == (["fetch("] if path == "/page/page.js" else []), path
    asked = set(re.findall(r"""fetch\("([^"]+)\"""", texts["/page/page.js"]))
    assert asked == {"health", "v1/models", "server_info"}
    assert set(re.findall(r'"(v1/[a-z/]+)"', texts["/page/page.js"])) == {"v1/models", "v1/completions", "v1/chat/completions"}


def test_every_element_that_the_scripts_look_up_exists_once(texts: dict[str, str]) -> None:
    script = "\n".join(texts[path] for path in SCRIPTS)
    ids = [found["id"] for _, found in Tags(texts["/"]).tags if "id" in found]
    assert len(ids) == len(set(ids))
    wanted = set(re.findall(r'\$\("([^"]+)"\)', script))
    wanted |= {f"{side}_{part}" for side in ("left", "right") for part in ("text", "title")}
    wanted |= {f"{name}_{part}" for name in ("draft", "verify") for part in ("bar", "ms")}
    assert wanted <= set(ids)
    used = {one for one in ids if one is not None and (one in wanted or f'"{one}"' in script)}
    assert set(ids) - used == {"methods"}  # the list of suggestions, which the field itself names
    named = [found["for"] for tag, found in Tags(texts["/"]).tags if tag == "label" and "for" in found]
    assert named == ["prompt"]
