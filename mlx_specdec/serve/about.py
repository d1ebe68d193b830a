"""Routes that say what is served, and what its tokens are."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

from starlette.requests import Request
from starlette.responses import HTMLResponse, JSONResponse, Response
from starlette.routing import Route

from .. import __version__
from .asked import unknown_model
from .chat import way_of
from .metrics import CONTENT_TYPE
from .openapi import description
from .problems import busy
from .service import FINGERPRINT, Service, outside

PAGE_HEADERS = {
    "Content-Security-Policy": (
        "default-src 'none'; script-src 'unsafe-inline'; style-src 'unsafe-inline'; "
        "img-src data:; connect-src 'self'; base-uri 'none'; frame-ancestors 'none'"
    ),
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
}
"""The page asks this server alone, and no other page may have it in a frame."""


class About:
    """Handlers around a service."""

    def __init__(self, service: Service) -> None:
        self._service = service

    def routes(self) -> list[Route]:
        """All of them."""
        post, get = ["POST"], ["GET"]
        return [
            Route("/", self.page, methods=get),
            Route("/openapi.json", self.openapi, methods=get),
            Route("/health", self.health, methods=get),
            Route("/v1/health", self.health, methods=get),
            Route("/metrics", self.metrics, methods=get),
            Route("/props", self.props, methods=get),
            Route("/info", self.info, methods=get),
            Route("/v1/models", self.models, methods=get),
            Route("/v1/models/{id:path}", self.model, methods=get),
            Route("/tokenize", self.tokenize, methods=post),
            Route("/detokenize", self.detokenize, methods=post),
        ]

    async def page(self, request: Request) -> Response:
        """A chat for a browser."""
        return HTMLResponse(_page(), headers=PAGE_HEADERS)

    async def openapi(self, request: Request) -> Response:
        """All routes, and what they read and write."""
        return JSONResponse(description(self._service.name, self._service.asking().schemas))

    async def health(self, request: Request) -> Response:
        """Whether requests are taken, and texts make progress."""
        self._service.asking()
        engine = self._service.engine
        if trouble := engine.trouble:
            raise busy(f"texts make no progress: {trouble}", code="no_progress")
        failures = engine.failures
        told = {"last_failure": failures.last} if failures.count else {}
        return JSONResponse({"status": "ok", "failures": failures.count, **told})

    async def metrics(self, request: Request) -> Response:
        """Everything that is counted."""
        engine = self._service.engine
        nbytes = {
            "prompt_cache_bytes": (engine.cached_bytes, "Bytes of what is kept of prompts."),
            "memory_reserved_bytes": (engine.reserved_bytes, "Bytes that requests may take."),
            "memory_budget_bytes": (
                engine.budget.nbytes if engine.ready.is_set() else 0,
                "Bytes that all requests together may take.",
            ),
        }
        text = engine.metrics.as_text(self._service.name, *engine.requests, nbytes)
        return Response(text, media_type=CONTENT_TYPE)

    async def props(self, request: Request) -> Response:
        """What is served, and how."""
        asking = self._service.asking()
        pair, options, limits = asking.pair, asking.options, self._service.limits
        return JSONResponse(
            {
                "model_alias": self._service.name,
                "total_slots": self._service.engine.batch_size,
                "n_ctx": asking.longest,
                "chat": way_of(pair, options),
                "task_prefix": pair.task_prefix if options.chat_template else "",
                "rule": options.rule_name,
                "lossy": options.lossy,
                "num_draft": 0 if options.regular else options.num_draft,
                "has_draft_model": pair.draft is not None,
                "default_generation_settings": {
                    "max_tokens": options.max_tokens,
                    "temperature": options.temperature,
                    "top_p": options.top_p,
                    "top_k": options.top_k,
                    "min_p": options.min_p,
                    "seed": None if self._service.drawn_seeds else options.seed,
                },
                "limits": {
                    "body_bytes": limits.body_bytes,
                    "waiting": limits.waiting,
                    "seconds": limits.seconds,
                    "choices": limits.choices,
                    "stops": limits.stops,
                    "schema_bytes": limits.schema_bytes,
                    "schema_depth": limits.schema_depth,
                },
                "build_info": FINGERPRINT,
            }
        )

    async def models(self, request: Request) -> Response:
        """The one model."""
        return JSONResponse({"object": "list", "data": [self._model()]})

    async def model(self, request: Request) -> Response:
        """The one model, if that is the one."""
        if request.path_params["id"] != self._service.name:
            raise unknown_model(request.path_params["id"], self._service.name)
        return JSONResponse(self._model())

    async def tokenize(self, request: Request) -> Response:
        """Token ids of a text (`content`, or vLLM's `prompt`) or of messages."""
        asking, body = self._service.asking(), await self._service.body(request)

        def ids_of() -> list[int]:
            given = asking.read("TokenizeRequest", body)
            if "messages" in given:
                return asking.prompt(given)
            return asking.text_ids(given.get("content") or given["prompt"])

        ids = await outside(ids_of)
        return JSONResponse({"tokens": ids, "count": len(ids), "max_model_len": asking.longest})

    async def detokenize(self, request: Request) -> Response:
        """The text of token ids, special ones left out."""
        asking, body = self._service.asking(), await self._service.body(request)
        read, decode = asking.read, asking.pair.tokenizer.decode
        text = await outside(lambda: decode(read("DetokenizeRequest", body)["tokens"]))
        return JSONResponse({"content": text, "prompt": text})

    async def info(self, request: Request) -> Response:
        """What TGI's clients want to know."""
        asking, limits = self._service.asking(), self._service.limits
        return JSONResponse(
            {
                "model_id": self._service.name,
                "model_dtype": asking.pair.dtype,
                "model_pipeline_tag": "text-generation",
                "max_concurrent_requests": self._service.engine.batch_size + limits.waiting,
                "max_best_of": 1,
                "max_stop_sequences": limits.stops,
                "max_input_tokens": asking.longest - 1,
                "max_total_tokens": asking.longest,
                "version": __version__,
                "router": "mlx-specdec",
            }
        )

    def _model(self) -> dict[str, Any]:
        told = {"id": self._service.name, "object": "model", "created": self._service.created}
        return {**told, "owned_by": "mlx-specdec"}


@functools.cache
def _page() -> str:
    return Path(__file__).with_name("page.html").read_text(encoding="utf-8")
