"""The serve command: run a server until a signal ends it."""

from __future__ import annotations

import logging
import math
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from ..checkpoints.disk import parse
from ..errors import OptionError
from .flags import Flags, ModelSampling, command, flag, group
from .loading import MemoryFlags, TextFlags, load_drafting, named

if TYPE_CHECKING:
    from ..engine.pair import Pair
    from ..options import Options

PROGRAM = __name__.partition(".")[0]
NEEDED = ("fastapi", "uvicorn")


@group("Server")
class NetworkFlags(Flags):
    host: str = flag("127.0.0.1", "The address to listen on; 0.0.0.0 is every one.")
    port: int = flag(8080, "The port to listen on; 0 takes a free one.")
    api_key: list[str] | None = flag(
        None,
        "A key that clients have to send, as a bearer token or in x-api-key; the flag may be "
        "repeated. Nothing is drafted from what another key's requests have written.",
        envvar="MLX_SPECDEC_API_KEY",
        show_envvar=True,
    )
    cors_origin: list[str] | None = flag(
        None,
        "An origin whose pages may ask, such as https://example.org; the flag may be repeated.",
        metavar="ORIGIN",
    )
    strict_model: bool = flag(
        False, "Refuse requests that name another model, instead of answering them with this one."
    )
    log_level: Literal["debug", "info", "warning", "error"] = flag(
        "info", "What is written to standard error; info has a line for each request."
    )
    tool_call_parser: str | None = flag(
        None,
        "The format in which the model calls tools, for a model whose chat template does not show "
        "it; an unknown name lists all.",
        metavar="NAME",
        show_default="by the chat template",
    )
    thinking_budget: int | None = flag(
        None,
        "The largest number of tokens of thoughts of an answer whose request names none.",
        metavar="TOKENS",
        show_default="no limit",
        min=0,
    )
    per_request_spec_decode_metrics: Literal["none", "summary"] = flag(
        "none", "With summary, answers also tell what drafts brought under vLLM's names."
    )


@group("Server")
class Load(Flags):
    batch_size: int = flag(16, "The number of requests that are decoded at once.", min=1)
    max_waiting: int = flag(64, "The number of requests that may wait; more are refused.", min=0)
    max_model_len: int | None = flag(
        None,
        "The largest number of tokens of a prompt and its answer together.",
        show_default="the model's own, or 4096",
        min=2,
    )
    timeout: float = flag(600.0, "The seconds after which an answer is cut.")
    drain_seconds: float = flag(
        0.0,
        "The seconds after SIGTERM in which /health says 503 but requests are still taken, so that "
        "proxies notice.",
        min=0,
    )


@group("Server")
class PromptCacheFlags(Flags):
    prompt_cache_bytes: str | None = flag(
        None,
        "The bound of what is kept of prompts, such as 4GB; 0 keeps nothing.",
        metavar="SIZE",
        show_default="an eighth of the memory, 8 GiB at most",
    )
    prompt_cache_dir: Path | None = flag(
        None,
        "A directory where what is kept is also written, so that a restart loses nothing.",
        metavar="DIR",
    )
    prompt_cache_disk: str | None = flag(
        None,
        "The bound of that directory, such as 50GB.",
        metavar="SIZE",
        show_default="a quarter of what is free, 32 GiB at most",
    )
    keep_billing_lines: bool = flag(
        False,
        "Leave lines x-anthropic-billing-header and countdowns (total_tokens) in system prompts of "
        "Claude Code; they change with every request, so that nothing behind them is read from the "
        "prompt cache.",
    )

    def size(self) -> int | None:
        """Return the limit in bytes, or None for the default. Raises OptionError if it is no
        size."""
        if self.prompt_cache_bytes is None:
            return None
        nbytes = parse(self.prompt_cache_bytes)
        if nbytes == 0 and self.prompt_cache_dir is not None:
            raise OptionError("--prompt-cache-bytes 0 keeps nothing: leave --prompt-cache-dir out")
        return nbytes


