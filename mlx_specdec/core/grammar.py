"""Compilation of JSON schemas, regular expressions and grammars by llguidance, an optional package
that is imported when needed. Imports no MLX."""

import functools
import json
import logging
import re
import threading
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from types import ModuleType
from typing import Any, TypeVar

from ..errors import OptionError, is_panic

Result = TypeVar("Result")
LONGEST_GRAMMAR = 1 << 18
"""Length limit of a schema, regular expression or grammar, in characters."""
MOST_LINES = 500
"""Length limit of a Lark grammar, in lines. The time to find an error grows with the square of the
number of rules, and is about two seconds at this limit."""
STACK = 1 << 29
"""Stack size for parsing a grammar, in bytes. Each nested rule takes a few kilobytes, and
llguidance crashes if the stack overflows."""
JSON_STYLE = {
    "whitespace_flexible": False,
    "item_separator": ", ",
    "key_separator": ": ",
    "lenient": True,
}
"""llguidance's options for JSON. Values are formatted as by Python's json.dumps. Flexible
white space could go on without end, and no token would be determined in advance. "lenient"
makes llguidance warn of keywords that it cannot enforce instead of refusing the schema."""
SCHEMAS_BY_NAME = frozenset(
    ("properties", "patternProperties", "$defs", "definitions", "dependentSchemas")
)
"""Keywords whose values are objects with a schema for each name."""
VALUES = frozenset(("enum", "const", "default", "examples"))
"""Keywords whose values are not schemas."""
HARMLESS = ("Unknown format", "no tokenizer")
"""First words of llguidance's warnings to ignore. An unknown `format` asserts nothing, and special
tokens are resolved later, with the tokenizer."""
log = logging.getLogger(__name__)
LIMITS = {
    "max_items_in_row": 500,
    "initial_lexer_fuel": 1_000_000,
    "step_lexer_fuel": 200_000,
    "step_max_items": 10_000,
    "max_lexer_states": 50_000,
    "max_grammar_size": 500_000,
    "verbose_errors": False,
}
"""llguidance's limits. They bound a mask to tens of milliseconds and all states to about 100 MB."""
KEPT = 32
"""How many grammars are cached, at up to 13 MB each."""
INNER = "text"
"""Name of the original grammar inside the grammar that `with_space` returns."""
GBNF = re.compile(r"^[ \t]*[\w-]+[ \t]*::=", re.MULTILINE)
"""The beginning of a rule in llama.cpp's grammar format, GBNF."""
ERROR_PLACE = re.compile(r"^(\d+)\((\d+)\): ")
"""The place of an error in llguidance's messages about a grammar: line and column."""
_STACK_SIZE = threading.Lock()


class Grammar(str):
    """A grammar that llguidance has checked."""


def compiled(json_schema: str | None, regex: str | None, grammar: str | None) -> Grammar | None:
    """Compile the constraint of a request; None if it has none.

    `json_schema` is an object in JSON. `grammar` is in llguidance's variant of Lark or in
    llama.cpp's GBNF. Raises OptionError if there is more than one constraint, if it is wrong, or if
    llguidance is not installed."""
    texts = {"json-schema": json_schema, "regex": regex, "grammar": grammar}
    present = [(name, text) for name, text in texts.items() if text is not None]
    if not present:
        return None
    if len(present) > 1:
        raise OptionError(f"{' and '.join(name for name, _ in present)} cannot both hold: give one")
    return _compiled(*present[0])


def library() -> ModuleType:
    """Import llguidance. Raises OptionError if it is not installed."""
    try:
        import llguidance
    except ImportError:
        from .. import system

        raise OptionError(
            "json-schema, regex and grammar need llguidance, which is not installed: "
            + system.install("grammar")
        ) from None
    return llguidance


def limits() -> Any:
    return library().LLParserLimits(**LIMITS)


def with_stack(work: Callable[[], Result]) -> Result:
    """Run `work` in a thread with STACK bytes of stack and return its result. Raises OptionError if
    llguidance panics."""
    with ThreadPoolExecutor(1) as thread:
        # The stack size is global to the process, and other threads may compile grammars too.
        with _STACK_SIZE:
            before = threading.stack_size(STACK)
            try:
                result = thread.submit(work)
            finally:
                threading.stack_size(before)
        try:
            return result.result()
        except BaseException as problem:
            if not is_panic(problem):
                raise
            raise OptionError(
                "json-schema, regex or grammar: llguidance fails on it: make it simpler"
            ) from None


def schema_text(schema: str | Mapping[str, Any]) -> str:
    """Return a JSON schema as text. Raises OptionError for values that JSON does not have."""
    try:
        return schema if isinstance(schema, str) else json.dumps(dict(schema))
    except (TypeError, ValueError, RecursionError):
        raise OptionError("json-schema must be a schema that JSON can say") from None


