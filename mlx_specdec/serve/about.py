"""Routes, bodies and answers of the server, as an OpenAPI 3.1 document."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from starlette.requests import Request
from starlette.responses import HTMLResponse, JSONResponse, Response
from starlette.routing import Route

from .. import __version__
from .body import Schema
from .chat import way_of
from .fields import OBJECT, TEXT, WHOLE, either, several
from .metrics import CONTENT_TYPE
from .problems import busy
from .requests import unknown_model
from .service import FINGERPRINT, Service, outside

STATUSES = (400, 401, 403, 404, 408, 413, 422, 424, 429, 500, 503)
JSON, STREAM = "application/json", "text/event-stream"


def description(name: str, requests: Mapping[str, Schema]) -> dict[str, Any]:
    """The whole document. name: of the model. requests: schemas of bodies by name, of `fields`."""
    id_ = {"name": "id", "in": "path", "required": True, "schema": {"enum": [name]}}
    return {
        "openapi": "3.1.0",
        "info": {"title": "mlx-specdec", "version": __version__},
        "paths": {
            "/v1/chat/completions": _post("Answers messages", "ChatRequest", "Completion"),
            "/v1/completions": _post("Goes on with a text", "TextRequest", "Completion"),
            "/v1/messages": _post("Answers Anthropic's clients", "MessagesRequest", "Message"),
            "/v1/messages/count_tokens": _post("Counts tokens", "CountRequest", "Count"),
            "/generate": _post("Answers TGI's clients", "GenerateRequest", "Generated"),
            "/generate_stream": _post("The same as a stream", "GenerateRequest", "Generated"),
            "/tokenize": _post("Token ids of a text or a chat", "TokenizeRequest", "Tokens"),
            "/detokenize": _post("The text of token ids", "DetokenizeRequest", "Detokenized"),
            "/v1/models": _get("The one model, in a list", "Models"),
            "/v1/models/{id}": {"parameters": [id_], **_get("The one model", "Model")},
            "/props": _get("What is served, and how", "Anything"),
            "/info": _get("What is served, for TGI's clients", "Anything"),
            "/health": _get("Whether requests are taken", "Anything"),
            "/v1/health": _get("The same", "Anything"),
            "/metrics": _get("Prometheus' figures", "Text", "text/plain"),
            "/": {
                **_get("A chat for a browser", "Text", "text/html"),
                **_post("Answers TGI's clients", "GenerateRequest", "AnyGenerated"),
            },
            "/openapi.json": _get("This document", "Anything"),
        },
        "components": {
            "schemas": {**requests, **_answers()},
            "securitySchemes": {"key": {"type": "http", "scheme": "bearer"}},
        },
        "security": [{}, {"key": []}],
    }


def _get(summary: str, answer: str, media: str = JSON) -> Schema:
    return {"get": {"summary": summary, "responses": _responses({media: _ref(answer)})}}


def _post(summary: str, body: str, answer: str) -> Schema:
    told = {
        "summary": summary,
        "requestBody": {"required": True, "content": {JSON: {"schema": _ref(body)}}},
        "responses": _responses({JSON: _ref(answer), STREAM: {}}),
    }
    return {"post": told}


def _responses(content: dict[str, Schema]) -> Schema:
    whole = {media: {"schema": schema} for media, schema in content.items()}
    error = {JSON: {"schema": _ref("Error")}}
    return {
        "200": {"description": "The answer", "content": whole},
        **{str(each): {"description": "Why there is none", "content": error} for each in STATUSES},
    }


def _ref(name: str) -> Schema:
    return {"$ref": f"#/components/schemas/{name}"}


def _answers() -> dict[str, Schema]:
    """What answers look like, as far as clients rely on it."""
    choice = _answer(index=WHOLE, finish_reason={"enum": ["stop", "length", "tool_calls"]})
    usage = _answer(prompt_tokens=WHOLE, completion_tokens=WHOLE, total_tokens=WHOLE)
    model = _answer(id=TEXT, object={"const": "model"}, created=WHOLE, owned_by=TEXT)
    return {
        "Completion": _answer(
            id=TEXT,
            object={"enum": ["chat.completion", "text_completion"]},
            created=WHOLE,
            model=TEXT,
            choices=several(choice, 1),
            usage=usage,
        ),
        "Message": _answer(
            id=TEXT,
            type={"const": "message"},
            role={"const": "assistant"},
            model=TEXT,
            content=several(_answer(type=TEXT)),
            stop_reason=TEXT,
            usage=_answer(input_tokens=WHOLE, output_tokens=WHOLE),
        ),
        "Count": _answer(input_tokens=WHOLE),
        "Generated": _answer(generated_text=TEXT),
        "AnyGenerated": several(_answer(generated_text=TEXT), 1, 1),
        "Tokens": _answer(tokens=several(WHOLE), count=WHOLE, max_model_len=WHOLE),
        "Detokenized": _answer(content=TEXT, prompt=TEXT),
        "Models": _answer(object={"const": "list"}, data=several(_ref("Model"), 1)),
        "Model": model,
        "Text": TEXT,
        "Anything": OBJECT,
        "Error": {
            "type": "object",
            "required": ["error"],
            "properties": {"error": either(_answer(message=TEXT, type=TEXT), TEXT)},
        },
    }


def _answer(**properties: Schema) -> Schema:
    """An object of an answer: all of it is there."""
    return {"type": "object", "properties": properties, "required": list(properties)}


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
