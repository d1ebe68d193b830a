"""What the server understands, as OpenAPI 3.1 says it.

Fields that are not named here are ignored, so that no object is closed, and null is as good as
not there.
"""

from __future__ import annotations

from typing import Any

from .. import __version__
from ..options import MOST_DRAFTED
from ..sampling.settings import LARGEST, REPETITION_PENALTIES
from .limits import Limits

Schema = dict[str, Any]
TEXT: Schema = {"type": "string"}
WHOLE: Schema = {"type": "integer"}
NUMBER: Schema = {"type": "number"}
TRUTH: Schema = {"type": "boolean"}
OBJECT: Schema = {"type": "object"}
IDS: Schema = {"type": "array", "items": {"type": "integer", "minimum": 0}, "minItems": 1}
STATUSES = (400, 401, 403, 404, 408, 413, 422, 424, 429, 500, 503)
JSON, STREAM = "application/json", "text/event-stream"


def description(name: str, limits: Limits) -> dict[str, Any]:
    """The whole document. name: of the model."""
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
            "/metrics": _get("Prometheus' figures", "Text", "text/plain"),
            "/": _get("A chat for a browser", "Text", "text/html"),
            "/openapi.json": _get("This document", "Anything"),
        },
        "components": {
            "schemas": {**_requests(name, limits), **_answers()},
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


def _fields(required: tuple[str, ...] = (), **properties: Schema) -> Schema:
    """An object of a request: what is not required may be null."""
    own = {
        name: each if name in required else {"anyOf": [each, {"type": "null"}]}
        for name, each in properties.items()
    }
    told: Schema = {"type": "object", "properties": own}
    return {**told, "required": list(required)} if required else told


def _within(least: float | None = None, most: float | None = None, base: Schema = NUMBER) -> Schema:
    bounds = {"minimum": least, "maximum": most}
    return {**base, **{name: each for name, each in bounds.items() if each is not None}}


def _list(of: Schema, least: int = 0, most: int | None = None) -> Schema:
    bounds = {"minItems": least, "maxItems": most}
    own = {name: each for name, each in bounds.items() if each is not None}
    return {"type": "array", "items": of, **own}


def _either(*each: Schema) -> Schema:
    return {"anyOf": list(each)}


def _requests(name: str, limits: Limits) -> dict[str, Schema]:
    """What bodies look like."""
    stop = {**TEXT, "minLength": 1, "maxLength": limits.stop_length}
    stops = _list(stop, 0, limits.stops)
    words = {**TEXT, "pattern": r"\S"}
    settings: dict[str, Schema] = {
        "model": {"enum": [name]},
        "stream": TRUTH,
        "seed": WHOLE,
        "max_tokens": _within(0, base=WHOLE),
        "temperature": _within(0),
        "top_p": {**NUMBER, "exclusiveMinimum": 0, "maximum": 1},
        "top_k": _within(0, base=WHOLE),
        "speculative": _either(TRUTH, _fields(max=_within(0, MOST_DRAFTED, WHOLE))),
    }
    openai: dict[str, Schema] = {
        **settings,
        "stream_options": _fields(include_usage=TRUTH, include_drafted=TRUTH),
        "max_completion_tokens": _within(0, base=WHOLE),
        "n": _within(1, limits.choices, WHOLE),
        "stop": _either(stop, stops),
        "ignore_eos": TRUTH,
        "min_p": {**NUMBER, "minimum": 0, "exclusiveMaximum": 1},
        "presence_penalty": _within(-LARGEST, LARGEST),
        "frequency_penalty": _within(-LARGEST, LARGEST),
        "repetition_penalty": _within(*REPETITION_PENALTIES),
        "logit_bias": {**OBJECT, "patternProperties": {"^[0-9]{1,9}$": NUMBER}},
        "prediction": _fields(("type", "content"), type={"const": "content"}, content=_content()),
        "response_format": _fields(
            ("type",), type={"enum": ["text", "json_object", "json_schema"]}
        ),
        "structured_outputs": _fields(json=_either(TEXT, OBJECT), regex=TEXT, grammar=TEXT),
        "regex": TEXT,
        "grammar": TEXT,
    }
    messages = _list(_ref("ChatMessage"), 1)
    anthropic = {"system": _content(), "messages": messages, "tools": _list(OBJECT)}
    parameters: dict[str, Schema] = {
        "max_new_tokens": _within(0, base=WHOLE),
        "temperature": _within(0),
        "top_p": settings["top_p"],
        "top_k": settings["top_k"],
        "seed": WHOLE,
        "stop": _either(stop, stops),
        "details": TRUTH,
        "do_sample": TRUTH,
        "return_full_text": TRUTH,
    }
    return {
        "ChatMessage": _fields(
            ("role", "content"),
            role={"enum": ["system", "developer", "user", "assistant", "tool"]},
            content=_content(),
        ),
        "Tool": _fields(
            ("function",),
            type={"const": "function"},
            function=_fields(("name",), name=TEXT, description=TEXT, parameters=OBJECT),
        ),
        "ChatRequest": _fields(
            ("messages",),
            **openai,
            messages=messages,
            logprobs=TRUTH,
            top_logprobs=_within(0, 20, WHOLE),
            tools=_list(_ref("Tool"), 0, limits.tools),
            tool_choice=_either({"enum": ["none", "auto", "required"]}, OBJECT),
            parallel_tool_calls=TRUTH,
            chat_template_kwargs=OBJECT,
        ),
        "TextRequest": _fields(
            ("prompt",),
            **openai,
            prompt=_either(words, IDS, _list(words, 1), _list(IDS, 1)),
            logprobs=_either(_within(0, 20, WHOLE), {"const": False}),
            echo=TRUTH,
        ),
        "MessagesRequest": _fields(
            ("messages", "max_tokens"),
            **settings,
            **anthropic,
            stop_sequences=stops,
            thinking=OBJECT,
            tool_choice=OBJECT,
        ),
        "CountRequest": _fields(("messages",), **anthropic),
        "GenerateRequest": _fields(("inputs",), inputs=words, parameters=_fields((), **parameters)),
        "TokenizeRequest": _fields(content=words, prompt=words, messages=messages),
        "DetokenizeRequest": _fields(("tokens",), tokens={**IDS, "minItems": 0}),
    }


def _content() -> Schema:
    part = _fields(("type", "text"), type={"const": "text"}, text=TEXT)
    return _either(TEXT, _list(part))


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
            choices=_list(choice, 1),
            usage=usage,
        ),
        "Message": _answer(
            id=TEXT,
            type={"const": "message"},
            role={"const": "assistant"},
            model=TEXT,
            content=_list(_answer(type=TEXT)),
            stop_reason=TEXT,
            usage=_answer(input_tokens=WHOLE, output_tokens=WHOLE),
        ),
        "Count": _answer(input_tokens=WHOLE),
        "Generated": _answer(generated_text=TEXT),
        "Tokens": _answer(tokens={**IDS, "minItems": 0}, count=WHOLE, max_model_len=WHOLE),
        "Detokenized": _answer(content=TEXT, prompt=TEXT),
        "Models": _answer(object={"const": "list"}, data=_list(_ref("Model"), 1)),
        "Model": model,
        "Text": TEXT,
        "Anything": OBJECT,
        "Error": {
            "type": "object",
            "required": ["error"],
            "properties": {"error": _either(_answer(message=TEXT, type=TEXT), TEXT)},
        },
    }


def _answer(**properties: Schema) -> Schema:
    """An object of an answer: all of it is there."""
    return {"type": "object", "properties": properties, "required": list(properties)}
