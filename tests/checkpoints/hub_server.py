"""A Hub on loopback: the few routes that a download uses, and what can go wrong on each.

GET       /api/models/NAME/revision/REVISION    a repository's files, with sizes and digests
HEAD, GET /NAME/resolve/REVISION/FILE           a small file, or where a large one lies
GET       /cdn/DIGEST                           a large file, on another host
"""

from __future__ import annotations

import hashlib
import json
import socket
import struct
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import unquote, urlsplit

LARGE = (".safetensors", ".bin", ".pth", ".h5", ".msgpack", ".gguf", ".onnx", ".pt")


@dataclass
class Repository:
    """files: path -> bytes, at `commit`, which the names in `revisions` stand for."""

    files: Mapping[str, bytes]
    commit: str = "1" * 40
    revisions: tuple[str, ...] = ("main",)


@dataclass(frozen=True)
class Request:
    """One that the server has seen."""

    method: str
    path: str
    range: str
    token: str


@dataclass
class Hub:
    """What the server holds and how it misbehaves.

    refused: the start of a path -> status, code and message. cuts: how many bytes to send of each
    GET of a file before the connection is closed, one for each GET in turn; reset: in the middle of
    a packet, as a router does. stalled: starts of paths that are never answered. altered: file ->
    bytes that are sent in place of its own. listed: added to what the list says of a file. page: in
    place of every answer.
    """

    repositories: dict[str, Repository] = field(default_factory=dict)
    refused: dict[str, tuple[int, str, str]] = field(default_factory=dict)
    cuts: list[int] = field(default_factory=list)
    reset: bool = False
    stalled: tuple[str, ...] = ()
    altered: dict[str, bytes] = field(default_factory=dict)
    listed: dict[str, dict[str, Any]] = field(default_factory=dict)
    page: bytes | None = None
    trickles: bool = False
    trickled: threading.Event = field(default_factory=threading.Event)
    requests: list[Request] = field(default_factory=list)
    port: int = 0
    ended: threading.Event = field(default_factory=threading.Event)

    def fetched(self) -> list[str]:
        """The names of the files that were sent, whole or in part."""
        large = {digest(d): f for r in self.repositories.values() for f, d in r.files.items()}
        gets = [request.path for request in self.requests if request.method == "GET"]
        names = [path.partition("/resolve/")[2].partition("/")[2] for path in gets]
        return [
            large[path.removeprefix("/cdn/")] if path.startswith("/cdn/") else name
            for path, name in zip(gets, names, strict=True)
            if name or path.startswith("/cdn/")
        ]


def digest(data: bytes, *, large: bool = True) -> str:
    """As the Hub names a large file, and as git names a small one."""
    if large:
        return hashlib.sha256(data).hexdigest()
    return hashlib.sha1(b"blob %d\0" % len(data) + data).hexdigest()


@contextmanager
def serve(hub: Hub) -> Iterator[str]:
    """The address of a server of `hub`, while the block runs."""

    class Handler(_Handler):
        held = hub

    class Server(ThreadingHTTPServer):
        def shutdown_request(self, request: Any) -> None:
            if hub.reset:
                self.close_request(request)  # without a farewell
            else:
                super().shutdown_request(request)

    server = Server(("127.0.0.1", 0), Handler)
    server.daemon_threads = False
    hub.port = server.server_address[1]
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    try:
        yield f"http://127.0.0.1:{hub.port}"
    finally:
        hub.ended.set()
        server.shutdown()
        thread.join()
        server.server_close()


