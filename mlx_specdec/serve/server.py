"""The server's process. After a signal, the server accepts no connections, gives pending requests
some seconds to finish, ends the other ones with an error, and exits with 0. With a drain time,
SIGTERM first lets /health report the end, so that proxies send requests elsewhere."""

import asyncio
import contextlib
import ipaddress
import logging
import os
import resource
import signal
import socket
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from types import FrameType

import uvicorn
from uvicorn.protocols.http.h11_impl import H11Protocol

from ..errors import OptionError
from .app import Access, make_app
from .registry import Registry, ServedModel
from .requests import Facts
from .service import Service

FINISH_SECONDS = 20.0
"""Seconds to finish pending answers when the server ends."""
CUT_SECONDS = 2
"""Seconds to send the end of answers that were cut."""
WRITE_SECONDS = 300
"""Seconds for the last step and for writing the prompt cache to disk."""
MOST_CONNECTIONS = 1024
"""Connections that are answered. A quarter more get an error, and further ones are closed."""
BACKLOG = 128
"""Connections that wait to be accepted, and the most that asyncio accepts at once."""
OPEN_FILES = 4096
"""Largest number of open files: accepted and waiting connections, and weights."""
KEEP_ALIVE = 75
"""Seconds that an idle connection stays open. The header Keep-Alive names 5 s less, so that clients
close a connection before the server does."""
log = logging.getLogger(__name__)


def serve(
    registry: Registry, host: str, port: int, *, access: Access, drain_seconds: float = 0.0
) -> None:
    """Serve until a signal comes.

    Args:
        registry: The models. A single one is loaded at once.
        drain_seconds: Seconds after SIGTERM in which connections are accepted.
    Raises:
        OptionError: If the port cannot be used. Errors of loading a single model are raised, too.
    """
    listener = _listen(host, port)
    address, port = listener.getsockname()[:2]
    loopback = ipaddress.ip_address(address).is_loopback
    where = f"[{address}]" if ":" in address else address
    reached = "127.0.0.1" if address in ("0.0.0.0", "::") else where
    access = replace(access, loopback_name=host if loopback else None)
    # The rest is for weights, caches, and connections that were accepted and are closed at once.
    most = min(MOST_CONNECTIONS, _allow_files() // 3)
    service = Service(registry)
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
            backlog=min(BACKLOG, most // 3),
            limit_concurrency=most,
            timeout_keep_alive=KEEP_ALIVE,
            timeout_graceful_shutdown=int(FINISH_SECONDS) + 2 * CUT_SECONDS,
        ),
        service,
        f"http://{reached}:{port}",
        next(iter(access.keys), None),
        drain_seconds,
    )
    numbers = signal.SIGINT, signal.SIGTERM
    earlier = {number: signal.signal(number, server.handle_exit) for number in numbers}
    log.info("listening on http://%s:%d", where, port)
    if not access.keys and not loopback:
        log.warning("anybody who reaches %s may ask: set an --api-key", where)
    registry.begin(server.loaded)
    with listener:
        server.run(sockets=[listener])
    registry.close()
    engines = registry.engines
    ended = all([_join(model) for model in registry.models])  # noqa: C419
    for number, handler in earlier.items():
        signal.signal(number, handler)
    for engine in engines:
        if ended and engine.problem is not None:
            raise engine.problem
    if not (ended and any(model.stays for model in registry.models)):
        # MLX's threads sometimes abort Python's own exit, which only other machines need.
        with contextlib.suppress(OSError):
            sys.stdout.flush()
        os._exit(0)


def _allow_files() -> int:
    """Raise the limit of open files to OPEN_FILES, as far as the hard limit allows, and return it,
    or OPEN_FILES if there is none. The default is 256 on macOS and 1,024 under systemd."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == resource.RLIM_INFINITY:
        return OPEN_FILES
    most = max(soft, OPEN_FILES if hard == resource.RLIM_INFINITY else min(OPEN_FILES, hard))
    with contextlib.suppress(ValueError, OSError):
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, hard))
    return resource.getrlimit(resource.RLIMIT_NOFILE)[0]


def _join(model: ServedModel) -> bool:
    """Wait for the end of a model's closed engine, and return whether it has ended."""
    if (engine := model.engine) is None:
        return True
    directory = None if model.store is None else model.store.directory
    writes, ended = engine.ready.is_set(), engine.join(CUT_SECONDS)
    if writes and directory is not None and not ended:
        log.info("waiting for %s, which writes its prompt cache to %s", model.name, directory)
        ended = engine.join(WRITE_SECONDS)
    if not ended:
        log.info("not waiting for %s, which is in a long step or a download", model.name)
    return ended


def _word(key: str | None) -> str:
    return "unused" if key is None else "$MLX_SPECDEC_API_KEY"


def configuration(url: str, model: str, facts: Facts, key: str | None) -> list[str]:
    """Return a line with the configuration of each client that can use a model; see
    docs/agents.md."""
    word, tools = _word(key), "tools" in facts.capabilities
    env_key = "" if key is None else ', env_key="MLX_SPECDEC_API_KEY"'
    provider = f'{{name="local", base_url="{url}/v1", wire_api="responses"{env_key}}}'
    options = f'"options": {{"baseURL": "{url}/v1"}}, "models": {{"{model}": {{}}}}'
    package = '"npm": "@ai-sdk/openai-compatible"'
    continued = f"provider: openai, apiBase: {url}/v1, apiKey: {word}, model: {model}"
    codex = f"-m {model} -c model_provider=local -c 'model_providers.local={provider}'"
    claude = f"ANTHROPIC_BASE_URL={url} ANTHROPIC_AUTH_TOKEN={word} claude --model {model}"
    cline = f"provider OpenAI Compatible, base URL {url}/v1, key {word}, model {model}"
    lines = (
        (tools, f"Codex        codex {codex}"),
        (tools, f"Claude Code  {claude}"),
        (facts.chats, f"Cline        {cline}"),
        (facts.chats, f"Continue     models: [{{name: local, {continued}}}]"),
        (tools, f'opencode     {{"provider": {{"local": {{{package}, {options}}}}}}}'),
    )
    return [line for supported, line in lines if supported]


