"""The base class and the types of the models of bodies, and the sentence that says what is wrong
with a body. Unknown fields are ignored, and so are fields that are null."""

import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar, TypeVar, get_args

from pydantic import (
    BaseModel,
    BeforeValidator,
    Field,
    GetCoreSchemaHandler,
    GetJsonSchemaHandler,
    StrictBool,
    StrictStr,
    ValidationError,
    WrapValidator,
    model_validator,
)
from pydantic.json_schema import JsonSchemaValue
from pydantic_core import CoreSchema, PydanticCustomError, core_schema

from ..text.prompts import parse_json
from .problems import Problem, invalid, unsupported

NUMBER = re.compile(r"[+-]?(?:\d+\.?\d*|\.\d+)(?:[eE][+-]?\d+)?", re.ASCII)
WHOLE = re.compile(r"[+-]?\d{1,20}", re.ASCII)
"""Texts that are accepted as numbers and as whole numbers."""
MOST_SHOWN = 60
"""Largest number of characters that an error message repeats of a wrong value, and of a name."""
ERROR_WORDS = {
    "bool_type": "true or false",
    "dict_type": "an object",
    "float_type": "a number",
    "greater_than_equal": "at least {ge}",
    "int_type": "a whole number",
    "less_than_equal": "at most {le}",
    "list_type": "a list",
    "literal_error": "{expected}",
    "model_attributes_type": "an object",
    "model_type": "an object",
    "string_too_long": "a string of at most {max_length} characters",
    "string_type": "a string",
    "too_long": "a list of at most {max_length} entries",
    "too_short": "a list of at least {min_length} entries",
}
"""The words after "must be" in an error message, by pydantic's type of error."""
Entry = TypeVar("Entry")


def _number(value: Any) -> Any:
    return float(value) if isinstance(value, str) and NUMBER.fullmatch(value) else value


def _integral(value: Any) -> Any:
    if isinstance(value, str) and WHOLE.fullmatch(value):
        return int(value)
    number = _number(value)
    return int(number) if isinstance(number, float) and number.is_integer() else value


String = StrictStr
Boolean = StrictBool
integral = BeforeValidator(_integral)
"""An annotation for integers. It accepts 2.0 and "2" as 2."""
Number = Annotated[float, Field(strict=True), BeforeValidator(_number)]
"""A number, also as a text, since some clients send their settings as texts."""
Object = dict[str, Any]
Several = Annotated[list[Entry], Field(fail_fast=True)]
"""A list that is checked up to its first error, because a body of a megabyte could have a million
of them."""
MESSAGES = 16_384
"""The largest number of messages in a body. The event loop checks them, and other
requests wait meanwhile."""


def worded(words: str, *, inside: bool = False) -> WrapValidator:
    """Return an annotation that sets the words of errors.

    Args:
        words: The words after "must be".
        inside: Whether errors within the value get these words as well.
    """

    def check(value: Any, validate: Callable[[Any], Any]) -> Any:
        try:
            return validate(value)
        except ValidationError as error:
            errors = error.errors()
            deeper = not inside and any(_path(inner["loc"], value) for inner in errors)
            if deeper or any(inner["type"] in ("rule", "extra_forbidden") for inner in errors):
                raise
            raise PydanticCustomError("words", "{words}", {"words": words}) from None

    return WrapValidator(check)


@dataclass(frozen=True)
class ByType:
    """An annotation for a union of models. The field `type` of an object chooses the model. A
    model whose type is any string is for unknown types, and a model whose type may be left out is
    also for objects without one. words: The words after "must be" in errors."""

    words: str

    def __get_pydantic_core_schema__(
        self, source: Any, handler: GetCoreSchemaHandler
    ) -> CoreSchema:
        """Return the schema of a tagged union. Called by pydantic."""
        choices = {
            name: handler.generate_schema(kind)
            for kind in get_args(source)
            for name in _names(kind)
        }

        def choose(value: Any) -> str:
            if not isinstance(value, dict):
                return "< word>" if isinstance(value, str) else "< nothing>"
            kind = value.get("type")
            if not isinstance(kind, str):
                return "< untyped>" if kind is None else "< nothing>"
            return f"<{kind}>" if f"<{kind}>" in choices else "< other>"

        union = core_schema.tagged_union_schema(choices, choose)
        check: Any = worded(self.words).func
        return core_schema.no_info_wrap_validator_function(check, union)


