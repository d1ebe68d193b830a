"""The base class and the types of the models of request bodies, and the words of their errors.
Unknown fields are ignored, and so are optional fields that are null."""

import json
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Annotated, Any, ClassVar, get_args

from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
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
from pydantic_core import CoreSchema, ErrorDetails, PydanticCustomError, core_schema

from ..text.prompts import parse_json
from .problems import Problem, invalid, unsupported

Body = Mapping[str, Any]
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
    "less_than": "less than {lt}",
    "less_than_equal": "at most {le}",
    "list_type": "a list",
    "literal_error": "{expected}",
    "model_type": "an object",
    "string_pattern_mismatch": "a string that matches {pattern}",
    "string_too_long": "a string of at most {max_length} characters",
    "string_type": "a string",
    "too_long": "a list of at most {max_length} entries",
    "too_short": "a list of at least {min_length} entries",
}
"""The words after "must be" in an error message, by pydantic's type of error."""


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
            if deeper or any(inner["type"] in ("rule", "unsupported") for inner in errors):
                raise
            raise PydanticCustomError("words", "{words}", {"words": words}) from None

    return WrapValidator(check)


def zero_or(least: float, most: float) -> WrapValidator:
    """Return an annotation that allows 0 and numbers between two bounds."""
    words = f"0 or a number from {least:g} to {most:g}"

    def check(value: Any, validate: Callable[[Any], float]) -> float:
        try:
            number = validate(value)
        except ValidationError:
            number = -1.0
        if number == 0 or least <= number <= most:
            return number
        raise PydanticCustomError("words", "{words}", {"words": words})

    return WrapValidator(check)


class ByType:
    """An annotation for objects whose model depends on their `type`.

    Args:
        models: The models, whose field `type` has a Literal as its annotation.
        words: The words after "must be" in errors.
        special: The model `fallback` is for all other types, `untyped` for objects without a type,
            and `word` for strings. Values without a model are refused.
    """

    def __init__(self, *models: type[BaseModel], words: str, **special: Any) -> None:
        self._words = words
        self._choices: dict[str, Any] = {}
        for model in models:
            names = get_args(model.model_fields["type"].annotation)
            names = names if isinstance(names[0], str) else get_args(names[0])
            self._choices |= {f"<{name}>": model for name in names}
        self._choices |= {f"< {name}>": kind for name, kind in special.items()}

    def choose(self, value: Any) -> str | None:
        """Return the key of the value's model. Keys are in angle brackets, unlike fields."""
        if not isinstance(value, dict):
            return "< word>" if isinstance(value, str) else None
        kind = value.get("type")
        if kind is None or not isinstance(kind, str):
            return "< untyped>" if kind is None else None
        return f"<{kind}>" if f"<{kind}>" in self._choices else "< fallback>"

    def __get_pydantic_core_schema__(
        self, source: Any, handler: GetCoreSchemaHandler
    ) -> CoreSchema:
        """Return the schema of a tagged union. Called by pydantic."""
        choices = {name: handler.generate_schema(kind) for name, kind in self._choices.items()}
        union = core_schema.tagged_union_schema(choices, self.choose)
        check: Any = worded(self._words).func
        return core_schema.no_info_wrap_validator_function(check, union)


def broken(rule: str, param: str) -> PydanticCustomError:
    """Return the error for fields that contradict each other. param: The field that it names."""
    return PydanticCustomError("rule", "{rule}", {"rule": rule, "param": param})


def _stop_early(schema: Any) -> None:
    """Make all lists and dicts in a schema of pydantic stop at their first error."""
    if isinstance(schema, dict):
        if schema.get("type") in ("list", "dict"):
            schema["fail_fast"] = True
        for inner in schema.values():
            _stop_early(inner)
    elif isinstance(schema, list | tuple):
        for inner in schema:
            _stop_early(inner)


