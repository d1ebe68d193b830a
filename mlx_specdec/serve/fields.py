"""The base class and the types of the models of bodies, and the sentence that says what is wrong
with a body. Unknown fields are ignored, and so are fields that are null."""

import json
from collections.abc import Callable, Mapping, Sequence
from typing import Annotated, Any, ClassVar, TypeVar

from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    StrictBool,
    StrictInt,
    ValidationError,
    WrapValidator,
    model_validator,
)
from pydantic_core import PydanticCustomError

from ..text.prompts import parse_json
from .problems import Problem, invalid, unsupported

MOST_SHOWN = 60
"""Largest number of characters that an error message repeats of a wrong value, and of a name."""
ERROR_WORDS = {
    "bool": "true or false",
    "dict": "an object",
    "float": "a number",
    "greater_than_equal": "at least {ge}",
    "int": "a whole number",
    "less_than_equal": "at most {le}",
    "list": "a list",
    "literal_error": "{expected}",
    "model": "an object",
    "string": "a string",
    "string_too_long": "a string of at most {max_length} characters",
    "too_long": "a list of at most {max_length} entries",
    "too_short": "a list of at least {min_length} entries",
}
"""The words after "must be" in an error message, by pydantic's type of error or its first word."""
Entry = TypeVar("Entry")


def _no_switch(value: Any) -> Any:
    if isinstance(value, bool):
        raise PydanticCustomError("float", "not a number")
    return value


Boolean = StrictBool
number = BeforeValidator(_no_switch)
"""An annotation for numbers. They may also be texts, since some clients send their settings as
texts."""
Object = dict[str, Any]
Refused = Mapping[str, Sequence[object]]
"""Unsupported fields, each with the values that are accepted because they have no effect."""
Kinds = Mapping[str, Sequence[str]]
"""Types of objects, each with the fields that it requires."""
ENTRIES = 16_384
"""The largest number of entries of a list, except for token ids. The event loop checks them, and
other requests wait meanwhile."""
Several = Annotated[list[Entry], Field(fail_fast=True, max_length=ENTRIES)]
"""A list that is checked up to its first error, because a body of a megabyte could have a million
of them."""
Ids = Annotated[list[StrictInt], Field(fail_fast=True)]
"""Token ids."""


def worded(words: str) -> WrapValidator:
    """Return an annotation that sets the words of errors, also of errors within the value. words:
    The words after "must be"."""

    def check(value: Any, validate: Callable[[Any], Any]) -> Any:
        try:
            return validate(value)
        except ValidationError as error:
            if any(inner["type"] == "extra_forbidden" for inner in error.errors()):
                raise
            raise PydanticCustomError("words", "{words}", {"words": words}) from None

    return WrapValidator(check)


def _describe(schema: Object, model: Any) -> None:
    """Add the unsupported fields to the JSON schema of a model, by their harmless values."""
    harmless = {name: {"enum": [*values, None]} for name, values in model.refused.items()}
    schema.setdefault("properties", {}).update(harmless)


class Fields(BaseModel):
    """An object in a body. refused: Unsupported fields, with the values that are accepted."""

    model_config = ConfigDict(json_schema_extra=_describe)
    refused: ClassVar[Refused] = {}

    @model_validator(mode="before")
    @classmethod
    def _prepare(cls, data: Any) -> Any:
        """Leave out what is null, and refuse unsupported fields."""
        if not isinstance(data, dict):
            return data
        for name in sorted(cls.refused.keys() & data.keys()):
            if data[name] is not None and data[name] not in cls.refused[name]:
                raise PydanticCustomError("unsupported", "{field}", {"field": name})
        if None in data.values():
            return {name: value for name, value in data.items() if value is not None}
        return data


class Typed(Fields):
    """An object whose field `type` decides about its other fields. They may also be one level
    deeper, in a field named after the type, as in OpenAI's chat completions. kinds: The types, each
    with the fields that it requires. Of an object of another type, no field of the model is read.
    """

    kinds: ClassVar[Kinds] = {}
    type: str

    @model_validator(mode="before")
    @classmethod
    def _choose(cls, data: Any) -> Any:
        if not isinstance(data, dict):
            return data
        kind = data.get("type") or cls.model_fields["type"].default
        if not isinstance(kind, str):
            return data
        if kind not in cls.kinds:
            names = {field.validation_alias or name for name, field in cls.model_fields.items()}
            return {name: data[name] for name in data if name == "type" or name not in names}
        data = {**_lifted(data, kind), "type": kind}
        for name in cls.kinds[kind]:
            if data.get(name) is None:
                raise PydanticCustomError("absent", "{field}", {"field": name})
        return data


