"""The JSON of a request: parsed strictly, and checked against the JSON Schema of its fields.

Extensions: "x-unsupported" marks a field of which only values that change nothing are accepted.
"x-same-as" is the name under which the program reads a field. "x-rules" is an "allOf" that is too
much for generators of test cases."""

import json
import math
import re
from collections.abc import Mapping
from typing import Any, NoReturn

from ..text.prompts import parse_json
from .problems import Problem, invalid, unsupported

Body = Mapping[str, Any]
Schema = dict[str, Any]
KINDS: Mapping[str, tuple[Any, str]] = {
    "string": (str, "a string"),
    "boolean": (bool, "true or false"),
    "object": (dict, "an object"),
    "array": (list, "a list"),
    "null": (type(None), "null"),
    "integer": (int | float, "a whole number"),
    "number": (int | float, "a number"),
}
"""Python's classes for the types of JSON, and words for them."""
MOST_SHOWN = 60
"""Characters of a wrong value that an error message repeats, and of a name in its path."""


def parse(data: bytes) -> Body:
    """Parse the JSON object in a body, and leave out fields that are null. Raises Problem."""
    try:
        body = parse_json(data)
    except RecursionError:
        raise invalid("the body is nested too deeply") from None
    except ValueError as problem:
        reason = getattr(problem, "msg", None) or getattr(problem, "reason", "too many digits")
        raise invalid(f"the body cannot be read as JSON ({reason})") from None
    if not isinstance(body, dict):
        raise invalid('the body must be a JSON object, such as {"prompt": "..."}')
    return {name: value for name, value in body.items() if value is not None}


TEXT: Schema = {"type": "string"}
WHOLE: Schema = {"type": "integer"}
NUMBER: Schema = {"type": "number"}
TRUTH: Schema = {"type": "boolean"}
OBJECT: Schema = {"type": "object"}
NULL: Schema = {"type": "null"}


def described(description: str, schema: Schema, *rules: Schema) -> Schema:
    """Return a schema with the words that follow "must be" in errors, and rules for its fields."""
    return {**schema, "description": description} | ({"allOf": list(rules)} if rules else {})


def either(*each: Schema, **more: Any) -> Schema:
    """Return the schema of a value that fits any of these schemas."""
    return {"anyOf": list(each), **more}


def within(least: float, most: float | None = None, kind: Schema = NUMBER) -> Schema:
    """Return the schema of a number between two bounds, both included."""
    return {**kind, "minimum": least} | ({} if most is None else {"maximum": most})


def several(of: Schema, least: int = 0, most: int | None = None) -> Schema:
    """Return the schema of a list of `least` to `most` entries."""
    bounds = {"minItems": least} if least else {}
    return {"type": "array", "items": of, **bounds} | ({} if most is None else {"maxItems": most})


def fields(required: str = "", /, **properties: Schema) -> Schema:
    """Return the schema of an object, whose fields may be null, except for the required ones."""
    names = required.split()
    optional = {name: _or_null(each) for name, each in properties.items() if name not in names}
    return {"type": "object", "properties": properties | optional, "required": names}


def typed(kind: str, required: str = "", /, **properties: Schema) -> Schema:
    """Return the schema of an object of this type. required: as `fields` has it."""
    return fields(f"type {required}", type={"const": kind}, **properties)


def named(names: str, schema: Schema) -> dict[str, Schema]:
    """Return fields that have one schema. names: in words."""
    return dict.fromkeys(names.split(), schema)


def _or_null(schema: Schema) -> Schema:
    if "anyOf" in schema:
        return {**schema, "anyOf": [*schema["anyOf"], NULL]}
    if "enum" in schema:
        values = schema["enum"]
        return schema if None in values else {**schema, "enum": [*values, None]}
    return either(schema, NULL, **{name: schema[name] for name in schema if name[:2] == "x-"})


def off(*harmless: object) -> Schema:
    """Return the schema of an unsupported field. harmless: values that change nothing."""
    return {"enum": [*harmless, None], "x-unsupported": True}


