"""The tools that a request lets the model call, checked."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from ..engine.pair import Pair
from ..engine.prepare import for_model
from ..errors import OptionError
from ..options import Options
from .body import Body, loads
from .limits import Limits
from .problems import wrong

Tool = dict[str, Any]


@dataclass(frozen=True)
class Tools:
    """What may be called, as chat templates take it. must: names of which one has to be called;
    none where the model may answer without. most_calls: None where there may be any number."""

    given: tuple[Tool, ...] = ()
    must: tuple[str, ...] = ()
    most_calls: int | None = None


NO_TOOLS = Tools()


def tools_of(body: Body) -> Tools:
    """Return the tools of a chat's body; a later tool replaces one of the same name.

    Raises Problem."""
    given = [each["function"] for each in body.get("tools", ())] or body.get("functions", ())
    choice = body.get("tool_choice", body.get("function_call", "auto"))
    functions = {
        each["name"]: {name: value for name, value in each.items() if value is not None}
        for each in given
    }
    tools = tuple({"type": "function", "function": each} for each in functions.values())
    parallel = body.get("parallel_tool_calls", True)
    most = None if parallel else 1
    if choice == "none" or (choice == "auto" and not tools):
        # What the model is not told of it does not call.
        return NO_TOOLS
    if choice == "auto":
        return Tools(tools, (), most)
    if choice == "required":
        return Tools(tools, tuple(functions), most)
    name = choice.get("function", choice)["name"]
    if name not in functions:
        raise wrong(f"tool_choice names {name:.80}, which is none of the functions", "tool_choice")
    return Tools(tools, (name,), 1)


def calls_of(given: Sequence[Tool]) -> list[Tool]:
    """The calls of an assistant's message, their arguments as objects, which is how templates want
    them: some ask for their items. Arguments that are no JSON object, such as those of an answer
    that was cut, are an object that has them as a string."""
    return [_call(each) for each in given]


def _call(given: Tool) -> Tool:
    function = given["function"]
    arguments = function.get("arguments") or "{}"
    if isinstance(arguments, str):
        text = arguments
        try:
            arguments = loads(text.encode())
        except (ValueError, RecursionError):
            arguments = None
        if not isinstance(arguments, dict):
            arguments = {"arguments": text}
    own = {"name": function["name"], "arguments": arguments}
    return {**given, "type": "function", "function": own}


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
