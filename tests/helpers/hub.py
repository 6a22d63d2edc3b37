"""A stand-in for the Hugging Face hub, in memory: the routes that huggingface_hub 2.4 calls to push and to load."""

import base64
import hashlib
import json
import re
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import unquote, urlsplit

import pytest
import transformers.utils.hub
from huggingface_hub import constants, hf_api

from skipstone.models import fetching

LFS = (".safetensors", ".gguf")
"""Files that go to the large file storage; the others are part of the commit's body."""
TOKEN = "hf_stand_in"


@dataclass
class Repo:
    """commits: hash -> files, in order. branches: name -> hash."""

    private: bool = False
    gated: bool = False
    commits: dict[str, dict[str, bytes]] = field(default_factory=dict)
    branches: dict[str, str] = field(default_factory=dict)
    messages: list[str] = field(default_factory=list)

    def commit(self, branch: str, files: dict[str, bytes], message: str) -> str:
        """A new state of a branch. Returns its hash."""
        name = hashlib.sha1(f"{len(self.commits)} {message}".encode()).hexdigest()
        self.commits[name] = files
        self.branches[branch] = name
        self.messages.append(message)
        return name

    def at(self, revision: str) -> str | None:
        return revision if revision in self.commits else self.branches.get(revision)

    @property
    def files(self) -> dict[str, bytes]:
        return self.commits[self.branches["main"]]


@dataclass
class Hub:
    """repos: by ORG/NAME. blobs: the large file storage by SHA-256. asked: "METHOD path" of every request. unknown: those that
    no route took. breaks: a part of a path that is answered with 507, which the client does not try again."""

    repos: dict[str, Repo] = field(default_factory=dict)
    blobs: dict[str, bytes] = field(default_factory=dict)
    asked: list[str] = field(default_factory=list)
    unknown: list[str] = field(default_factory=list)
    breaks: str | None = None
    address: str = ""

    def add(self, name: str, files: dict[str, bytes], **more: Any) -> Repo:
        repo = self.repos[name] = Repo(**more)
        repo.commit("main", files, "there already")
        return repo


ROUTES = (
    ("GET", r"/api/agent-harnesses", "none"),
    ("GET", r"/api/models/([^/]+/[^/]+)/commits/.+", "none"),
    ("POST", r"/api/repos/create", "create"),
    ("POST", r"/api/validate-yaml", "validate"),
    ("POST", r"/api/models/([^/]+/[^/]+)/preupload/([^/]+)", "preupload"),
    ("POST", r"/api/models/([^/]+/[^/]+)/commit/([^/]+)", "commit"),
    ("POST", r"/api/models/([^/]+/[^/]+)/branch/([^/]+)", "branch"),
    ("GET", r"/api/models/([^/]+/[^/]+?)(?:/revision/([^/]+))?", "info"),
    ("GET", r"/api/models/([^/]+/[^/]+)/tree/([^/]+)(?:/(.+))?", "tree"),
    ("POST", r"/([^/]+/[^/]+)\.git/info/lfs/objects/batch", "batch"),
    ("PUT", r"/lfs/([0-9a-f]{64})", "put"),
    ("HEAD", r"/([^/]+/[^/]+)/resolve/([^/]+)/(.+)", "resolve"),
    ("GET", r"/([^/]+/[^/]+)/resolve/([^/]+)/(.+)", "resolve"),
)


