"""What type the parameters of tools have, where their schemas say so in a roundabout way.

mlx-lm's parsers of calls that are no JSON look for a `type`, and take for a string what has none.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

Schema = Mapping[str, Any]
MOST_STEPS = 16
"""Of references to one another: they may go round in circles."""
NAMES = {str: "string", bool: "boolean", int: "integer", float: "number"}


def typed(schema: object, root: Schema) -> dict[str, Any]:
    """The same schema with a `type` that is a name, if it has only one beside null: of what it
    refers to, of its one branch, of what it enumerates. root: where references begin."""
    told: dict[str, Any] = dict(schema) if isinstance(schema, Mapping) else {}
    for _ in range(MOST_STEPS):
        inner = _inner(told, root)
        if inner is None:
            break
        told = {**told, **inner}
    kinds = told.get("type") or _enumerated(told)
    several = kinds if isinstance(kinds, list) else [kinds]
    names = [each for each in several if each != "null"]
    return {**told, "type": names[0]} if len(names) == 1 and isinstance(names[0], str) else told


def with_types(tools: Sequence[Any]) -> list[Any]:
    """Tools as templates take them, whose parameters say their types."""
    return [_tool(each) for each in tools]


def _tool(tool: Any) -> Any:
    function = tool["function"]
    parameters = function.get("parameters")
    properties = parameters.get("properties") if parameters else None
    if not isinstance(properties, Mapping):
        return tool
    told = {name: typed(each, parameters) for name, each in properties.items()}
    own = {**function, "parameters": {**parameters, "properties": told}}
    return {**tool, "function": own}


def _inner(schema: dict[str, Any], root: Schema) -> Schema | None:
    """What a schema is a way around to, taken out of it; None where it is none."""
    reference = schema.pop("$ref", None)
    if isinstance(reference, str):
        return _at(root, reference)
    for name in ("anyOf", "oneOf", "allOf"):
        given = schema.get(name)
        branches = given if isinstance(given, list) else []
        left = [each for each in branches if each != {"type": "null"}]
        if len(left) == 1 and isinstance(left[0], Mapping):
            del schema[name]
            return left[0]
    return None


def _at(root: Schema, reference: str) -> Schema | None:
    """What lies at `#/$defs/name` and the like."""
    here: Any = root
    for part in reference.removeprefix("#/").split("/"):
        here = here.get(part) if isinstance(here, Mapping) else None
    return here if isinstance(here, Mapping) else None


def _enumerated(schema: Schema) -> list[str]:
    values = [schema["const"]] if "const" in schema else schema.get("enum")
    given = values if isinstance(values, list) else []
    return sorted({NAMES.get(type(each), "") for each in given if each is not None})
