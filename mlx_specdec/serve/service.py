"""What all routes need: the engine, the limits, and bodies that are read within them."""

from __future__ import annotations

import asyncio
import functools
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from starlette.concurrency import run_in_threadpool
from starlette.requests import Request

from .. import __version__
from ..errors import SpecdecError
from ..text.vocabulary import token_bytes
from . import body as fields
from .body import Body
from .engine import Engine
from .limits import Limits
from .problems import Problem, busy, wrong
from .requests import Asking

SMALL_BODY = 1 << 16
"""Bytes of each body that do not count towards the limit of all bodies together, so that large
bodies cannot keep small ones out."""
FINGERPRINT = f"mlx-specdec-{__version__}"


class Service:
    """name: of the model, as clients see it. drawn_seeds: a request without a seed gets one of its
    own, and not that of the options. metrics: answers tell what drafts brought in vLLM's names.
    keep_billing, strict_model: as Asking has them."""

    def __init__(
        self,
        engine: Engine,
        name: str,
        limits: Limits,
        *,
        drawn_seeds: bool = True,
        metrics: bool = False,
        keep_billing: bool = False,
        strict_model: bool = False,
    ) -> None:
        self.engine = engine
        self.name = name
        # More than an idle engine takes could be tried again for ever.
        most = engine.batch_size + limits.waiting
        self.limits = replace(limits, choices=min(limits.choices, most))
        self.drawn_seeds = drawn_seeds
        self.metrics = metrics
        self.keep_billing = keep_billing
        self.strict_model = strict_model
        self.created = int(time.time())
        self._large_bytes = 0

    @functools.cached_property
    def pieces(self) -> list[bytes | None]:
        """The bytes that each token id stands for."""
        return token_bytes(self.engine.pair.tokenizer)

    def asking(self) -> Asking:
        """Raises Problem while the models are being loaded."""
        if not self.engine.ready.is_set():
            raise busy("Loading model", code="loading")
        engine = self.engine
        return Asking(
            engine.pair,
            engine.options,
            self.limits,
            self.name,
            self.drawn_seeds,
            self.keep_billing,
            self.strict_model,
            engine.budget,
        )

    async def body(self, request: Request) -> Body:
        """Raises Problem for one that is too large, too slow or no JSON."""
        most, data, large = self.limits.body_bytes, bytearray(), 0
        try:
            async with asyncio.timeout(self.limits.body_seconds):
                async for chunk in request.stream():
                    data += chunk
                    if len(data) > most:
                        raise Problem(413, f"the body has more than {most} bytes: shorten it")
                    more = max(0, len(data) - SMALL_BODY) - large
                    if self._large_bytes + more > self.limits.large_bytes:
                        raise busy("too many large bodies come at once: try again", 429)
                    self._large_bytes, large = self._large_bytes + more, large + more
            return await outside(lambda: fields.parse(bytes(data)))
        except TimeoutError:
            raise Problem(408, "the body took too long to come") from None
        finally:
            self._large_bytes -= large


async def outside(work: Callable[[], Any]) -> Any:
    """Outside the event loop, what reads texts. Raises Problem."""
    try:
        return await run_in_threadpool(work)
    except SpecdecError as problem:
        raise wrong(str(problem)) from None
