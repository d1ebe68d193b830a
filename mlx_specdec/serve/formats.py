"""What the text of a request has to look like: from clients' names for it to the options'."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from ..errors import OptionError
from ..options import Options
from ..pair import Pair
from ..prepare import for_model
from .body import Body
from .limits import Limits
from .problems import wrong

Binding = dict[str, Any]
"""The one option that binds a text, by its name; empty where none does."""
ANY_OBJECT = {"type": "object"}


def binding(pair: Pair, options: Options, body: Body, limits: Limits) -> Binding:
    """What a body binds its text to, read by llguidance and possible for this model.

    options: of the server. Raises Problem with the field that is wrong.
    """
    for name, read in FIELDS.items():
        if name in body and (bound := read(body[name])):
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


def of_tgi(grammar: Body) -> Body:
    """TGI's parameter `grammar` as the field of a completion."""
    kind, value = grammar["type"], grammar["value"]
    if kind == "json_schema":
        kind, value = "json", value["schema"]
    return {"structured_outputs": {kind: value}}


def _response_format(given: Body) -> Binding:
    """OpenAI's, and llama.cpp's with the schema one step further out, which TGI calls value."""
    if given["type"] == "text":
        return {}
    if given["type"] == "json_object":
        return _json_schema(given.get("schema") or given.get("value") or ANY_OBJECT)
    return _json_schema(given.get("json_schema", given)["schema"])


def _structured_outputs(given: Body) -> Binding:
    """vLLM's."""
    [(kind, value)] = given.items()
    return KINDS[kind](value)


def _json_schema(schema: str | Body) -> Binding:
    whole = schema if isinstance(schema, str) else json.dumps(schema, ensure_ascii=False)
    return {"json_schema": whole}


def _choice(texts: Sequence[str]) -> Binding:
    literals = (json.dumps(each, ensure_ascii=False) for each in texts)
    return {"grammar": f"start: {' | '.join(literals)}"}


KINDS: Mapping[str, Callable[[Any], Binding]] = {
    "json": _json_schema,
    "regex": lambda pattern: {"regex": pattern},
    "grammar": lambda grammar: {"grammar": grammar},
    "choice": _choice,
}
"""What clients call the kinds of bindings."""
FIELDS: Mapping[str, Callable[[Any], Binding]] = {
    "response_format": _response_format,
    "structured_outputs": _structured_outputs,
    "regex": KINDS["regex"],
    "grammar": KINDS["grammar"],
    **{f"guided_{kind}": read for kind, read in KINDS.items()},
}


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
