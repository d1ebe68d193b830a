"""The tools that a request lets the model call, checked."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from .body import Body, loads
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