def same_as(name: str, schema: Schema) -> Schema:
    """Return the schema of another name for a field."""
    return {**schema, "x-same-as": name}


def rule(param: str, message: str, *cases: Schema) -> Schema:
    """Return a rule between fields: one of these cases must hold. Other names of fields are
    resolved before. param: the field that the error names."""
    return {"anyOf": list(cases), "description": message, "x-param": param}


def having(**properties: Schema) -> Schema:
    """Return the schema of an object that has all of these fields."""
    return {"required": list(properties), "properties": properties}


def one_of(**kinds: Schema) -> list[Schema]:
    """Return the cases in which exactly one of these fields is given."""
    return [
        {"required": [name], "properties": {**dict.fromkeys(kinds, NULL), name: kind}}
        for name, kind in kinds.items()
    ]


def read(schema: Schema, value: Any, where: str = "") -> Any:
    """Check a value against a schema and return it in its canonical form: without optional fields
    that are null, with 2 for 2.0 and names for their "x-same-as". where: path of the value, empty
    for a whole body. Raises Problem, which names the field that is wrong."""
    if "anyOf" in schema:
        value = _any(schema, value, where)
    if schema.get("type") == "integer" and isinstance(value, float) and value.is_integer():
        value = int(value)
    if not _allows(schema, value):
        _refuse({**schema, "items": {}} if isinstance(value, list) else schema, value, where)
    if isinstance(value, dict):
        value = _object(schema, value, where)
        for rule in (*schema.get("x-rules", ()), *schema.get("allOf", ())):
            try:
                read(rule, value)
            except Problem:
                raise invalid(rule["description"], rule["x-param"]) from None
    elif isinstance(value, list) and "items" in schema and not _are_whole(schema["items"], value):
        value = [read(schema["items"], each, f"{where}[{at}]") for at, each in enumerate(value)]
    return value


