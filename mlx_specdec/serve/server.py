"""The server's process: a socket, the engine's thread, uvicorn with the application, and the end.

After a signal, no connection is accepted, pending requests have some seconds to finish, the rest
gets an error, and the process exits with 0.
"""

from __future__ import annotations

import asyncio
import contextlib
import ipaddress
import logging
import os
import resource
import signal
import socket
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from types import FrameType

import uvicorn
from uvicorn.protocols.http.h11_impl import H11Protocol

from ..engine.pair import Pair
from ..engine.prompt_cache_files import Store
from ..errors import OptionError
from ..options import Options
from .app import Access, make_app
from .engine import Engine
from .service import Service
from .settings import ServiceSettings

DRAIN_SECONDS = 20.0
CUT_SECONDS = 2
"""Time to send the end of answers that were cut."""
WRITE_SECONDS = 300
"""Time for the last step and for writing the prompt cache to disk."""
MOST_CONNECTIONS = 1024
FILES = 4096
"""Open files: connections, those that wait to be accepted, and weights."""
KEEP_ALIVE = 75
"""Seconds that an idle connection stays open; clients are asked to drop theirs a little earlier."""
SIGNALS = (signal.SIGINT, signal.SIGTERM)
log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Settings:
    """Where to listen, who may send requests, and how they are answered. drain_seconds: time to
    finish the answers that are being generated when the server ends. batch_size, store,
    memory_budget: as Engine has them."""

    host: str
    port: int
    batch_size: int
    access: Access
    service: ServiceSettings
    drain_seconds: float = DRAIN_SECONDS
    store: Store | None = None
    memory_budget: int | None = None


def serve(model: str, load: Callable[[], tuple[Pair, Options]], settings: Settings) -> None:
    """Serve until a signal comes. model: its name or directory. load: called in the engine's
    thread. Raises OptionError when the port cannot be used, and what `load` raises."""
    listener = _listen(settings.host, settings.port)
    engine = Engine(
        load,
        batch_size=settings.batch_size,
        waiting=settings.service.limits.waiting,
        store=settings.store,
        memory_budget=settings.memory_budget,
    )
    service = Service(engine, _name_of(model), settings.service)
    host, port = listener.getsockname()[:2]
    loopback = ipaddress.ip_address(host).is_loopback
    access = replace(settings.access, loopback_name=settings.host if loopback else None)
    server = _Server(
        uvicorn.Config(
            make_app(service, access),
            log_config=None,
            access_log=False,
            lifespan="off",
            ws="none",
            loop="asyncio",
            http=Connection,
            server_header=False,
            proxy_headers=False,
            headers=[("Keep-Alive", f"timeout={KEEP_ALIVE - 5}")],
            backlog=MOST_CONNECTIONS,
            limit_concurrency=_room_for_connections(),
            timeout_keep_alive=KEEP_ALIVE,
            timeout_graceful_shutdown=int(settings.drain_seconds) + CUT_SECONDS,
        ),
        engine,
        settings.drain_seconds,
    )
    engine.start(then=server.loaded)
    where = f"[{host}]" if ":" in host else host
    log.info("listening on http://%s:%d", where, port)
    if settings.access.key is None and not loopback:
        log.warning("anybody who reaches %s may ask: set an --api-key", where)
    with listener:
        server.run(sockets=[listener])
    engine.close()
    writes = settings.store is not None and settings.store.file is not None
    if not engine.join(WRITE_SECONDS if writes and engine.ready.is_set() else CUT_SECONDS):
        # Do not wait for a long step or a download.
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(0)
    if engine.problem is not None:
        raise engine.problem


