"""Completions that a schema, a regular expression or a grammar binds. That drafts change none of
them is checked in test_same_output.py."""

import json
import math
import re
from pathlib import Path
from typing import Any

import pytest

from mlx_specdec import (
    DecodingError,
    OptionError,
    Options,
    Request,
    generate,
    load,
    stream_generate,
)

from .outcomes import together
from .pairs import END, LETTERS, SPECIAL, T5, Pairs, model
from .test_same_output import FACTORS

PROMPT = [5, 9, 12, 7, 25, 21, 8]
CASES = {name: case for name, case in FACTORS["constraint"].items() if case and "dead" not in name}
JSON = re.compile(r'\{"ab": "[abc]{2,6}", "ba": \[(-?\d{1,3}(, -?\d+){0,2})?\]\}')
STUCK = "the model has no token for what must follow"


@pytest.fixture(scope="module", params=["llama", T5])
def pair(request: pytest.FixtureRequest, pairs: Pairs) -> Any:
    return pairs(request.param)


def options_of(**changes: Any) -> Options:
    return Options(**{"max_tokens": 44, "cost_cache": False, "temperature": 1.0, **changes})


def is_nested(text: str) -> bool:
    """Return whether a text fits the grammar of brackets."""
    before = ""
    while text != before:
        before, text = text, re.sub(r"\[x*\]|ab|c", "x", text)
    return text == "x"


def token(letter: str) -> int:
    return len(SPECIAL) + LETTERS.index(letter)


@pytest.mark.parametrize("rule", ["coupled", "token", "block", "typical"])
def test_completions_fit_under_every_rule(pair: Any, rule: str) -> None:
    requests = [
        Request(PROMPT, options_of(seed=seed, rule=rule, num_draft=4, **case))
        for case in CASES.values()
        for seed in range(2)
    ]
    for request, outcome in zip(requests, together(pair, requests, batch_size=8), strict=True):
        options, text = request.options, outcome.text
        assert outcome.reason in ("eos", "length")
        if outcome.reason == "eos":
            assert options.regex is None or re.fullmatch(options.regex, text)
            assert options.json_schema is None or (JSON.fullmatch(text) and json.loads(text))
            assert options.grammar is None or is_nested(text)


def test_tokens_that_must_come_take_no_passes(pair: Any) -> None:
    """Whatever the pair can draft, and without any proposer of its own."""
    plain = generate(pair, PROMPT, options_of(regular=True, **CASES["forced tokens"]))
    for proposer in (None, "ngram"):
        options = options_of(num_draft=5, proposer=proposer, **CASES["forced tokens"])
        result = generate(pair, PROMPT, options)
        stats = result.stats
        assert result.tokens == plain.tokens
        assert stats.by_source.get("forced", stats).accepted > 0
        assert stats.target_passes < plain.stats.target_passes


@pytest.mark.parametrize("extra", [(), (2,), (token("c"),)], ids=str)
def test_an_end_comes_where_the_text_is_complete(pair: Any, extra: tuple[int, ...]) -> None:
    """An end token that is a letter ends the text, and is never written in it."""
    ends = {*pair.eos_token_ids, *extra}
    likely = dict.fromkeys(ends, 50.0)
    for num_draft in (0, 4):
        more: dict[str, Any] = {"extra_eos_token": extra, "num_draft": num_draft}
        options = options_of(regex="[abc]{6,9}", logit_bias=likely, **more)
        result = generate(pair, PROMPT, options)
        assert result.finish_reason == "eos" and re.fullmatch("[abc]{6,9}", result.text)
        assert result.tokens[-1] in ends and not ends & {*result.tokens[:-1]}


@pytest.mark.parametrize("rule", ["coupled", "token"])
@pytest.mark.parametrize("num_draft", [0, 4])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_text_that_cannot_go_on_fails_alone(
    pair: Any, rule: str, num_draft: int, temperature: float
) -> None:
    """Tokens that are banned differ from tokens that the model lacks, and from damage."""
    common: dict[str, Any] = {"rule": rule, "num_draft": num_draft, "temperature": temperature}
    bans = {token(letter): -math.inf for letter in "de"}
    one, silent = {END: -math.inf, token("d"): -math.inf}, {END: -math.inf}
    cases: list[dict[str, Any]] = [
        {"regex": "ab[ab]Z"},
        {"regex": "[ab]c[de]", "logit_bias": bans},
        {"regex": "[ab]c[de]", "logit_bias": one},
        {"regex": "Z+"},
        {"regex": "[ab]+", "logit_bias": silent, "max_tokens": 9},
    ]
    requests = [Request(PROMPT, options_of(**case, **common)) for case in cases]
    found = together(pair, requests, batch_size=5)
    assert STUCK in str(found[0].error) and STUCK in str(found[1].error)
    assert (found[2].text[1:], found[2].reason, len(found[2].tokens)) == ("ce", "eos", 3)
    assert "no text of this model fits" in str(found[3].error)
    assert found[4].reason == "length" and re.fullmatch("[ab]+", found[4].text)
    shown, held = "", options_of(regex="ab[ab]Z", stop=("aZ", "bZ"), **common)
    with pytest.raises(DecodingError, match=STUCK):
        for step in stream_generate(pair, PROMPT, held):
            shown += step.text
    assert re.fullmatch("ab[ab]", shown), "text that was held back is not lost"
    with pytest.raises(OptionError, match="logit-bias bans"):
        generate(pair, PROMPT, options_of(regex="[de]", logit_bias=bans, **common))


def test_a_model_without_an_end_is_refused(tmp_path: Path) -> None:
    directory = model(tmp_path, "llama", eos_token_id=None)
    (directory / "tokenizer_config.json").write_text("{}")
    text = (directory / "tokenizer.json").read_text()
    (directory / "tokenizer.json").write_text(text.replace(SPECIAL[END], "<other>"))
    pair = load(directory)
    with pytest.raises(OptionError, match="name one with extra-eos-token"):
        generate(pair, PROMPT, options_of(regex="a"))
    assert generate(pair, PROMPT, options_of(regex="a", extra_eos_token=2)).text == "a"


def test_what_ends_a_text_comes_before_what_cannot_follow_it(pair: Any) -> None:
    """Z has no token, so that the text could not go on after its end."""
    bias = {token(letter): 30.0 for letter in "ab"}
    for num_draft in (0, 4):
        common: dict[str, Any] = {"regex": "ababab?Z", "logit_bias": bias, "num_draft": num_draft}
        ends: list[dict[str, Any]] = [{"stop": "ba"}, {"max_tokens": 2}]
        requests = [Request(PROMPT, options_of(**common, **end)) for end in ends]
        found = together(pair, requests)
        assert (found[0].text, found[0].reason) == ("a", "stop")
        assert found[1].reason == "length" and "ababab".startswith(found[1].text)