def _lifted(data: Object, kind: str) -> Object:
    """Return the object in the field that is named after the type, or the object itself."""
    inner = data.get(kind)
    return inner if isinstance(inner, dict) else data


class Body(Fields):
    """A body, whose model is also validated from the bytes that a client has sent."""

    model: str | None = None

    @model_validator(mode="before")
    @classmethod
    def _parse(cls, data: Any) -> Any:
        return parse(data) if isinstance(data, bytes) else data


def parse(data: bytes) -> Object:
    """Parse the JSON object in a body. Raises Problem."""
    try:
        body = parse_json(data)
    except RecursionError:
        raise invalid("the body is nested too deeply") from None
    except ValueError as problem:
        reason = getattr(problem, "msg", None) or getattr(problem, "reason", "too many digits")
        raise invalid(f"the body cannot be read as JSON ({reason})") from None
    if not isinstance(body, dict):
        raise invalid('the body must be a JSON object, such as {"prompt": "..."}')
    return body


def problem_of(errors: Sequence[Any], body: Object) -> Problem:
    """Return one problem for all errors of a body: the deepest one that is furthest in a list,
    since the client most likely meant this branch of a union. Errors of several branches at one
    place are joined by "or"."""
    paths = [_error_path(error, body) for error in errors]
    path = max(
        paths, key=lambda path: (len(path), [step for step in path if isinstance(step, int)])
    )
    found = [error for error, place in zip(errors, paths, strict=True) if place == path]
    first, where = found[0], _shown_path(path)
    if first["type"] in ("unsupported", "extra_forbidden"):
        return unsupported(where)
    if first["type"] in ("missing", "absent"):
        return invalid(f"{where} is missing: give it", str(path[0]))
    words = " or ".join(dict.fromkeys(map(_words, found)))
    value: Any = body
    for step in path:
        value = value[step]
    message = f"{where or 'the body'} must be {words}, not {_shown(value)}"
    return invalid(message, str(path[0]) if path else None)


def _error_path(error: Any, body: Object) -> tuple[int | str, ...]:
    """Return the place of an error, with the name of the field that is missing or unsupported."""
    path = _path(error["loc"], body)
    if error["type"] == "missing":
        return (*path, error["loc"][-1])
    named = error["type"] in ("absent", "unsupported")
    return (*path, error["ctx"]["field"]) if named else path


def _words(error: Any) -> str:
    context = {
        name: f"{value:g}" if isinstance(value, float) else value
        for name, value in error.get("ctx", {}).items()
    }
    if error["type"] == "words":
        return str(context["words"])
    kind = error["type"]
    words = ERROR_WORDS.get(kind, ERROR_WORDS.get(kind.partition("_")[0], "{msg}"))
    # pydantic's own messages may contain braces.
    return words.format(msg=error["msg"], **context).replace("'", '"')


def _path(place: Sequence[int | str], body: Any) -> tuple[int | str, ...]:
    """Return a place in a body without pydantic's names for the branches of unions."""
    path: list[int | str] = []
    for step in place:
        if isinstance(body, dict) and step not in body:
            kind = str(body.get("type"))
            inner = _lifted(body, kind)
            path += [] if inner is body else [kind]
            body = inner
        inside = isinstance(body, dict) and step in body
        if inside or (isinstance(body, list) and isinstance(step, int)):
            body = body[step]
            path.append(step)
    return tuple(path)


def _shown_path(path: Sequence[int | str]) -> str:
    steps = (f"[{step}]" if isinstance(step, int) else f".{step[:MOST_SHOWN]}" for step in path)
    return "".join(steps).lstrip(".")


def _shown(value: Any) -> str:
    """Return a wrong value, or its beginning, as JSON for an error message."""
    text = json.dumps(value, ensure_ascii=False)
    return text if len(text) <= 2 * MOST_SHOWN else f"{text[:MOST_SHOWN]}..."