def with_space(grammar: str, *, always: bool) -> str:
    """Return a grammar of texts that begin with a space, which is mandatory if `always`."""
    [inner] = json.loads(grammar)["grammars"]
    space = {"lark_grammar": f"start: /{' ' if always else ' ?'}/ @{INNER}"}
    return json.dumps({"grammars": [space, {**inner, "name": INNER}]})


def rule_of(name: str, grammar: Grammar) -> str:
    """Return a Lark rule with this name that matches the texts of a grammar."""
    [inner] = json.loads(grammar)["grammars"]
    if inner.get("json_schema") is not None:
        return f"{name}: %json {json.dumps(inner['json_schema'])}"
    return f"{name}: %lark {{\n{inner['lark_grammar']}\n}}"


def first_problem(problem: str) -> str:
    """Shorten llguidance's message to one line: its first "error:" line, or else its first line."""
    lines = [line.strip() for line in problem.splitlines() if line.strip()]
    named = [line.removeprefix("error: ") for line in lines if line.startswith("error: ")]
    return (named or lines or ["it cannot be read"])[0][:200]


def _wrong(name: str, problem: str) -> str:
    """Return a sentence about a wrong constraint. problem: llguidance's message."""
    reason = ERROR_PLACE.sub(r"in line \1, column \2: ", first_problem(problem))
    formats = "; a grammar is written in llguidance's variant of Lark or in llama.cpp's GBNF"
    return f"{name} is wrong: {reason}{formats if name == 'grammar' else ''}"


@functools.lru_cache(maxsize=KEPT)
def _compiled(name: str, text: str) -> Grammar:
    matcher = library().LLMatcher
    _check_size(name, text)
    if name == "json-schema":
        schema = _schema(text)
        try:
            grammar = matcher.grammar_from_json_schema(schema, overrides=JSON_STYLE)
        except ValueError as problem:
            raise OptionError(f"{name} is wrong: {first_problem(str(problem))}") from None
    elif name == "regex":
        grammar = matcher.grammar_from_regex(text)
    else:
        if text.count("\n") > MOST_LINES:
            raise OptionError(f"{name} has more than {MOST_LINES} lines: shorten it")
        lark = _lark_of(text) if GBNF.search(text) else text
        grammar = json.dumps({"grammars": [{"lark_grammar": lark}]})
    check = matcher.validate_grammar_with_warnings
    wrong, problems = with_stack(lambda: check(grammar, limits=limits()))
    if wrong:
        raise OptionError(_wrong(name, problems[0]))
    for ignored in problems:
        if not ignored.startswith(HARMLESS):
            log.warning("%s is enforced in part: %s", name, first_problem(ignored))
    return Grammar(grammar)


def _lark_of(text: str) -> str:
    """Translate llama.cpp's GBNF to Lark. Raises OptionError if the text is no valid GBNF."""
    from llguidance.gbnf_to_lark import any_to_lark

    try:
        return any_to_lark(text)
    except RecursionError:
        raise OptionError("grammar has too many brackets in each other") from None
    except Exception as problem:  # any type, for example if a rule is missing
        raise OptionError(_wrong("grammar", str(problem))) from None


def _check_size(name: str, text: str) -> None:
    """Raise OptionError if the text is empty, too long or not valid Unicode."""
    try:
        text.encode("utf-8")
    except UnicodeEncodeError:
        raise OptionError(f"{name} has half a character in it, a lone surrogate") from None
    if not text.strip():
        raise OptionError(f"{name} is empty")
    if len(text) > LONGEST_GRAMMAR:
        raise OptionError(f"{name} has more than {LONGEST_GRAMMAR} characters: shorten it")


def _schema(text: str) -> str:
    """Return a JSON schema in the form for llguidance. Raises OptionError if it is not a schema."""
    try:
        schema = json.loads(text)
        read = json.dumps(enforceable(schema))
    except ValueError as problem:
        raise OptionError(f"json-schema is no JSON: {problem}") from None
    except RecursionError:
        raise OptionError("json-schema has too many brackets in each other") from None
    if not isinstance(schema, dict):
        raise OptionError('json-schema must be a JSON object, for example {"type": "object"}')
    if read == "false":
        raise OptionError('json-schema accepts nothing: leave "not" out')
    return read


def enforceable(schema: Any) -> Any:
    """Return an equivalent JSON schema that llguidance supports. A `not` of a schema that accepts
    anything becomes `false`, and `"uniqueItems": false` is dropped."""
    if isinstance(schema, list):
        return [enforceable(item) for item in schema]
    if not isinstance(schema, dict):
        return schema
    if schema.get("not") in ({}, True):
        return False
    read: dict[str, Any] = {}
    for key, value in schema.items():
        if key in SCHEMAS_BY_NAME and isinstance(value, dict):
            read[key] = {name: enforceable(inner) for name, inner in value.items()}
        elif not (key == "uniqueItems" and value is False):
            read[key] = value if key in VALUES else enforceable(value)
    return read