class _Handler(BaseHTTPRequestHandler):
    held: Hub

    def log_message(self, format: str, *args: Any) -> None:
        return None

    def do_HEAD(self) -> None:
        self._answer()

    def do_GET(self) -> None:
        self._answer()

    def _answer(self) -> None:
        hub, path = self.held, urlsplit(self.path).path
        range_, token = self.headers.get("Range", ""), self.headers.get("Authorization", "")
        hub.requests.append(Request(self.command, path, range_, token))
        if any(path.startswith(start) for start in hub.stalled):
            hub.ended.wait(30)
            return
        if hub.page is not None:
            self._send(200, hub.page, {"Content-Type": "text/html"})
            return
        for start, (status, code, message) in hub.refused.items():
            if path.startswith(start):
                self._refuse(status, code, message)
                return
        if path.startswith("/cdn/"):
            self._send_large(path.removeprefix("/cdn/"))
        elif path.startswith("/api/models/"):
            name, _, revision = path.removeprefix("/api/models/").partition("/revision/")
            self._send_list(name, unquote(revision) or "main")
        else:
            name, _, rest = path.removeprefix("/").partition("/resolve/")
            revision, _, file = rest.partition("/")
            self._send_file(name, unquote(revision), unquote(file))

    def _repository(self, name: str, revision: str) -> Repository | None:
        found = self.held.repositories.get(name)
        if found is None:
            self._refuse(404, "RepoNotFound", "Repository not found")
        elif revision not in (found.commit, *found.revisions):
            self._refuse(404, "RevisionNotFound", f"Invalid rev id: {revision}")
            return None
        return found

    def _send_list(self, name: str, revision: str) -> None:
        found = self._repository(name, revision)
        if found is None:
            return
        siblings = []
        for file, data in found.files.items():
            said: dict[str, Any] = {
                "rfilename": file,
                "size": len(data),
                "blobId": digest(data, large=False),
            }
            if file.endswith(LARGE):
                said["lfs"] = {"sha256": digest(data), "size": len(data), "pointerSize": 134}
            siblings.append({**said, **self.held.listed.get(file, {})})
        body = {"id": name, "modelId": name, "sha": found.commit, "siblings": siblings}
        self._send(200, json.dumps(body).encode(), {"Content-Type": "application/json"})

    def _send_file(self, name: str, revision: str, file: str) -> None:
        found = self._repository(name, revision)
        if found is None:
            return
        if file not in found.files:
            self._refuse(404, "EntryNotFound", "Entry not found", found.commit)
            return
        data, headers = found.files[file], {"X-Repo-Commit": found.commit}
        if not file.endswith(LARGE):
            headers["ETag"] = f'"{digest(data, large=False)}"'
            self._send(200, self.held.altered.get(file, data), headers)
            return
        headers["X-Linked-Size"] = str(len(data))
        headers["X-Linked-ETag"] = f'"{digest(data)}"'
        # Another host, as the Hub's is: nobody's token belongs there.
        headers["Location"] = f"http://localhost:{self.held.port}/cdn/{digest(data)}"
        self._send(302, b"", headers)

    def _send_large(self, wanted: str) -> None:
        for repository in self.held.repositories.values():
            for file, data in repository.files.items():
                if digest(data) == wanted:
                    self._send_part(self.held.altered.get(file, data))
                    return
        self._refuse(404, "", "no such key")

    def _send_part(self, data: bytes) -> None:
        begin = int(self.headers.get("Range", "bytes=0-")[len("bytes=") :].partition("-")[0])
        headers = {"Content-Range": f"bytes {begin}-{len(data) - 1}/{len(data)}"} if begin else {}
        if self.held.trickles:
            self._send(200, data, {}, len(data) // 2)
            self.held.trickled.set()
            self.held.ended.wait(30)
        elif not self.held.cuts:
            self._send(206 if begin else 200, data[begin:], headers)
        else:
            self._send(206 if begin else 200, data[begin:], headers, self.held.cuts.pop(0))
            if self.held.reset:
                at_once = struct.pack("ii", 1, 0)
                self.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, at_once)
        self.close_connection = True

    def _refuse(self, status: int, code: str, message: str, commit: str = "") -> None:
        headers = {"X-Error-Code": code, "X-Error-Message": message, "X-Repo-Commit": commit}
        body = json.dumps({"error": message}).encode()
        self._send(status, body, {name: value for name, value in headers.items() if value})

    def _send(
        self, status: int, body: bytes, headers: Mapping[str, str], sent: int | None = None
    ) -> None:
        """sent: how many bytes of the body to send; all where not given."""
        self.send_response(status)
        for name, value in {"Content-Length": str(len(body)), **headers}.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body[:sent])
