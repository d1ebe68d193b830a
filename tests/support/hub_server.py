"""A Hub on loopback with one repository: the routes that a download uses, and what can go wrong.

GET       /api/models/some/model/revision/REVISION    the files, with sizes and digests
HEAD, GET /some/model/resolve/REVISION/FILE           a small file, or where a large one lies
GET       /cdn/FILE                                   a large file, on another host
"""

import hashlib
import json
import os
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from urllib.parse import unquote, urlsplit

import huggingface_hub
import pytest
from huggingface_hub import constants, file_download
from huggingface_hub.utils import _http

NAME = "some/model"
LARGE = (".safetensors", ".bin", ".gguf")


@dataclass
class Hub:
    """The files of the server, and its faults.

    Attributes:
        refused: The beginning of a path -> status and the Hub's error code.
        cuts: Bytes after which the connection is closed, for each GET of a large file.
        altered: File -> bytes to send instead.
        page: The answer to every request.
        trickles: Whether a large file stops at its half.
        ranges: Whether a part of a large file may be requested.
        sent: The number of bytes of large files.
    """

    files: Mapping[str, bytes] = field(default_factory=dict)
    commit: str = "1" * 40
    revisions: tuple[str, ...] = ("main",)
    refused: dict[str, tuple[int, str]] = field(default_factory=dict)
    cuts: list[int] = field(default_factory=list)
    altered: dict[str, bytes] = field(default_factory=dict)
    page: bytes | None = None
    trickles: bool = False
    ranges: bool = True
    sent: int = 0
    trickled: threading.Event = field(default_factory=threading.Event)
    ended: threading.Event = field(default_factory=threading.Event)
    requests: list[tuple[str, str, str]] = field(default_factory=list)
    """The path, the Range and the token of each GET."""


def digest(data: bytes, *, large: bool = True) -> str:
    """As the Hub names a large file, and as git names a small one."""
    if large:
        return hashlib.sha256(data).hexdigest()
    return hashlib.sha1(b"blob %d\0" % len(data) + data).hexdigest()


@contextmanager
def serve(hub: Hub) -> Iterator[str]:
    """The address of a server of `hub`, while the block runs."""
    server = _Quiet(("127.0.0.1", 0), type("Handler", (_Handler,), {"hub": hub}))
    server.daemon_threads = False
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_address[1]}"
    finally:
        hub.ended.set()
        server.shutdown()
        thread.join()
        server.server_close()


@contextmanager
def asked(hub: Hub, directory: Path) -> Iterator[Hub]:
    """While the block runs, huggingface_hub asks `hub`, keeps its files in a directory, and does
    not pause."""
    with pytest.MonkeyPatch.context() as patch, serve(hub) as address:
        for name in os.environ:
            if name.startswith("HF_") or "proxy" in name.lower():
                patch.delenv(name)
        for setting, value in {
            "ENDPOINT": address,
            "HUGGINGFACE_CO_URL_TEMPLATE": address + "/{repo_id}/resolve/{revision}/{filename}",
            "HF_HUB_CACHE": str(directory / "cache"),
            "HF_TOKEN_PATH": str(directory / "token"),
            "HF_STORED_TOKENS_PATH": str(directory / "tokens"),
            "HF_HUB_OFFLINE": False,
            "DOWNLOAD_CHUNK_SIZE": 1000,
        }.items():
            patch.setattr(constants, setting, value)
        hasty = SimpleNamespace(**{**vars(time), "sleep": lambda seconds: None})
        for module in (file_download, _http):
            patch.setattr(module, "time", hasty)
        huggingface_hub.close_session()
        yield hub
        huggingface_hub.close_session()


class _Quiet(ThreadingHTTPServer):
    """A server that says nothing of clients that leave, since a command may own standard error."""

    def handle_error(self, request: Any, client_address: Any) -> None:
        pass


class _Handler(BaseHTTPRequestHandler):
    hub: Hub

    def log_message(self, format: str, *args: Any) -> None:
        return None

    def do_HEAD(self) -> None:
        hub, path = self.hub, urlsplit(self.path).path
        refusals = [answer for start, answer in hub.refused.items() if path.startswith(start)]
        if refusals:
            self._refuse(*refusals[0])
        elif hub.page is not None:
            self._send(200, hub.page)
        elif path.startswith("/cdn/"):
            self._send_large(hub.altered.get(path[5:], hub.files[path[5:]]))
        elif path.startswith(f"/api/models/{NAME}/revision/"):
            self._send_list(unquote(path.rpartition("/")[2]))
        elif path.startswith(f"/{NAME}/resolve/"):
            revision, file = map(unquote, path.split("/")[4:])
            self._send_file(revision, file)
        else:
            self._refuse(404, "RepoNotFound")

    def do_GET(self) -> None:
        headers = self.headers.get("Range", ""), self.headers.get("Authorization", "")
        self.hub.requests.append((self.path, *headers))
        self.do_HEAD()

    def _send_list(self, revision: str) -> None:
        hub = self.hub
        if revision not in (hub.commit, *hub.revisions):
            self._refuse(404, "RevisionNotFound")
            return
        siblings = []
        for file, data in hub.files.items():
            entry = {"rfilename": file, "size": len(data), "blobId": digest(data, large=False)}
            if file.endswith(LARGE):
                lfs = {"sha256": digest(data), "size": len(data), "pointerSize": 134}
                entry |= {"lfs": lfs, "blobId": "0" * 40}
            siblings.append(entry)
        body = {"id": NAME, "modelId": NAME, "sha": hub.commit, "siblings": siblings}
        self._send(200, json.dumps(body).encode())

    def _send_file(self, revision: str, file: str) -> None:
        hub, data = self.hub, self.hub.files[file]
        headers = {"X-Repo-Commit": hub.commit}
        if not file.endswith(LARGE):
            headers["ETag"] = f'"{digest(data, large=False)}"'
            self._send(200, hub.altered.get(file, data), headers)
            return
        headers |= {"X-Linked-Size": str(len(data)), "X-Linked-ETag": f'"{digest(data)}"'}
        # Another host, as the Hub's is: nobody's token belongs there.
        headers["Location"] = f"http://localhost:{self.server.server_address[1]}/cdn/{file}"
        self._send(302, b"", headers)

    def _send_large(self, data: bytes) -> None:
        settings = self.headers.get("Range", "bytes=0-") if self.hub.ranges else "bytes=0-"
        first, _, last = settings[len("bytes=") :].partition("-")
        begin, end = int(first), min(len(data), int(last or len(data)) + 1)
        part = begin > 0 or end < len(data)
        headers = {"Content-Range": f"bytes {begin}-{end - 1}/{len(data)}"} if part else {}
        sent = len(data) // 2 if self.hub.trickles else None
        if self.hub.cuts:
            sent = self.hub.cuts.pop(0)
        self.hub.sent += end - begin
        self._send(206 if part else 200, data[begin:end], headers, sent)
        if self.hub.trickles:
            self.hub.trickled.set()
            self.hub.ended.wait(30)
        self.close_connection = True

    def _refuse(self, status: int, code: str) -> None:
        self._send(status, b"", {"X-Error-Code": code, "X-Repo-Commit": self.hub.commit})

    def _send(
        self, status: int, body: bytes, headers: Mapping[str, str] = {}, sent: int | None = None
    ) -> None:
        """sent: how many bytes of the body to send; all where not given."""
        self.send_response(status)
        for name, value in {"Content-Length": str(len(body)), **headers}.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body[:sent])
