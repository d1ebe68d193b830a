"""Routes, bodies and answers of the server, as an OpenAPI 3.1 document."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from .. import __version__
from .body import Schema
from .fields import OBJECT, TEXT, WHOLE, either, several

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