class Connection(H11Protocol):
    """A connection to a client, which is closed if the client is silent for too long, or at once
    if there are too many connections.

    Attributes:
        head_seconds: Limit for the headers of a request, and the rest of a body answered early.
        stall_seconds: Limit in which a client must read a part of the answer.
    """

    head_seconds = 10.0
    stall_seconds = 30.0
    _late: asyncio.TimerHandle | None = None
    _stalled: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        if len(self.connections) > 1.25 * (self.limit_concurrency or MOST_CONNECTIONS):
            transport.abort()
            return
        # This limit makes asyncio call pause_writing for any byte that the client has not read.
        transport.set_write_buffer_limits(high=0)
        # asyncio sets TCP_NODELAY only for sockets that name their protocol. On macOS, this call
        # fails if the client has already closed the connection.
        with contextlib.suppress(OSError):
            transport.get_extra_info("socket").setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._late = self.loop.call_later(self.head_seconds, transport.abort)

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        if self.cycle is not None and not self.cycle.response_complete:
            _cancel(self._late)
            self._late = None
        elif self._late is None:
            self._late = self.loop.call_later(self.head_seconds, self.transport.abort)

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

    def _check_reading(self, before: int | None) -> None:
        left = self.transport.get_write_buffer_size()
        if before is not None and left >= before:
            self.transport.abort()
        else:
            self._stalled = self.loop.call_later(self.stall_seconds, self._check_reading, left)


def _cancel(timer: asyncio.TimerHandle | None) -> None:
    if timer is not None:
        timer.cancel()


class _Server(uvicorn.Server):
    def __init__(
        self,
        config: uvicorn.Config,
        service: Service,
        url: str,
        key: str | None,
        drain_seconds: float,
    ) -> None:
        super().__init__(config)
        self._service = service
        self._registry = service.registry
        self._url, self._key = url, key
        # The models whose clients have no printed configuration yet, from when the server is ready.
        self._unshown: list[ServedModel] = []
        self._drain_seconds = drain_seconds
        self._accepts_until = 0.0
        self._interrupted = False

    def loaded(self) -> None:
        """Called when a single model has been loaded, or could not be, or at the beginning if there
        are several."""
        engines = self._registry.engines
        if any(engine.problem is not None for engine in engines):
            self.should_exit = True
        else:
            log.info("ready")
            sdk = f"OPENAI_BASE_URL={self._url}/v1 OPENAI_API_KEY={_word(self._key)}"
            print(f"Browser      {self._url}", f"OpenAI SDK   {sdk}", sep="\n", flush=True)
            self._unshown = list(self._registry.models)

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Do nothing. uvicorn's method would handle signals only while requests are served."""
        yield

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """Stop at a signal. The second signal ends the drain time, and the next one ends pending
        answers. If there are none yet or any more, it ends the process at once. Blocks of a prompt
        cache are complete files at any time."""
        if self.should_exit and not self._draining:
            try:
                asyncio.get_running_loop().call_soon_threadsafe(self._cut)
            except RuntimeError:  # no requests are served
                os._exit(0)
        self.should_exit = self._service.stopping = True
        self._interrupted = sig == signal.SIGINT
        drains = sig == signal.SIGTERM and not self._accepts_until
        self._accepts_until = time.monotonic() + self._drain_seconds * drains

    @property
    def _draining(self) -> bool:
        return time.monotonic() < self._accepts_until

    async def on_tick(self, counter: int) -> bool:
        """Return whether to accept no more connections. Called by uvicorn ten times a second."""
        self._registry.refresh()
        # The abilities of one of several models are known when it has been loaded.
        for model in [model for model in self._unshown if model.facts is not None]:
            assert model.facts is not None
            for line in configuration(self._url, model.name, model.facts, self._key):
                print(line, flush=True)
            self._unshown.remove(model)
        return await super().on_tick(counter) and not self._draining

    async def shutdown(self, sockets: Sequence[socket.socket] | None = None) -> None:
        """Called by uvicorn when connections are no longer accepted."""
        if count := len(self.server_state.tasks):
            hint = "; press Ctrl-C again to stop" if self._interrupted else ""
            what = f"{count} request{'' if count == 1 else 's'}"
            if pending := self._registry.pending():
                what += f" ({', '.join(pending)})"
            log.info("finishing %s%s", what, hint)
        else:
            log.info("shutting down")
        cut = asyncio.get_running_loop().call_later(FINISH_SECONDS, self._cut)
        await super().shutdown(list(sockets or ()))
        cut.cancel()

    def _cut(self) -> None:
        """End all answers with an error, and close connections whose clients do not read it in
        time. Cancelling the tasks would log a traceback for each of them."""
        self._registry.close()
        asyncio.get_running_loop().call_later(CUT_SECONDS, self._abort_connections)

    def _abort_connections(self) -> None:
        for connection in list(self.server_state.connections):
            connection.transport.abort()


def _listen(host: str, port: int) -> socket.socket:
    try:
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        return socket.create_server((host, port), family=family, backlog=BACKLOG)
    except OSError as problem:
        raise OptionError(
            f"cannot listen on {host} port {port} ({problem.strerror}): choose another --host or "
            "--port"
        ) from None