@dataclass
class Answer(Exception):
    """An answer that is no success. code: what the hub's X-Error-Code header says. commit: that lacks a file."""

    status: int
    code: str = ""
    message: str = ""
    commit: str = ""


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    hub: Hub

    def log_message(self, *_: Any) -> None:
        """Nothing on stderr."""

    def _answer(self) -> None:
        path = urlsplit(self.path).path
        self.body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        self.hub.asked.append(f"{self.command} {unquote(path)}")
        try:
            if self.hub.breaks is not None and self.hub.breaks in path:
                raise Answer(507, message="the disk of the hub is full")
            for method, pattern, name in ROUTES:
                if method == self.command and (match := re.fullmatch(pattern, path)):
                    getattr(self, name)(*(None if part is None else unquote(part) for part in match.groups()))
                    return
            self.hub.unknown.append(f"{self.command} {path}")
            raise Answer(404, message="no such route")
        except Answer as refusal:
            headers = {"X-Error-Code": refusal.code, "X-Error-Message": refusal.message, "X-Repo-Commit": refusal.commit}
            self.send(json.dumps({"error": refusal.message}).encode(), refusal.status, {k: v for k, v in headers.items() if v})

    do_GET = do_POST = do_PUT = do_HEAD = _answer

    def send(self, body: bytes, status: int = 200, headers: dict[str, str] | None = None) -> None:
        self.send_response(status)
        for name, value in {"Content-Length": str(len(body)), "Content-Type": "application/json", **(headers or {})}.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    def json(self, value: Any, status: int = 200) -> None:
        self.send(json.dumps(value).encode(), status)

    @property
    def known(self) -> bool:
        return self.headers.get("Authorization") == f"Bearer {TOKEN}"

    def repo(self, name: str, writing: bool = False) -> Repo:
        repo = self.hub.repos.get(name)
        if repo is None or (repo.private and not self.known):
            raise Answer(404 if self.known else 401, "RepoNotFound", "Repository not found")
        if writing and not self.known:
            raise Answer(403, message="you have no right to write here")
        return repo

    def read(self, name: str, revision: str | None) -> tuple[Repo, str]:
        """(repository, the hash that a revision means)."""
        repo = self.repo(name)
        if repo.gated:
            raise Answer(403, "GatedRepo", f"Access to model {name} is restricted")
        found = repo.at(revision or "main")
        if found is None:
            raise Answer(404, "RevisionNotFound", f"Invalid rev id: {revision}")
        return repo, found

    def none(self, *_: str) -> None:
        """What the client asks for by itself and does without."""
        raise Answer(404)

    def create(self) -> None:
        asked = json.loads(self.body)
        if not self.known:
            raise Answer(401, message="Invalid username or password.")
        name = f"{asked['organization']}/{asked['name']}"
        if name in self.hub.repos:
            raise Answer(409, message="You already created this model repo")
        repo = self.hub.repos[name] = Repo(private=asked.get("visibility") == "private")
        repo.commit("main", {".gitattributes": b"*.safetensors filter=lfs\n"}, "initial commit")
        self.json({"url": f"{self.hub.address}/{name}"})

    def validate(self) -> None:
        self.json({"errors": [], "warnings": []})

    def info(self, name: str, revision: str | None) -> None:
        repo = self.repo(name)
        if repo.gated:  # what a gated repository holds may be seen by all, its files may not
            found = repo.branches["main"]
        else:
            repo, found = self.read(name, revision)
        siblings = [{"rfilename": file} for file in repo.commits[found]]
        self.json({"id": name, "sha": found, "private": repo.private, "siblings": siblings, "gated": repo.gated, "tags": []})

    def tree(self, name: str, revision: str, folder: str | None) -> None:
        repo, found = self.read(name, revision)
        if folder is not None:
            raise Answer(404, "EntryNotFound", f"no folder {folder}")  # all files here lie at the top
        entries = [
            {"type": "file", "path": file, "size": len(content), "oid": hashlib.sha1(content).hexdigest()}
            for file, content in repo.commits[found].items()
        ]
        self.json(entries)

    def preupload(self, name: str, revision: str) -> None:
        repo = self.repo(name, writing=True)
        if repo.at(revision) is None:
            raise Answer(404, "RevisionNotFound", f"Invalid rev id: {revision}")
        files = [
            {"path": one["path"], "uploadMode": "lfs" if one["path"].endswith(LFS) else "regular", "shouldIgnore": False}
            for one in json.loads(self.body)["files"]
        ]
        self.json({"files": files})

    def batch(self, name: str) -> None:
        self.repo(name, writing=True)
        objects = [
            {**one, "actions": {"upload": {"href": f"{self.hub.address}/lfs/{one['oid']}"}}}
            for one in json.loads(self.body)["objects"]
        ]
        self.json({"transfer": "basic", "objects": objects})

    def put(self, oid: str) -> None:
        if hashlib.sha256(self.body).hexdigest() != oid:
            raise Answer(400, message="the content has another hash")
        self.hub.blobs[oid] = self.body
        self.send(b"")

    def branch(self, name: str, branch: str) -> None:
        repo = self.repo(name, writing=True)
        if branch in repo.branches:
            raise Answer(409, message="the branch is there already")
        repo.branches[branch] = repo.branches["main"]
        self.json({})

    def commit(self, name: str, revision: str) -> None:
        repo = self.repo(name, writing=True)
        if revision not in repo.branches:
            raise Answer(404, "RevisionNotFound", f"Invalid rev id: {revision}")
        files, message = dict(repo.commits[repo.branches[revision]]), ""
        for line in self.body.splitlines():
            entry = json.loads(line)
            kind, value = entry["key"], entry["value"]
            if kind == "header":
                message = value["summary"]
            elif kind == "file":
                files[value["path"]] = base64.b64decode(value["content"])
            elif kind == "lfsFile":
                files[value["path"]] = self.hub.blobs[value["oid"]]
            elif kind == "deletedFile":
                del files[value["path"]]
            else:
                raise Answer(400, message=f"unknown operation {kind}")
        found = repo.commit(revision, files, message)
        self.json({"success": True, "commitOid": found, "commitUrl": f"{self.hub.address}/{name}/commit/{found}"})

    def resolve(self, name: str, revision: str, file: str) -> None:
        repo, found = self.read(name, revision)
        if file not in repo.commits[found]:
            raise Answer(404, "EntryNotFound", "Entry not found", found)
        content = repo.commits[found][file]
        headers = {"X-Repo-Commit": found, "ETag": f'"{hashlib.sha256(content).hexdigest()}"'}
        self.send(content, headers=headers | {"Content-Type": "application/octet-stream"})


@contextmanager
def serving(monkeypatch: pytest.MonkeyPatch, cache: Any) -> Iterator[Hub]:
    """A hub that this process asks in the place of the real one, with an empty cache, logged in."""
    hub = Hub()
    server = ThreadingHTTPServer(("127.0.0.1", 0), type("Bound", (Handler,), {"hub": hub}))
    hub.address = f"http://127.0.0.1:{server.server_address[1]}"
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True)
    thread.start()
    use(monkeypatch, hub.address, cache)
    forget()
    try:
        yield hub
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
        forget()


def forget() -> None:
    """Forget the commits that this process keeps of the hub's names."""
    fetching.fetch.cache_clear()
    fetching.fetch_gguf.cache_clear()


def use(monkeypatch: pytest.MonkeyPatch, address: str, cache: Any) -> None:
    """What HF_ENDPOINT, HF_HUB_CACHE, HF_TOKEN and HF_HUB_DISABLE_XET do in a process that begins with them: huggingface_hub
    reads most of them when it is imported, and transformers asks through a client that it keeps."""
    monkeypatch.setattr(hf_api.api, "endpoint", address)
    monkeypatch.setattr(transformers.utils.hub, "_hf_api", None)
    monkeypatch.setenv("HF_TOKEN", TOKEN)
    monkeypatch.setattr(constants, "ENDPOINT", address)
    monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", address + "/{repo_id}/resolve/{revision}/{filename}")
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(cache))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(constants, "HF_HUB_DISABLE_XET", True)