def _names(kind: Any) -> list[str]:
    """Return the keys of a kind of value in a union: types in angle brackets, unlike fields."""
    if not isinstance(kind, type) or not issubclass(kind, BaseModel):
        return ["< word>"]
    types = kind.model_fields["type"].annotation
    if types is str:
        return ["< other>"]
    untyped = type(None) in get_args(types)
    names = get_args(get_args(types)[0] if untyped else types)
    return [*(f"<{name}>" for name in names), *(["< untyped>"] if untyped else [])]


def broken(rule: str, param: str) -> PydanticCustomError:
    """Return the error for fields that contradict each other. param: The field that it names."""
    return PydanticCustomError("rule", "{rule}", {"rule": rule, "param": param})


class Fields(BaseModel):
    """An object in a body. refused: Unsupported fields, with the values that are accepted."""

    refused: ClassVar[Mapping[str, Sequence[object]]] = {}

    @model_validator(mode="before")
    @classmethod
    def _prepare(cls, data: Any) -> Any:
        """Leave out what is null, and refuse unsupported fields."""
        if not isinstance(data, dict):
            return data
        for name in sorted(cls.refused.keys() & data.keys()):
            if data[name] is not None and not _among(data[name], cls.refused[name]):
                raise PydanticCustomError("unsupported", "{field}", {"field": name})
        if None in data.values():
            return {name: value for name, value in data.items() if value is not None}
        return data

    @classmethod
    def __get_pydantic_json_schema__(
        cls, core_schema: CoreSchema, handler: GetJsonSchemaHandler
    ) -> JsonSchemaValue:
        """Describe the unsupported fields by their harmless values."""
        schema = handler(core_schema)
        harmless = {name: {"enum": [*values, None]} for name, values in cls.refused.items()}
        handler.resolve_ref_schema(schema).setdefault("properties", {}).update(harmless)
        return schema


class Body(Fields):
    """A body, whose model is also validated from the bytes that a client has sent."""

    model: String | None = None

    @model_validator(mode="before")
    @classmethod
    def _parse(cls, data: Any) -> Any:
        return parse(data) if isinstance(data, bytes) else data


def _among(value: object, values: Sequence[object]) -> bool:
    """Return whether a value is one of several values. Unlike in Python, True is not 1."""
    return any(
        value == harmless and isinstance(value, bool) == isinstance(harmless, bool)
        for harmless in values
    )


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
    """Return one problem for all errors of a body: the deepest one, since the client most likely
    meant this branch of a union. Errors of several branches at one place are joined by "or"."""
    paths = [_error_path(error, body) for error in errors]
    path = max(paths, key=len)
    found = [error for error, place in zip(errors, paths, strict=True) if place == path]
    first, context, where = found[0], found[0].get("ctx", {}), _shown_path(path)
    if first["type"] == "rule":
        return invalid(context["rule"], context["param"])
    if first["type"] in ("unsupported", "extra_forbidden"):
        return unsupported(where)
    if first["type"] == "missing":
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
    return (*path, error["ctx"]["field"]) if error["type"] == "unsupported" else path


def _words(error: Any) -> str:
    context = {
        name: f"{value:g}" if isinstance(value, float) else value
        for name, value in error.get("ctx", {}).items()
    }
    if error["type"] == "words":
        return str(context["words"])
    # pydantic's own messages may contain braces.
    words = ERROR_WORDS.get(error["type"], "{msg}").format(msg=error["msg"], **context)
    return words.replace("'", '"')


def _path(place: Sequence[int | str], body: Any) -> tuple[int | str, ...]:
    """Return a place in a body without pydantic's names for the branches of unions."""
    path: list[int | str] = []
    for step in place:
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
    if isinstance(value, list) and value:
        return "a list of 1 entry" if len(value) == 1 else f"a list of {len(value)} entries"
    if isinstance(value, dict):
        value = {
            name: "..." if isinstance(value[name], list | dict) else value[name] for name in value
        }
    text = json.dumps(value, ensure_ascii=False)
    return text if len(text) <= 2 * MOST_SHOWN else f"{text[:MOST_SHOWN]}..."
