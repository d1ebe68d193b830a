"""Constraints of the text in requests: OpenAI's, vLLM's, llama.cpp's and older names for JSON
schemas, expressions, grammars and choices."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from ..engine.pair import Pair
from ..engine.prepare import for_model
from ..errors import OptionError
from ..options import Options
from .body import Body
from .problems import invalid
from .settings import Limits

Constraint = dict[str, Any]
"""The one option that constrains a text, by its name; empty where none does."""


def constraint_of(body: Body, pair: Pair, options: Options, limits: Limits) -> Constraint:
    """Return the constraint of a body, after a check that this model can satisfy it.

    options: of the server. Raises Problem, which names the field.
    """
    for name, read in FIELDS.items():
        if name in body and (constraint := read(body[name])):
            check_size(name, constraint, limits)
            return checked(pair, options, name, constraint)
    return {}


def checked(pair: Pair, options: Options, field: str, constraint: Constraint) -> Constraint:
    """Return a constraint that llguidance can read and the model can satisfy. field: of the body,
    for the error. Raises Problem."""
    try:
        for_model(pair, replace(options, **constraint))
    except OptionError as error:
        raise invalid(str(error), field) from None
    return constraint


def check_size(field: str, constraint: Constraint, limits: Limits) -> None:
    """Refuse a constraint that would take long to compile. Raises Problem."""
    [(kind, text)] = constraint.items()
    if len(text.encode()) > limits.schema_bytes:
        raise invalid(f"{field} has more than {limits.schema_bytes} bytes: shorten it", field)
    if kind == "json_schema" and _depth(text) > limits.schema_depth:
        raise invalid(f"{field} is nested more than {limits.schema_depth} deep", field)


def _depth(text: str) -> int:
    """Return how many brackets of a JSON text are inside each other; 0 where it is no JSON."""
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


def _response_format(given: Body) -> Constraint:
    """OpenAI's. llama.cpp has the schema one level further out, where TGI calls it value."""
    if given["type"] == "text":
        return {}
    if given["type"] == "json_object":
        return _json_schema(given.get("schema") or given.get("value") or {"type": "object"})
    return _json_schema(given.get("json_schema", given)["schema"])


def _structured_outputs(given: Body) -> Constraint:
    """vLLM's."""
    [(kind, value)] = given.items()
    return KINDS[kind](value)


def _json_schema(schema: str | Body) -> Constraint:
    text = schema if isinstance(schema, str) else json.dumps(schema, ensure_ascii=False)
    return {"json_schema": text}


def _choice(texts: Sequence[str]) -> Constraint:
    literals = (json.dumps(each, ensure_ascii=False) for each in texts)
    return {"grammar": f"start: {' | '.join(literals)}"}


KINDS: Mapping[str, Callable[[Any], Constraint]] = {
    "json": _json_schema,
    "regex": lambda pattern: {"regex": pattern},
    "grammar": lambda grammar: {"grammar": grammar},
    "choice": _choice,
}
FIELDS: Mapping[str, Callable[[Any], Constraint]] = {
    "response_format": _response_format,
    "structured_outputs": _structured_outputs,
    "regex": KINDS["regex"],
    "grammar": KINDS["grammar"],
    **{f"guided_{kind}": read for kind, read in KINDS.items()},
}
