"""Texts that requests bind to a schema, an expression or a grammar, under their clients' names."""

import json
import re
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from ..support.tools import SCHEMA
from .zoo import COMPLETIONS, PERSON, TEXT, Model

pytest.importorskip("llguidance", reason="the extra grammar is not installed")

Models = Callable[[str], Model]
OF_OPENAI = {"type": "json_schema", "json_schema": {"name": "x", "strict": True, "schema": SCHEMA}}
LARK = 'start: "(" ("é" | "ab"){1,3} ")"'
GBNF = 'root ::= "(" part{1,3} ")" # as llama.cpp writes it\npart ::= "é" | "ab"\n'
PARTS = r"\((é|ab){1,3}\)"
CHOICE = ["(é)", '("ab\\']
FITTING: dict[str, tuple[list[dict[str, Any]], str]] = {
    "schema": (
        [
            {"response_format": OF_OPENAI},
            {"response_format": {"type": "json_schema", "schema": SCHEMA}},
            {"response_format": {"type": "json_object", "schema": SCHEMA}},
            {"structured_outputs": {"json": SCHEMA}},
            {"structured_outputs": {"json": json.dumps(SCHEMA), "choice": None}},
            {"guided_json": SCHEMA},
        ],
        PERSON,
    ),
    "regex": (
        [
            {"structured_outputs": {"regex": "[ab]{3}é", "grammar": None}},
            {"regex": "[ab]{3}é", "response_format": {"type": "text"}},
            {"guided_regex": "[ab]{3}é"},
        ],
        "[ab]{3}é",
    ),
    "lark": (
        [{"structured_outputs": {"grammar": LARK}}, {"grammar": LARK}, {"guided_grammar": LARK}],
        PARTS,
    ),
    "gbnf": ([{"grammar": GBNF}], PARTS),
    "choice": (
        [{"guided_choice": CHOICE}, {"structured_outputs": {"choice": CHOICE}}],
        r"\(é\)|\(\"ab\\",
    ),
}
"""Fields with the same meaning, and the pattern of the texts."""


@pytest.mark.parametrize("temperature", [0, 1])
@pytest.mark.parametrize("kind", FITTING)
def test_texts_fit_under_every_name_and_with_every_drafter(
    models: Models, kind: str, temperature: int
) -> None:
    tiny, (names, pattern) = models("tiny"), FITTING[kind]
    body = {"prompt": TEXT, "temperature": temperature, "seed": 4, "max_tokens": 60}
    choice = tiny.choice(COMPLETIONS, **body, **names[0])
    assert re.fullmatch(pattern, choice["text"]) and choice["finish_reason"] == "stop"
    for settings in names[1:]:
        assert tiny.choice(COMPLETIONS, **body, **settings) == choice
    assert tiny.choice(COMPLETIONS, **body, **names[-1], speculative=False) == choice
    chunks = tiny.streamed(COMPLETIONS, **body, **names[0])
    assert "".join(chunk["choices"][0]["text"] for chunk in chunks) == choice["text"]
    warm = {"temperature": temperature, "seed": 4}
    message = tiny.message(**names[temperature - 1], **warm, max_tokens=60)
    assert re.fullmatch(pattern, message["content"])


def test_a_grammar_that_grows_too_complex_ends_its_own_request_alone(models: Models) -> None:
    tiny = models("tiny")
    exploding = {"grammar": 'start: "a" | start start | start start start', "max_tokens": 3000}
    exploding["logit_bias"] = {str(tiny.vocabulary["a"]): 90}
    free = {"prompt": TEXT, "temperature": 1.0, "seed": 8, "max_tokens": 12}
    alone = tiny.written(**free)
    with ThreadPoolExecutor(1) as clients:
        ending = clients.submit(tiny.refused, COMPLETIONS, prompt=TEXT, **exploding)
        others = {tiny.written(**free) for _ in range(3)}
        assert "too complex" in ending.result()["message"]
    assert others == {alone}


@pytest.mark.parametrize("regex", ["[ab]", "(x[ab]|[ab])", "x{3}[ab]"])
def test_bans_that_leave_nothing_of_a_grammar_are_the_clients_fault(
    models: Models, regex: str
) -> None:
    """Some are seen before decoding, and some only in the text."""
    tiny = models("tiny")
    bans = {str(tiny.vocabulary[letter]): -1 for letter in "ab"}
    body = {"model": "tiny", "prompt": TEXT, "regex": regex, "logit_bias": bans, "max_tokens": 9}
    # JSON has no infinity, but Python reads 1e999 as infinity.
    answer = tiny.server.ask(COMPLETIONS, json.dumps(body).replace("-1", "-1e999").encode())
    error = answer.json["error"]
    assert answer.status == 400 and "logit-bias bans" in error["message"]
    assert error["type"] == "invalid_request_error" and "damaged" not in error["message"]
