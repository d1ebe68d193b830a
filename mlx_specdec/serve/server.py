"""The server's process. After a signal, the server accepts no connections, gives pending requests
some seconds to finish, ends the other ones with an error, and exits with 0."""

import asyncio
import contextlib
import ipaddress
import logging
import os
import signal
import socket
import sys
import tomllib
from collections.abc import Collection, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from string import Template
from types import FrameType
from typing import Any

import uvicorn
from uvicorn.protocols.http.h11_impl import H11Protocol

from .. import system
from ..errors import OptionError
from .app import Access, make_app
from .engine import CONNECTIONS
from .registry import Registry, ServedModel

FINISH_SECONDS = 20
"""Seconds to finish pending answers when the server ends."""
CUT_SECONDS = 2
"""Seconds to send the end of answers that were cut."""
WRITE_SECONDS = 300
"""Seconds for the last step and for writing the prompt cache to disk."""
BACKLOG = 128
"""Connections that wait to be accepted, and the most that asyncio accepts at once."""
OPEN_FILES = 4096
"""Largest number of open files: accepted and waiting connections, and weights."""
KEEP_ALIVE = 75
"""Seconds that an idle connection stays open. The header Keep-Alive names 5 s less, so that clients
close a connection before the server does."""
log = logging.getLogger(__name__)


