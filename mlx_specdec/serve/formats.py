"""What the text of a request has to look like: from clients' names for it to the options'."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from ..errors import OptionError
from ..options import Options
from ..pair import Pair
from ..prepare import for_model
from . import body as fields
from .body import Body
from .limits import Limits
from .problems import unsupported, wrong

Binding = dict[str, Any]
"""The one option that binds a text, by its name; empty where none does."""
ANY_OBJECT = {"type": "object"}
OPTIONS = {"json": "json_schema", "regex": "regex", "grammar": "grammar"}
"""What vLLM's structured_outputs may name, and the options that mean it."""


def binding(pair: Pair, options: Options, body: Body, limits: Limits) -> Binding:
    """What a body binds its text to, read by llguidance and possible for this model.

    options: of the server. Raises Problem with the field that is wrong.
    """
    given = {name: bound for name, read in FIELDS.items() if name in body and (bound := read(body))}
    if len(given) > 1:
        raise wrong(f"{' and '.join(given)} cannot both hold: give one", [*given][-1])
    for name, bound in given.items():
        return checked(pair, options, name, bound, limits)
    return {}


def checked(pair: Pair, options: Options, name: str, bound: Binding, limits: Limits) -> Binding:
    """The same, if llguidance can read it and the model write it. name: of the field that asks for
    it. Raises Problem."""
    check_size(name, bound, limits)
    try:
        for_model(pair, replace(options, **bound))
    except OptionError as problem:
        raise wrong(str(problem), name) from None
    return bound


def of_tgi(given: object) -> Body:
    """TGI's parameter `grammar` as the field of a completion. Raises Problem."""
    asked = given if isinstance(given, dict) else {}
    kind, value = asked.get("type"), asked.get("value")
    if kind == "json_schema" and isinstance(value, dict):
        kind, value = "json", value.get("schema")
    if kind not in ("json", "regex") or not isinstance(value, (dict, str)):
        raise wrong('grammar must be {"type": "json" or "regex", "value": ...}', "grammar")
    return {"structured_outputs": {kind: value}}


def _response_format(body: Body) -> Binding:
    """OpenAI's, and llama.cpp's with the schema one step further out, which TGI calls value."""
    name = "response_format"
    asked = fields.object_of(body, name)
    kind = asked.get("type")
    if kind == "text":
        return {}
    if kind == "json_object":
        return _json_schema(asked.get("schema") or asked.get("value") or ANY_OBJECT, name)
    if kind != "json_schema":
        raise wrong(f"{name}.type must be text, json_object or json_schema", name)
    inner = asked.get("json_schema", asked)
    schema = inner.get("schema") if isinstance(inner, dict) else None
    if not isinstance(schema, dict):
        raise wrong(f"{name}.json_schema.schema must be a JSON schema, an object", name)
    return _json_schema(schema, name)


def _structured_outputs(body: Body) -> Binding:
    """vLLM's."""
    name = "structured_outputs"
    asked = {key: value for key, value in fields.object_of(body, name).items() if value is not None}
    for key in asked:
        if key not in OPTIONS:
            raise unsupported(f"{name}.{key}")
    if len(asked) != 1:
        raise wrong(f"{name} must have one of {', '.join(OPTIONS)}", name)
    [(key, value)] = asked.items()
    return _json_schema(value, name) if key == "json" else {OPTIONS[key]: _text(value, name)}


def _json_schema(schema: object, field: str) -> Binding:
    if isinstance(schema, dict):
        schema = json.dumps(schema, ensure_ascii=False)
    return {"json_schema": _text(schema, field)}


def _text(value: object, field: str) -> str:
    if not isinstance(value, str):
        raise wrong(f"what {field} asks for must be a string, or a JSON schema an object", field)
    return value


FIELDS: Mapping[str, Callable[[Body], Binding]] = {
    "response_format": _response_format,
    "structured_outputs": _structured_outputs,
    "regex": lambda body: {"regex": fields.text(body, "regex")},
    "grammar": lambda body: {"grammar": fields.text(body, "grammar")},
}
"""What clients call it."""


def check_size(field: str, bound: Binding, limits: Limits) -> None:
    """Raises Problem for what would take long to read."""
    [(kind, text)] = bound.items()
    if len(text.encode()) > limits.schema_bytes:
        raise wrong(f"{field} has more than {limits.schema_bytes} bytes: shorten it", field)
    if kind == "json_schema" and _depth(text) > limits.schema_depth:
        raise wrong(f"{field} is nested more than {limits.schema_depth} deep", field)


def _depth(text: str) -> int:
    """How many brackets of a JSON text are in each other; 0 where it is none."""
    try:
        level = [json.loads(text)]
    except (ValueError, RecursionError):
        return 0
    depth = 0
    while containers := [each for each in level if isinstance(each, (dict, list))]:
        level = [
            inner
            for each in containers
            for inner in (each.values() if isinstance(each, dict) else each)
        ]
        depth += 1
    return depth
