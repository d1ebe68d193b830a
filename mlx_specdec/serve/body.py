"""The JSON of a request: parsed strictly, and its fields by name and kind."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any, NoReturn

from .problems import unsupported, wrong

Body = Mapping[str, Any]


def parse(data: bytes) -> Body:
    """The object that a body holds; what is null is as good as not there. Raises Problem."""
    try:
        body: Any = json.loads(data, parse_constant=_no_json)
        # Half a character, a lone surrogate, is no text for any tokenizer.
        json.dumps(body, ensure_ascii=False).encode("utf-8")
    except UnicodeEncodeError:
        raise wrong("the body has half a character in it, a lone surrogate") from None
    except RecursionError:
        raise wrong("the body is nested too deeply") from None
    except ValueError as problem:
        reason = getattr(problem, "msg", "") or "it is no UTF-8 text, or has a number of no use"
        raise wrong(f"the body is not JSON ({reason})") from None
    if not isinstance(body, dict):
        raise wrong('the body must be a JSON object, such as {"prompt": "..."}')
    return {name: value for name, value in body.items() if value is not None}


def _no_json(name: str) -> NoReturn:
    raise json.JSONDecodeError(f"{name} is no number", "", 0)


def text(body: Body, name: str, otherwise: str = "") -> str:
    """A field that is a string. Raises Problem."""
    value = body.get(name, otherwise)
    return value if isinstance(value, str) else _refuse(name, "a string")


def whole(body: Body, name: str, otherwise: int, least: int, most: int) -> int:
    """A field that is a whole number within limits, `otherwise` where it is not there or null.
    Raises Problem."""
    value = otherwise if body.get(name) is None else body[name]
    if isinstance(value, bool) or not isinstance(value, int):
        _refuse(name, "a whole number")
    if not least <= value <= most:
        raise wrong(f"{name} must lie between {least} and {most}", name)
    return value


def truth(body: Body, name: str) -> bool:
    """A field that is true or false, false where it is not there or null. Raises Problem."""
    value = False if body.get(name) is None else body[name]
    return value if isinstance(value, bool) else _refuse(name, "true or false")


def object_of(body: Body, name: str) -> Body:
    """A field that is an object, empty where it is not there. Raises Problem."""
    value = body.get(name, {})
    return value if isinstance(value, dict) else _refuse(name, "an object")


def number(name: str, value: object) -> int | float:
    """A number, of a field of this name. Raises Problem."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        _refuse(name, "a number")
    return value


def strings(name: str, value: object) -> list[str]:
    """A string or several. Raises Problem."""
    each: list[Any] = value if isinstance(value, list) else [value]
    if not all(isinstance(one, str) for one in each):
        _refuse(name, "a string or a list of strings")
    return each


def _refuse(name: str, kind: str) -> NoReturn:
    raise wrong(f"{name} must be {kind}", name)


def prompts_of(body: Body) -> list[str | list[int]]:
    """The field `prompt`: a text, token ids, or a list of either. Raises Problem."""
    given = body.get("prompt")
    if isinstance(given, str):
        return [given]
    if isinstance(given, list) and given:
        if _is_ids(given):
            return [given]
        if all(isinstance(each, str) or _is_ids(each) for each in given):
            return given
    raise wrong("prompt must be a string, a list of token ids, or a list of either", "prompt")


def _is_ids(given: object) -> bool:
    return isinstance(given, list) and all(type(each) is int for each in given) and bool(given)


def refuse_unless_harmless(body: Body, harmless: Mapping[str, tuple[object, ...]]) -> None:
    """Raises Problem for the first field that asks for what is not there. harmless: values of such
    fields that ask for nothing."""
    for name, values in harmless.items():
        if name in body and not any(body[name] == value for value in values):
            raise unsupported(name)
