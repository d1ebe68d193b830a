"""The base class and the types of the models of bodies, and the sentence that says what is wrong
with a body. Unknown fields are ignored, and so are fields that are null."""

from collections.abc import Mapping, Sequence
from typing import Annotated, Any, ClassVar, TypeVar

from pydantic import AliasChoices, BaseModel, BeforeValidator, ConfigDict, Field, model_validator
from pydantic_core import PydanticCustomError

from ..text.prompts import parse_json
from .problems import Problem, invalid, unsupported

MOST_SHOWN = 60
"""Largest number of characters that messages repeat of a name, or of a type that is not known."""
Entry = TypeVar("Entry")


def either(default: Any, *names: str) -> Any:
    """Return an optional field that clients send under any of several names."""
    return Field(default, validation_alias=AliasChoices(*names))


def _no_switch(value: Any) -> Any:
    if isinstance(value, bool):
        raise PydanticCustomError("float", "Input should be a number")
    return value


Boolean = Annotated[bool, Field(strict=True)]
number = BeforeValidator(_no_switch)
"""An annotation for numbers. They may also be texts, since some clients send their settings as
texts."""
Object = dict[str, Any]
Refused = Mapping[str, Sequence[object]]
"""Unsupported fields, each with the values that are accepted because they have no effect."""
Kinds = Mapping[str, Sequence[str]]
"""Types of objects, each with the fields that it requires."""
BODY_BYTES = 16 << 20
"""Largest size of a body."""
ENTRIES = 16_384
"""The largest number of entries of a list, except for token ids. The event loop checks them, and
other requests wait meanwhile."""
Several = Annotated[list[Entry], Field(fail_fast=True, max_length=ENTRIES)]
"""A list that is checked up to its first error, because a body of a megabyte could have a million
of them."""
Written = Annotated[str, Field(pattern=r"\S")]
Ids = Annotated[list[Annotated[int, Field(strict=True)]], Field(fail_fast=True)]
"""Token ids."""


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
        """Leave out what is null, and refuse unsupported fields. Raises Problem."""
        if not isinstance(data, dict):
            return data
        for name in sorted(cls.refused.keys() & data.keys()):
            if data[name] is not None and data[name] not in cls.refused[name]:
                raise unsupported(name)
        return {name: value for name, value in data.items() if value is not None}


def parts_of(content: str | Sequence[Fields]) -> str | list[Object]:
    """Return a content as `text.messages` reads it."""
    if isinstance(content, str):
        return content
    return [part.model_dump(exclude_none=True) for part in content]


class Typed(Fields):
    """An object whose field `type` decides about its other fields. They may also be one level
    deeper, in a field named after the type, as in OpenAI's chat completions. kinds: The types, each
    with the fields that it requires. Of an object of another type, only the type is read.
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
            return {"type": kind[:MOST_SHOWN]}
        data = {**_lifted(data, kind), "type": kind}
        for name in cls.kinds[kind]:
            if data.get(name) is None:
                raise PydanticCustomError("absent", "{name} is missing", {"name": name})
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
    paths = [_path(error, body) for error in errors]
    path = max(
        paths, key=lambda path: (len(path), [step for step in path if isinstance(step, int)])
    )
    found = [error["msg"] for error, place in zip(errors, paths, strict=True) if place == path]
    steps = (f"[{step}]" if isinstance(step, int) else f".{step[:MOST_SHOWN]}" for step in path)
    where = "".join(steps).lstrip(".") or "the body"
    message = f"{where}: {' or '.join(dict.fromkeys(found))}"
    return invalid(message, str(path[0]) if path else None)


def _path(error: Any, body: Any) -> tuple[int | str, ...]:
    """Return the place of an error in a body, without pydantic's names for branches of unions."""
    path: list[int | str] = []
    for step in error["loc"]:
        if isinstance(body, dict) and step not in body:
            kind = str(body.get("type"))
            inner = _lifted(body, kind)
            path += [] if inner is body else [kind]
            body = inner
        inside = isinstance(body, dict) and step in body
        if inside or (isinstance(body, list) and isinstance(step, int)):
            body = body[step]
            path.append(step)
    if error["type"] == "missing":
        path += error["loc"][-1:]
    return tuple(path)
