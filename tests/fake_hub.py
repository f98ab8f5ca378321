"""A hub on this machine: repositories are folders, large files have a SHA-256, downloads resume, tokens are checked."""

from __future__ import annotations

import contextlib
import hashlib
import json
import re
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, ClassVar

import huggingface_hub
import pytest

COMMIT = "0123456789abcdef0123456789abcdef01234567"
TOKEN = "hf_secret_of_this_test"
LARGE_BYTES = 50_000  # from here on a file counts as large, with a SHA-256


@dataclass
class FakeHub:
    """What the hub holds, what it was asked, and how it misbehaves."""

    repositories: dict[str, Path] = field(default_factory=dict)
    private: set[str] = field(default_factory=set)
    requests: list[tuple[str, str, str | None]] = field(default_factory=list)  # method, path, Range
    cut_after: int | None = None  # bytes of a large file, after which the connection is lost and the hub is down
    down: bool = False
    damaged: set[str] = field(default_factory=set)  # files that arrive with a wrong byte
    url: str = ""

    def downloads(self, ending: str = "") -> list[tuple[str, str | None]]:
        """Path and Range of the GET requests for files."""
        return [(p, r) for method, p, r in self.requests if method == "GET" and "/resolve/" in p and p.endswith(ending)]


class _Handler(BaseHTTPRequestHandler):
    hub: ClassVar[FakeHub]
    protocol_version = "HTTP/1.1"

    def log_message(self, *args: object) -> None:
        return None

    def do_HEAD(self) -> None:
        self.do_GET()

    def do_GET(self) -> None:
        path = self.path.partition("?")[0]
        self.hub.requests.append((self.command, path, self.headers.get("Range")))
        if self.hub.down:
            return self.answer(500, b"{}")
        name = next((name for name in self.hub.repositories if f"/{name}/" in f"{path}/"), None)
        allowed = name not in self.hub.private or self.headers.get("Authorization") == f"Bearer {TOKEN}"
        if name is None or not allowed:
            code = "RepoNotFound" if name is None else "GatedRepo"
            return self.answer(401 if name is None else 403, b"{}", {"X-Error-Code": code})
        folder = self.hub.repositories[name]
        if path.startswith("/api/models/"):
            listing = self.listing(name, folder)
            if "/tree/" in path:
                return self.answer(200, json.dumps([as_tree_entry(entry) for entry in listing["siblings"]]).encode())
            return self.answer(200, json.dumps(listing).encode())
        file = folder / path.split(f"/{name}/resolve/{COMMIT}/")[-1]
        return self.send_file(file) if file.is_file() else self.answer(404, b"{}", {"X-Error-Code": "EntryNotFound"})

    def listing(self, name: str, folder: Path) -> dict[str, Any]:
        siblings: list[dict[str, Any]] = []
        for file in sorted(path for path in folder.rglob("*") if path.is_file()):
            data = file.read_bytes()
            entry: dict[str, Any] = {"rfilename": file.relative_to(folder).as_posix(), "size": len(data)}
            entry["blobId"] = hashlib.sha1(b"blob %d\0" % len(data) + data).hexdigest()
            if len(data) >= LARGE_BYTES:
                entry["lfs"] = {"size": len(data), "sha256": hashlib.sha256(data).hexdigest(), "pointerSize": 100}
            siblings.append(entry)
        return {"id": name, "sha": COMMIT, "siblings": siblings}

    def send_file(self, file: Path) -> None:
        data = file.read_bytes()
        etag = hashlib.sha256(data).hexdigest() if len(data) >= LARGE_BYTES else hashlib.sha1(data).hexdigest()
        if file.name in self.hub.damaged:
            data = data[:-1] + bytes([data[-1] ^ 1])
        headers = {"ETag": f'"{etag}"', "X-Repo-Commit": COMMIT, "Accept-Ranges": "bytes"}
        match = re.fullmatch(r"bytes=(\d+)-(\d*)", self.headers.get("Range") or "")
        start = int(match[1]) if match else 0
        if match:
            headers["Content-Range"] = f"bytes {start}-{len(data) - 1}/{len(data)}"
        cut = self.hub.cut_after if len(data) >= LARGE_BYTES and self.command == "GET" else None
        self.answer(206 if match else 200, data[start:], headers, cut)

    def answer(self, status: int, body: bytes, headers: dict[str, str] | None = None, cut: int | None = None) -> None:
        self.send_response(status)
        for name, value in {"Content-Type": "application/json", **(headers or {})}.items():
            self.send_header(name, value)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(body if cut is None else body[:cut])
        if cut is not None:
            self.close_connection = self.hub.down = True


def as_tree_entry(sibling: dict[str, Any]) -> dict[str, Any]:
    """The same facts as another route words them."""
    entry = {"type": "file", "path": sibling["rfilename"], "size": sibling["size"], "oid": sibling["blobId"]}
    if "lfs" in sibling:
        entry["lfs"] = {"oid": sibling["lfs"]["sha256"], "size": sibling["size"], "pointerSize": 100}
    return entry


@contextlib.contextmanager
def serving_hub() -> Iterator[FakeHub]:
    """A running hub, for this process and others."""
    hub = FakeHub()
    server = ThreadingHTTPServer(("127.0.0.1", 0), type("Handler", (_Handler,), {"hub": hub}))
    thread = threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True)
    thread.start()
    hub.url = f"http://127.0.0.1:{server.server_port}"
    try:
        yield hub
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


def point_at(monkeypatch: pytest.MonkeyPatch, endpoint: str) -> None:
    """Make the hub client of this process ask another hub."""
    constants = huggingface_hub.constants
    monkeypatch.setattr(constants, "ENDPOINT", endpoint)
    monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", endpoint + "/{repo_id}/resolve/{revision}/{filename}")
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setenv("HF_ENDPOINT", endpoint)
