"""The process: a socket, the engine's thread, uvicorn around the application, and its end.

A signal ends it well: nobody new is let in, requests that are here have some seconds to end, what
is left gets an error, and the process ends with 0.
"""

from __future__ import annotations

import asyncio
import contextlib
import ipaddress
import logging
import os
import signal
import socket
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from types import FrameType

import uvicorn

from ..errors import OptionError
from ..options import Options
from ..pair import Pair
from ..prompt_cache.store import Store
from .app import Access, make_app
from .engine import Engine
from .limits import Limits
from .service import Service

DRAIN_SECONDS = 20.0
CUT_SECONDS = 2
"""For answers that were cut to say so."""
WRITE_SECONDS = 300
"""For the last step, and for a prompt cache to get to the disk."""
MOST_CONNECTIONS = 1024
SIGNALS = (signal.SIGINT, signal.SIGTERM)
log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Settings:
    """Where to listen, whom to let in, and how much to take. drawn_seeds, metrics: as Service has
    them. drain_seconds: for answers that are under way when the end comes. store: as Engine has
    it."""

    host: str
    port: int
    batch_size: int
    access: Access
    limits: Limits
    drawn_seeds: bool
    metrics: bool = False
    drain_seconds: float = DRAIN_SECONDS
    store: Store | None = None


def serve(model: str, load: Callable[[], tuple[Pair, Options]], settings: Settings) -> None:
    """Serve until a signal comes. model: its name or directory. load: called in the thread that
    decodes. Raises OptionError where nobody can listen, and what `load` raises."""
    listener = _listen(settings.host, settings.port)
    engine = Engine(
        load,
        batch_size=settings.batch_size,
        waiting=settings.limits.waiting,
        store=settings.store,
    )
    service = Service(
        engine,
        _name_of(model),
        settings.limits,
        drawn_seeds=settings.drawn_seeds,
        metrics=settings.metrics,
    )
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
            http="h11",
            server_header=False,
            proxy_headers=False,
            limit_concurrency=MOST_CONNECTIONS,
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
    keeps = settings.store is not None and settings.store.file is not None
    if not engine.join(WRITE_SECONDS if keeps and engine.ready.is_set() else CUT_SECONDS):
        # A step that takes longer, or a download: nobody waits for it.
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(0)
    if engine.problem is not None:
        raise engine.problem


class _Server(uvicorn.Server):
    def __init__(self, config: uvicorn.Config, engine: Engine, drain_seconds: float) -> None:
        super().__init__(config)
        self._engine = engine
        self._drain_seconds = drain_seconds

    def loaded(self) -> None:
        """The engine has loaded, or failed to."""
        if self._engine.problem is not None:
            self.should_exit = True
        else:
            log.info("ready")

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """uvicorn's own would raise the signal again at the end, and the process end with it."""
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
        """Called by uvicorn when nobody new is let in any more."""
        log.info("shutting down")
        cut = asyncio.get_running_loop().call_later(self._drain_seconds, self._engine.close)
        await super().shutdown(list(sockets or ()))
        cut.cancel()


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
    """What clients call it: a name on the Hub as it is, a directory by its last part."""
    directory = Path(model)
    return directory.resolve().name if directory.exists() else model
