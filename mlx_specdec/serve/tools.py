"""The tools that a request lets the model call, checked."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from . import body as fields
from .body import Body
from .limits import Limits
from .problems import unsupported, wrong

Tool = dict[str, Any]
NAME = re.compile(r"[A-Za-z0-9_.-]{1,64}")


@dataclass(frozen=True)
class Tools:
    """What may be called, as chat templates take it. must: names of which one has to be called;
    none where the model may answer without. most_calls: None where there may be any number."""

    given: tuple[Tool, ...] = ()
    must: tuple[str, ...] = ()
    most_calls: int | None = None


NO_TOOLS = Tools()


def tools_of(body: Body, limits: Limits) -> Tools:
    """The tools of a chat completion. Raises Problem."""
    given = body.get("tools", [])
    if not isinstance(given, list) or len(given) > limits.tools:
        raise wrong(f"tools must be a list of at most {limits.tools} functions", "tools")
    tools = tuple(_tool(each, f"tools[{at}]") for at, each in enumerate(given))
    names = tuple(each["function"]["name"] for each in tools)
    if len(set(names)) < len(names):
        raise wrong("tools has two functions of one name: give each its own", "tools")
    parallel = "parallel_tool_calls" not in body or fields.truth(body, "parallel_tool_calls")
    most = None if parallel else 1
    choice = body.get("tool_choice", "auto")
    if choice == "none" or (choice == "auto" and not tools):
        # What the model is not told of it does not call.
        return NO_TOOLS
    if choice == "auto":
        return Tools(tools, (), most)
    if not tools:
        raise wrong("tool_choice asks for a call, and there are no tools", "tool_choice")
    if choice == "required":
        return Tools(tools, names, most)
    return Tools(tools, (_named(choice, names),), 1)


def calls_of(given: object, where: str) -> list[Tool]:
    """The calls of an assistant's message, their arguments as objects, which is how templates want
    them: some ask for their items. Arguments that are no JSON object, such as those of an answer
    that was cut, are an object that has them as a string. Raises Problem."""
    if not isinstance(given, list):
        raise wrong(f"the tool_calls of {where} must be a list", "messages")
    return [_call(each, where) for each in given]


def _call(given: object, where: str) -> Tool:
    function = given.get("function") if isinstance(given, dict) else None
    if not isinstance(given, dict) or not isinstance(function, dict):
        raise wrong(f'{where} has a tool call without {{"function": ...}}', "messages")
    if not isinstance(function.get("name"), str):
        raise wrong(f"{where} has a tool call without a name", "messages")
    arguments = function.get("arguments") or "{}"
    if isinstance(arguments, str):
        text = arguments
        try:
            arguments = json.loads(text)
        except (ValueError, RecursionError):
            arguments = None
        if not isinstance(arguments, dict):
            arguments = {"arguments": text}
    if not isinstance(arguments, dict):
        raise wrong(f"{where} has a tool call whose arguments are no JSON object", "messages")
    own = {"name": function["name"], "arguments": arguments}
    return {**given, "type": "function", "function": own}


def _tool(given: object, where: str) -> Tool:
    function = given.get("function") if isinstance(given, dict) else None
    kind = given.get("type", "function") if isinstance(given, dict) else None
    if isinstance(kind, str) and kind != "function":
        raise unsupported("tools", f"{where} is a tool of the type {kind:.80}: give functions")
    if not isinstance(function, dict):
        raise wrong(f'{where} must be {{"type": "function", "function": ...}}', "tools")
    name = function.get("name")
    if not isinstance(name, str) or not NAME.fullmatch(name):
        raise wrong(
            f"{where} needs a name of at most 64 letters, digits, underscores, dots and dashes",
            "tools",
        )
    if not isinstance(function.get("description") or "", str):
        raise wrong(f"the description of {where} must be a string", "tools")
    parameters = function.get("parameters")
    if parameters is not None and not isinstance(parameters, dict):
        raise wrong(f"the parameters of {where} must be a JSON schema, an object", "tools")
    return {"type": "function", "function": {k: v for k, v in function.items() if v is not None}}


def _named(choice: object, names: Sequence[str]) -> str:
    """The function that `tool_choice` names."""
    asked: Mapping[str, Any] = choice if isinstance(choice, dict) else {}
    function = asked.get("function")
    name = function.get("name") if isinstance(function, dict) else None
    if asked.get("type") != "function" or not isinstance(name, str):
        raise wrong(
            'tool_choice must be "none", "auto", "required" or '
            '{"type": "function", "function": {"name": ...}}',
            "tool_choice",
        )
    if name not in names:
        raise wrong(f"tool_choice names {name:.80}, which is none of the tools", "tool_choice")
    return name