class Fields(BaseModel):
    """An object in a body.

    Attributes:
        same: Names of fields, and the names by which the program reads them.
        refused: Unsupported fields, with the values, besides null, that are accepted.
        closed: Whether unknown fields are refused too.
    """

    model_config = ConfigDict(extra="allow")
    same: ClassVar[Mapping[str, str]] = {}
    refused: ClassVar[Mapping[str, Sequence[object]]] = {}
    closed: ClassVar[bool] = False

    @model_validator(mode="before")
    @classmethod
    def _refuse(cls, data: Any) -> Any:
        names = data.keys() & cls.refused.keys() if isinstance(data, dict) else ()
        if cls.closed and isinstance(data, dict):
            declared = {field.alias or name for name, field in cls.model_fields.items()}
            names = data.keys() - declared
        for name in sorted(names):
            if data[name] is not None and not _among(data[name], cls.refused.get(name, ())):
                raise PydanticCustomError("unsupported", "{field}", {"field": name})
        return data

    @classmethod
    def __get_pydantic_core_schema__(cls, source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        """Return the schema. Its lists and objects are checked up to their first error, because a
        body of a megabyte could have a million of them. Called by pydantic."""
        schema = handler(source)
        _stop_early(handler.resolve_ref_schema(schema))
        return schema

    @classmethod
    def __get_pydantic_json_schema__(
        cls, core_schema: CoreSchema, handler: GetJsonSchemaHandler
    ) -> JsonSchemaValue:
        """Describe the unsupported fields by their harmless values."""
        schema = handler(core_schema)
        described = handler.resolve_ref_schema(schema)
        harmless = {name: {"enum": [*values, None]} for name, values in cls.refused.items()}
        described.setdefault("properties", {}).update(harmless)
        described["additionalProperties"] = not cls.closed
        return schema

    def as_body(self) -> dict[str, Any]:
        """Return the fields that are not null, under the names by which the program reads them."""
        values = ((name, getattr(self, name)) for name in type(self).model_fields)
        fields = {
            type(self).model_fields[name].alias or name: _plain(value)
            for name, value in values
            if value is not None
        }
        renamed = {new: fields.pop(name) for name, new in self.same.items() if name in fields}
        return (self.__pydantic_extra__ or {}) | fields | renamed

    @classmethod
    def read(cls, body: Body) -> dict[str, Any]:
        """Return the canonical form of a body. Raises Problem, which names the wrong field."""
        try:
            return cls.model_validate(body).as_body()
        except ValidationError as error:
            words = {name: field.description for name, field in cls.model_fields.items()}
            raise _problem(error.errors(include_url=False), body, words) from None


def _among(value: object, values: Sequence[object]) -> bool:
    """Return whether a value is one of several values. Unlike in Python, True is not 1."""
    return any(
        value == harmless and isinstance(value, bool) == isinstance(harmless, bool)
        for harmless in values
    )


def _plain(value: Any) -> Any:
    if isinstance(value, Fields):
        return value.as_body()
    # A list has entries of one kind, and there may be a million token ids in it.
    if isinstance(value, list) and value and isinstance(value[0], Fields | list):
        return [_plain(entry) for entry in value]
    return value


def parse(data: bytes) -> Body:
    """Parse the JSON object in a body, and drop fields that are null. Raises Problem."""
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


def _problem(
    errors: Sequence[ErrorDetails], body: Body, descriptions: Mapping[str, str | None]
) -> Problem:
    """Return one error for all that pydantic found: the deepest one, since the client most likely
    meant this branch of a union. Errors of several branches at one place are joined by "or"."""
    paths = [_error_path(error, body) for error in errors]
    path = max(paths, key=len)
    found = [error for error, place in zip(errors, paths, strict=True) if place == path]
    first, context = found[0], found[0].get("ctx", {})
    if first["type"] == "rule":
        return invalid(context["rule"], context["param"])
    if first["type"] == "unsupported":
        return unsupported(_shown_path(path))
    if first["type"] == "missing":
        described = descriptions.get(str(path[0])) if len(path) == 1 else None
        advice = f"it must be {described}" if described else "give it"
        return invalid(f"{_shown_path(path)} is missing: {advice}", str(path[0]))
    words = " or ".join(dict.fromkeys(map(_words, found)))
    where, value = _shown_path(path), _at(body, path)
    message = f"{where or 'the body'} must be {words}, not {_shown(value)}"
    return invalid(message, str(path[0]) if path else None)


def _error_path(error: ErrorDetails, body: Body) -> tuple[int | str, ...]:
    """Return the place of an error, with the name of the field that is missing or unsupported."""
    path = _path(error["loc"], body)
    if error["type"] == "missing":
        return (*path, error["loc"][-1])
    return (*path, error["ctx"]["field"]) if error["type"] == "unsupported" else path


def _words(error: ErrorDetails) -> str:
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


def _at(body: Any, path: Sequence[int | str]) -> Any:
    for step in path:
        body = body[step]
    return body


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