@group()
class Defaults(ModelSampling):
    max_tokens: int = flag(
        512, "The largest number of tokens of an answer whose request names none.", "-m"
    )
    seed: int | None = flag(  # type: ignore[assignment]
        None, "The seed of requests that name none.", show_default="random"
    )

    def for_options(self) -> dict[str, Any]:
        settings = super().for_options()
        return {name: value for name, value in settings.items() if value is not None}


@group()
class Requests(Defaults, MemoryFlags, TextFlags):
    """Flags that change the completions of requests."""


@command("mlx-specdec serve", "mlx-specdec serve --model weights/py-llama --draft-model auto")
def serve(
    network: NetworkFlags, load: Load, prompt_cache: PromptCacheFlags, flags: Requests
) -> None:
    """Serve a model over HTTP to OpenAI's and other clients.

    Without --model it is the shipped translator, from English to French. A request's text depends
    on its prompt, its settings and its seed alone, whatever else is served at the same time.
    Sampling flags are the defaults of requests that do not set them."""
    model, _ = named(flags)
    options = flags.options()
    if not 0 <= network.port < 1 << 16:
        raise OptionError(f"--port must lie between 0 and 65535, not {network.port}")
    if not load.timeout > 0:
        raise OptionError(f"--timeout must be more than 0, not {load.timeout}")
    cached_bytes, memory_budget = prompt_cache.size(), flags.memory()
    if "" in (network.api_key or ()):
        raise OptionError("--api-key is empty: give a key, or leave it out")
    for origin in network.cors_origin or ():
        if origin not in ("*", "null") and "://" not in origin:
            raise OptionError(
                f"--cors-origin must be an origin such as https://example.org, not {origin:.80}"
            )
    if network.tool_call_parser is not None:
        _check_parser(network.tool_call_parser)
    if missing := [name for name in NEEDED if find_spec(name) is None]:
        raise OptionError(
            f"the server needs {' and '.join(missing)}: run ./scripts/setup.sh in a clone, or pip "
            f"install {' '.join(missing)}"
        )
    logging.basicConfig(stream=sys.stderr, format="%(asctime)s %(levelname)s %(message)s")
    # Set the level of this package only, not of other libraries.
    logging.getLogger(PROGRAM).setLevel(network.log_level.upper())
    from ..engine.prompt_cache_files import Store
    from ..serve.app import Access
    from ..serve.server import serve as run
    from ..serve.settings import Limits, ServiceSettings

    disk = prompt_cache.prompt_cache_disk
    if disk is not None and prompt_cache.prompt_cache_dir is None:
        raise OptionError("--prompt-cache-disk bounds a directory: name it by --prompt-cache-dir")
    bound = None if disk is None else parse(disk)
    store = Store(cached_bytes, prompt_cache.prompt_cache_dir, bound)

    def loading() -> tuple[Pair, Options]:
        return load_drafting(
            flags, options, history=cached_bytes != 0, rows=load.batch_size, texts=math.inf
        )

    run(
        model,
        loading,
        network.host,
        network.port,
        access=Access(tuple(network.api_key or ()), tuple(network.cors_origin or ())),
        settings=ServiceSettings(
            Limits(waiting=load.max_waiting, seconds=load.timeout, context=load.max_model_len),
            drawn_seeds=flags.seed is None,
            metrics=network.per_request_spec_decode_metrics == "summary",
            keep_billing=prompt_cache.keep_billing_lines,
            strict_model=network.strict_model,
            tool_call_parser=network.tool_call_parser or "",
            thinking_budget=network.thinking_budget,
        ),
        batch_size=load.batch_size,
        store=store,
        memory_budget=memory_budget,
        drain_seconds=load.drain_seconds,
    )


def _check_parser(name: str) -> None:
    """Raise OptionError for an unknown format of tool calls."""
    from ..text.tool_formats import parser_names

    if name not in (names := parser_names()):
        raise OptionError(
            f"--tool-call-parser {name:.80} is unknown: it must be one of {', '.join(names)}"
        )