def serve(registry: Registry, host: str, port: int, *, access: Access) -> None:
    """Serve until a signal comes.

    Args:
        registry: The models. A single one is loaded at once.
    Raises:
        OptionError: If the port cannot be used. Errors of loading a single model are raised, too.
    """
    listener = listen(host, port)
    address, port = listener.getsockname()[:2]
    loopback = ipaddress.ip_address(address).is_loopback
    where = f"[{address}]" if ":" in address else address
    reached = "127.0.0.1" if address in ("0.0.0.0", "::") else where
    # The rest is for weights, caches, and connections that were accepted and are closed at once.
    most = min(CONNECTIONS, system.allow_files(OPEN_FILES) // 3)
    seconds = registry.first.settings.seconds + CUT_SECONDS + KEEP_ALIVE
    config = uvicorn.Config(
        make_app(registry, replace(access, loopback_name=host if loopback else None)),
        log_config=None,
        access_log=False,
        lifespan="off",
        ws="none",
        loop="asyncio",
        http=partial(Connection, most, seconds),  # type: ignore[arg-type]
        server_header=False,
        proxy_headers=False,
        headers=[("Keep-Alive", f"timeout={KEEP_ALIVE - 5}")],
        backlog=min(BACKLOG, most // 3),
        timeout_keep_alive=KEEP_ALIVE,
        timeout_graceful_shutdown=FINISH_SECONDS + CUT_SECONDS,
    )
    key = "MLX_SPECDEC_API_KEY" if access.keys else ""
    server = _Server(config, registry, f"http://{reached}:{port}", key)
    log.info("listening on http://%s:%d", where, port)
    if not access.keys and not loopback:
        log.warning("anybody who reaches %s may ask: set an --api-key", where)
    # uvicorn sets these again when it has ended. A signal after that ends the process at once.
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda *_: os._exit(0))
    with contextlib.closing(registry):
        server.run(sockets=[listener])
    registry.refresh()
    if registry.fatal is not None:
        raise registry.fatal
    if registry.engines or not registry.first.stays:
        # MLX's threads sometimes abort Python's own exit, which only other machines need.
        os._exit(0)


def _join(model: ServedModel) -> None:
    """Wait for the end of a model's closed engine."""
    if (engine := model.engine) is None:
        return
    directory = model.store.directory
    writes, ended = engine.ready.is_set(), engine.join(CUT_SECONDS)
    if writes and directory is not None and not ended:
        log.info("waiting for %s, which writes its prompt cache to %s", model.name, directory)
        ended = engine.join(WRITE_SECONDS)
    if not ended:
        log.info("not waiting for %s, which is in a long step or a download", model.name)


class Connection(H11Protocol):
    """A connection to a client. If there are too many connections, it is closed at once. It is also
    closed some time after its newest request, or after its beginning if there is none, because
    uvicorn waits for ever for a client that is silent or reads nothing.

    Args:
        most: Largest number of connections.
        seconds: Time for a request, its answer, and the idle time after it.
        settings: Of uvicorn's protocol.
    """

    def __init__(self, most: int, seconds: float, **settings: Any) -> None:
        super().__init__(**settings)
        self._most, self._seconds = most, seconds

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._late = self.loop.call_later(self._seconds, transport.abort)
        if len(self.connections) > self._most:
            transport.abort()

    def data_received(self, data: bytes) -> None:
        earlier = self.cycle
        super().data_received(data)
        if self.cycle is not earlier:
            self._late.cancel()
            self._late = self.loop.call_later(self._seconds, self.transport.abort)

    def connection_lost(self, exc: Exception | None) -> None:
        self._late.cancel()
        super().connection_lost(exc)


class _Server(uvicorn.Server):
    def __init__(self, config: uvicorn.Config, registry: Registry, url: str, key: str) -> None:
        super().__init__(config)
        self._registry, self._ready = registry, False
        word, env_key = (f"${key}", f', env_key="{key}"') if key else ("unused", "")
        self._values = {"url": url, "key": word, "env_key": env_key}
        # The models whose clients have no printed configuration yet.
        self._unshown = list(registry.models)
        self._signals: list[int] = []

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """Stop at a signal. The second signal ends pending answers, and the third one the process.
        Blocks of a prompt cache are complete files at any time."""
        self._signals.append(sig)
        if self.should_exit:
            if self._registry.closed or len(self._signals) > 2:
                os._exit(0)
            asyncio.get_running_loop().call_soon_threadsafe(self._registry.close)
        self.should_exit = True

    async def on_tick(self, counter: int) -> bool:
        """Return whether to accept no more connections. Called by uvicorn ten times a second."""
        registry = self._registry
        registry.refresh()
        self.should_exit = self.should_exit or registry.fatal is not None
        if not (self._ready or registry.begins):
            self._ready = True
            log.info("ready")
            self._show({"any"})
        # The abilities of one of several models are known when it has been loaded.
        for model in [model for model in self._unshown if self._ready and model.facts.longest]:
            self._unshown.remove(model)
            facts = model.facts
            self._show({*facts.capabilities, "chat" if facts.chats else ""}, model.name)
        return await super().on_tick(counter)

    def _show(self, abilities: Collection[str], model: str = "") -> None:
        """Print a line with the configuration of each client that needs one of these abilities; see
        docs/agents.md."""
        clients = Path(__file__).with_name("clients.toml").read_text("utf-8")
        for name, client in tomllib.loads(clients).items():
            if client["needs"] in abilities:
                line = Template(client["line"]).substitute(self._values, model=model)
                # While another model is loaded, sys.stdout may be redirected.
                print(f"{name:<13}{line}", file=sys.__stdout__, flush=True)

    async def shutdown(self, sockets: Sequence[socket.socket] | None = None) -> None:
        """Finish requests and write the prompt caches. Called by uvicorn at the end."""
        if count := len(self.server_state.tasks):
            hint = "; press Ctrl-C again to stop" if signal.SIGINT in self._signals else ""
            log.info("finishing %d request%s%s", count, "" if count == 1 else "s", hint)
        else:
            log.info("shutting down")
        cut = asyncio.get_running_loop().call_later(FINISH_SECONDS, self._registry.close)
        await super().shutdown(list(sockets or ()))
        cut.cancel()
        self._registry.close()
        joins = [asyncio.to_thread(_join, model) for model in self._registry.models]
        await asyncio.gather(*joins)


def listen(host: str, port: int) -> socket.socket:
    """Return a socket that listens. Raises OptionError if the address cannot be used."""
    try:
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        made = socket.create_server((host, port), family=family, backlog=BACKLOG)
    except OSError as problem:
        raise OptionError(
            f"cannot listen on {host} port {port} ({problem.strerror}): choose another --host or "
            "--port"
        ) from None
    # asyncio sets TCP_NODELAY only for sockets that name their protocol.
    return socket.socket(made.family, made.type, socket.IPPROTO_TCP, made.detach())