class Connection(H11Protocol):
    """A connection to a client, closed when the client is silent for too long.

    head_seconds: time for the headers of a request, from the connection or from their first byte,
    and for the rest of a body that has been answered already. stall_seconds: time in which a client
    has to read some of an answer. Beyond uvicorn's `limit_concurrency` a new connection replaces
    the one that has waited for its client longest.
    """

    head_seconds = 10.0
    stall_seconds = 30.0
    _late: asyncio.TimerHandle | None = None
    _stalled: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        # So that any unread byte calls pause_writing.
        transport.set_write_buffer_limits(high=0)
        connected = transport.get_extra_info("socket")
        # asyncio sets it only for sockets that name their protocol. On macOS it fails where the
        # client has already closed the connection.
        with contextlib.suppress(OSError):
            connected.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._since = self.loop.time()
        self._expect_request()
        self._make_room()

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        self._since = self.loop.time()
        if self._in_request():
            _cancel(self._late)
            self._late = None
        else:
            self._expect_request()

    def on_response_complete(self) -> None:
        super().on_response_complete()
        self._since = self.loop.time()
        if self.cycle.more_body and not self._in_request():
            self._expect_request()

    def pause_writing(self) -> None:
        super().pause_writing()
        self._stalled = self.loop.call_later(self.stall_seconds, self._check_reading, None)

    def resume_writing(self) -> None:
        super().resume_writing()
        _cancel(self._stalled)

    def connection_lost(self, exc: Exception | None) -> None:
        super().connection_lost(exc)
        _cancel(self._late)
        _cancel(self._stalled)

    def _in_request(self) -> bool:
        """Return True while a request is being received or answered."""
        return self.cycle is not None and not self.cycle.response_complete

    def _waits_for_client(self) -> bool:
        return not self._in_request() or self.cycle.more_body

    def _expect_request(self) -> None:
        if self._late is None:
            self._late = self.loop.call_later(self.head_seconds, self._drop)

    def _make_room(self) -> None:
        if self.limit_concurrency is None or len(self.connections) < self.limit_concurrency:
            return
        others = [each for each in self.connections if isinstance(each, Connection)]
        silent = [each for each in others if each is not self and each._waits_for_client()]
        if silent:
            min(silent, key=lambda each: each._since)._drop()

    def _check_reading(self, before: int | None) -> None:
        left = self.transport.get_write_buffer_size()
        if before is not None and left >= before:
            self._drop()
        else:
            self._stalled = self.loop.call_later(self.stall_seconds, self._check_reading, left)

    def _drop(self) -> None:
        # At once, so that it does not count until asyncio calls connection_lost.
        self.connections.discard(self)
        self.transport.abort()


def _cancel(timer: asyncio.TimerHandle | None) -> None:
    if timer is not None:
        timer.cancel()


class _Server(uvicorn.Server):
    def __init__(self, config: uvicorn.Config, engine: Engine, drain_seconds: float) -> None:
        super().__init__(config)
        self._engine = engine
        self._drain_seconds = drain_seconds

    def loaded(self) -> None:
        """Called when the engine has loaded, or failed to."""
        if self._engine.problem is not None:
            self.should_exit = True
        else:
            log.info("ready")

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Stop at a signal, where uvicorn would raise it again at the end."""
        before = {each: signal.signal(each, self._stop) for each in SIGNALS}
        try:
            yield
        finally:
            for each, handler in before.items():
                signal.signal(each, handler)

    def _stop(self, number: int, frame: FrameType | None) -> None:
        self.force_exit = self.should_exit
        self.should_exit = True

    async def shutdown(self, sockets: Sequence[socket.socket] | None = None) -> None:
        """Called by uvicorn when connections are no longer accepted."""
        log.info("shutting down")
        cut = asyncio.get_running_loop().call_later(self._drain_seconds, self._engine.close)
        await super().shutdown(list(sockets or ()))
        cut.cancel()


def _room_for_connections() -> int:
    """Let this process open enough files, and return the number of connections they allow."""
    files, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    if 0 <= files < FILES:
        # The default is 256 on macOS and 1,024 under systemd.
        files = min(FILES, most) if most >= 0 else FILES
        with contextlib.suppress(ValueError, OSError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (files, most))
        files, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return MOST_CONNECTIONS if files < 0 else min(MOST_CONNECTIONS, max(16, files // 2))


def _listen(host: str, port: int) -> socket.socket:
    try:
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        return socket.create_server((host, port), family=family, backlog=MOST_CONNECTIONS)
    except OSError as problem:
        raise OptionError(
            f"cannot listen on {host} port {port} ({problem.strerror}): choose another --host or "
            "--port"
        ) from None


def _name_of(model: str) -> str:
    """Return the name for clients: that on the Hub, or the last part of a directory."""
    directory = Path(model)
    return directory.resolve().name if directory.exists() else model
