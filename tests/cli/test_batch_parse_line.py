"""What a line asks for, and the sentence for each line of which nothing can be made."""

from __future__ import annotations

import json
from typing import Any

import pytest

from mlx_specdec.cli.batch import parse_line
from mlx_specdec.cli.batch_files import Line
from mlx_specdec.options import Options

OPTIONS = Options(max_tokens=9, seed=1, rule="token", stop="x")


def parse(entry: Any) -> Any:
    text = entry if isinstance(entry, str) else json.dumps(entry)
    return parse_line(Line(3, text), OPTIONS, as_json=True)


def test_a_line_of_text_is_the_prompt() -> None:
    line = parse_line(Line(2, ' {"a\\nb" '), OPTIONS, as_json=False)
    assert (line.prompt, line.options, line.error) == (' {"a\nb" ', OPTIONS, None)
    assert line.record(text="t") == {"line": 2, "text": "t"}


@pytest.mark.parametrize("name", ["a", 7, 0])
def test_a_line_has_a_name_of_its_own_that_errors_keep(name: str | int) -> None:
    assert parse({"id": name, "prompt": "p"}).record(x=1) == {"line": 3, "id": name, "x": 1}
    line = parse({"id": name, "prompt": "p", "seed": "one"})
    assert line.id == name and "seed must be a whole number" in line.error


def test_messages_are_taken_as_they_are() -> None:
    messages = [{"role": "system", "content": "s"}, {"role": "user", "content": "u", "name": "n"}]
    assert parse({"messages": messages}).prompt == messages


@pytest.mark.parametrize(
    ("entry", "part"),
    [
        ("{", "the line is not JSON"),
        ("[" * 100_000, "not JSON (nested too deeply"),
        ('{"prompt": "a", "seed": ' + "9" * 5000 + "}", "a number with too many digits"),
        ("[1]", "must be an object"),
        ({}, 'either "prompt" or "messages"'),
        ({"prompt": "a", "messages": [{"role": "user", "content": "a"}]}, 'either "prompt" or'),
        ({"prompt": 5}, '"prompt" must be a string, not 5'),
        ({"prompt": ["a"]}, '"prompt" must be a string'),
        ({"prompt": " \n"}, "the prompt is empty"),
        ('{"prompt": "\\ud800"}', '"prompt" has half a character'),
        ('{"prompt": "a", "id": "\\udfff"}', '"id" has half a character'),
        ({"prompt": "a", "id": [1]}, '"id" must be a string'),
        ({"prompt": "a", "id": True}, '"id" must be a string'),
        ({"messages": []}, '"messages" must be a list'),
        ({"messages": "a"}, '"messages" must be a list'),
        ({"messages": ["a"]}, '"messages" must be a list'),
        ({"messages": [{"role": "user"}]}, '"messages" must be a list'),
        (
            {"messages": [{"role": "user", "content": [{"text": "a"}]}]},
            '"content" must be a string',
        ),
        ({"prompt": "a", "max_tokens": -1}, "max-tokens must be 0 or more, not -1"),
        ({"prompt": "a", "max_tokens": 2.5}, "max-tokens must be a whole number, not 2.5"),
        ({"prompt": "a", "max_tokens": True}, '"max_tokens" cannot be true'),
        ({"prompt": "a", "seed": "x"}, "seed must be a whole number"),
        ({"prompt": "a", "temperature": -1}, "temperature must be 0 or lie between"),
        ('{"prompt": "a", "temperature": NaN}', "temperature must be 0 or lie between"),
        ({"prompt": "a", "temperature": "hot"}, "temperature must be a number"),
        ({"prompt": "a", "top_p": 0}, "top-p must lie in [1e-30, 1]"),
        ({"prompt": "a", "stop": 5}, '"stop" must be a string, not 5'),
        ({"prompt": "a", "stop": {"x": 1}}, '"stop" must be a string'),
        ({"prompt": "a", "stop": [""]}, "a stop string must not be empty"),
        ({"prompt": "a", "rule": "block"}, '"rule" is one for all lines'),
        ({"prompt": "a", "num_draft": 3}, '"num_draft" is one for all lines'),
    ],
)
def test_a_line_of_which_nothing_can_be_made_says_why(entry: Any, part: str) -> None:
    error = parse(entry).error
    assert error is not None and part in error and "\n" not in error, error