def _allows(schema: Schema, value: Any) -> bool:
    """Return True for a value of the type, the bounds and the pattern of a schema."""
    kind = schema.get("type")
    values = [schema["const"]] if "const" in schema else schema.get("enum", [value])
    # In JSON, true is not 1.
    same = (each == value and isinstance(each, bool) == isinstance(value, bool) for each in values)
    if (kind is not None and not _has_type(schema, value)) or not any(same):
        return False
    if isinstance(value, list):
        return _within(schema, "Items", len(value))
    if isinstance(value, str):
        pattern = schema.get("pattern", "").replace("$", r"\Z")
        return _within(schema, "Length", len(value)) and bool(re.search(pattern, value))
    if kind not in ("integer", "number"):
        return True
    below = value < schema.get("exclusiveMaximum", math.inf)
    return below and _within(schema, "imum", value) and (kind == "number" or value == value // 1)


def words(schema: Schema) -> str:
    """Say what values a schema allows, as words that follow "must be"."""
    if "description" in schema:
        return str(schema["description"])
    if "anyOf" in schema:
        each = [words(one) for one in schema["anyOf"] if one.get("type") != "null"]
        return " or ".join(dict.fromkeys(each))
    if "const" in schema or "enum" in schema:
        values = [schema["const"]] if "const" in schema else schema["enum"]
        named = [json.dumps(each) for each in values if each is not None]
        return f"one of {', '.join(named)}" if len(named) > 1 else "".join(named) or "left out"
    kind = schema.get("type", "object")
    text = KINDS[kind][1]
    if kind == "object" and schema.get("required"):
        text += f" with {' and '.join(json.dumps(each) for each in schema['required'])}"
    elif kind == "array":
        if schema.get("minItems") == 1 and "maxItems" not in schema:
            text = "a non-empty list"
        else:
            text += _range(schema, "Items", "entries")
        text += f", each entry of which is {words(schema['items'])}" if schema.get("items") else ""
    elif kind == "string":
        text += _range(schema, "Length", "characters")
    else:
        text += _range(schema, "imum", "")
    return text


def _range(schema: Schema, name: str, of: str) -> str:
    """Say the bounds of a schema: "of 1 to 16 entries", "from 0 to 1". of: the unit, if any."""
    low, high = (
        f"{bound:g}" if isinstance(bound, float) else bound
        for bound in (schema.get(f"min{name}"), schema.get(f"max{name}"))
    )
    if low is not None and high is not None:
        return f" of {low} to {high} {of}" if of else f" from {low} to {high}"
    if low is None and high is None:
        return ""
    bound = f" of at least {low}" if high is None else f" of at most {high}"
    return f"{bound} {of}".rstrip()


def _shown(value: Any) -> str:
    """Show a wrong value in an error message: as JSON, or its beginning."""
    if isinstance(value, list) and value:
        return "a list of 1 entry" if len(value) == 1 else f"a list of {len(value)} entries"
    if isinstance(value, dict):
        value = {
            name: "..." if isinstance(value[name], list | dict) else value[name] for name in value
        }
    text = json.dumps(value, ensure_ascii=False)
    return text if len(text) <= 2 * MOST_SHOWN else f"{text[:MOST_SHOWN]}..."


def _are_whole(schema: Schema, values: list[Any]) -> bool:
    """Return True when the schema is one of integers, such as token ids, and all values fit it.
    `read` takes a microsecond for each value, and there may be millions."""
    of_integers = schema.get("type") == "integer" and set(map(type, values)) == {int}
    return of_integers and all(_within(schema, "imum", each) for each in (min(values), max(values)))


def _any(schema: Schema, value: Any, where: str) -> Any:
    """Read a value by the first branch of an anyOf that accepts it. Raises Problem."""
    failed = []
    for branch in schema["anyOf"]:
        try:
            return read(branch, value, where)
        except Problem as problem:
            failed.append((branch, problem))
    # If one branch alone can have been meant, its error is more precise.
    for might_be_meant in (_has_type, _has_entries):
        failed = [each for each in failed if might_be_meant(each[0], value)]
        if len(failed) == 1:
            raise failed[0][1]
    _refuse(schema, value, where)


def _has_type(schema: Schema, value: Any) -> bool:
    if schema.get("type") != "boolean" and isinstance(value, bool):
        return False
    return "type" in schema and isinstance(value, KINDS[schema["type"]][0])


def _has_entries(branch: Schema, value: Any) -> bool:
    return isinstance(value, list) and value != [] and _has_type(branch.get("items", {}), value[0])


def _object(schema: Schema, value: dict[str, Any], where: str) -> dict[str, Any]:
    properties = schema.get("properties", {})
    pattern = schema.get("propertyNames", {}).get("pattern", "").replace("$", r"\Z")
    if len(value) > schema.get("maxProperties", len(value)):
        raise invalid(f"{where} must be {words(schema)}, not {len(value)}", _field(where))
    fields: dict[str, Any] = {}
    renamed: dict[str, Any] = {}
    for name, item in value.items():
        path = f"{where}.{name[:MOST_SHOWN]}".lstrip(".")
        if not re.search(pattern, name):
            _refuse(schema, {name: item}, where)
        inner = properties.get(name, schema.get("additionalProperties", {}))
        if name in properties and item is None and name not in schema.get("required", ()):
            continue
        into = renamed if "x-same-as" in inner else fields
        into[inner.get("x-same-as", name)] = read(inner, item, path) if inner else item
    for name in schema.get("required", ()):
        if name not in value:
            path = f"{where}.{name}".lstrip(".")
            raise invalid(f"{path} is missing: it must be {words(properties[name])}", _field(path))
    return fields | renamed


def _within(schema: Schema, name: str, size: float) -> bool:
    return schema.get(f"min{name}", size) <= size <= schema.get(f"max{name}", size)


def _field(where: str) -> str | None:
    """Return the name of the body's field in a path such as "stop[0]"; None for the whole body."""
    return re.split(r"[.\[]", where)[0] or None


def _refuse(schema: Schema, value: Any, where: str) -> NoReturn:
    if schema.get("x-unsupported"):
        raise unsupported(where)
    message = f"{where or 'the body'} must be {words(schema)}, not {_shown(value)}"
    raise invalid(message, _field(where))
