"""Texts that a grammar binds: they fit it, and nobody's drafts change them."""

import math
import re
from dataclasses import replace

import mlx.core as mx
import pytest

from mlx_specdec import load
from mlx_specdec.engine.generate import generate, generate_many, stream_many
from mlx_specdec.engine.pair import Pair
from mlx_specdec.engine.request import Request
from mlx_specdec.errors import DecodingError, OptionError
from mlx_specdec.interfaces.records import STUCK
from mlx_specdec.models.mlx_lm.model import DecoderOnlyModel
from mlx_specdec.options import Options
from mlx_specdec.sampling.constraint import Constraint

from ..support import tiny
from ..support.letters import CASES, END, OTHER_END, PIECES, bound
from ..support.pairs import with_heads
from ..support.shipped import ROOT, equal_rows

PROMPT = [5, 9, 12, 7, 25, 21, 8]
JSON = re.compile(r'\{"ab": "[abc]{2,6}", "ba": \[(-?\d{1,3}(, -?\d+){0,2})?\]\}')


@pytest.fixture(
    scope="module", params=["llama", pytest.param("own-head-scaled", marks=pytest.mark.slow)]
)
def pair(request: pytest.FixtureRequest) -> Pair:
    return with_heads(bound(request.param))


def make_options(seed: int, **changes) -> Options:
    return Options(**{"max_tokens": 44, "seed": seed, "cost_cache": False, **changes})


@pytest.mark.parametrize("rule", ["coupled", "token", "block", "typical"])
@pytest.mark.parametrize("case", CASES)
def test_texts_fit_under_every_rule(pair: Pair, rule: str, case: str) -> None:
    for seed in range(2):
        options = make_options(seed, temperature=1.0, rule=rule, num_draft=4, **CASES[case])
        result = generate(pair, PROMPT, options)
        if result.finish_reason == "eos" and "regex" in CASES[case]:
            assert re.fullmatch(CASES[case]["regex"], result.text)
        if result.finish_reason == "eos" and case == "schema":
            assert JSON.fullmatch(result.text)


def test_what_the_grammar_alone_knows_is_proposed(pair: Pair) -> None:
    plain = generate(pair, PROMPT, make_options(1, regular=True, **CASES["fixed"]))
    for drafting in (pair, replace(pair, draft=None, heads=None)):
        stats = generate(drafting, PROMPT, make_options(1, num_draft=5, **CASES["fixed"])).stats
        assert stats.by_source.get("forced", stats).accepted > 0
        assert stats.target_passes < plain.stats.target_passes


@pytest.mark.parametrize("ends", [{END}, {END, OTHER_END}, {OTHER_END, 5}])
def test_an_end_comes_where_the_grammar_is_complete(pair: Pair, ends: set[int]) -> None:
    """5 is the letter c, which ends this text and is never written in it."""
    ending = replace(pair, eos_token_ids=frozenset(ends))
    likely = dict.fromkeys(ends, 50.0)
    options = make_options(0, regex="[abc]{6,9}", logit_bias=likely)
    for num_draft in (0, 4):
        result = generate(ending, PROMPT, replace(options, num_draft=num_draft))
        assert result.finish_reason == "eos"
        assert re.fullmatch("[abc]{6,9}", result.text)
        assert result.tokens[-1] in ends and not ends & {*result.tokens[:-1]}


@pytest.mark.parametrize("num_draft", [0, 4])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("rule", ["coupled", "token"])
def test_where_no_token_fits_the_text_ends_with_a_word(
    num_draft: int, temperature: float, rule: str
) -> None:
    pair = bound("llama")
    options = make_options(
        0, regex="ab[ab]z", num_draft=num_draft, temperature=temperature, rule=rule
    )
    with pytest.raises(DecodingError, match=re.escape(STUCK)):
        generate(pair, PROMPT, options)
    free = make_options(1, num_draft=num_draft, rule=rule, max_tokens=9)
    requests = [Request(PROMPT, options), Request(PROMPT, free)]
    parts = [part for part in stream_many(pair, requests, options, batch_size=2) if part.last]
    errors = {part.number: part.error for part in parts}
    assert errors == {0: STUCK, 1: None}


class Panics:
    """A matcher of llguidance whose named function panics at its third call."""

    class PanicException(BaseException):
        """As pyo3's."""

    def __init__(self, matcher: object, name: str) -> None:
        self._matcher = matcher
        self._name = name
        self._calls = 0

    def __getattr__(self, name: str) -> object:
        shipped = getattr(self._matcher, name)

        def counted(*arguments: object) -> object:
            self._calls += name == self._name
            if name == self._name and self._calls == 3:
                raise Panics.PanicException("index out of bounds")
            return shipped(*arguments)

        return counted


@pytest.mark.parametrize("name", ["compute_bitmask", "validate_tokens", "try_consume_tokens"])
def test_a_panic_of_the_library_ends_its_own_text(
    monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    pair, init = bound("llama"), Constraint.__init__

    def panics(self: Constraint, *arguments: object) -> None:
        init(self, *arguments)
        self._matcher = Panics(self._matcher, name)

    free = make_options(1, num_draft=2, max_tokens=9)
    requests = [
        Request(PROMPT, make_options(0, regex="[abc]{20}", num_draft=2)),
        Request(PROMPT, free),
    ]
    alone = generate(pair, PROMPT, free).text
    monkeypatch.setattr(Constraint, "__init__", panics)
    parts = [part for part in stream_many(pair, requests, free, batch_size=2) if part.last]
    assert {part.number: part.error for part in parts} == {0: STUCK, 1: None}
    assert [part.result.text for part in parts if part.result is not None] == [alone]


@pytest.mark.parametrize("num_draft", [0, 4])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("rule", ["coupled", "token"])
def test_what_is_banned_is_distinguished_from_damage(
    num_draft: int, temperature: float, rule: str
) -> None:
    pair = bound("llama")

    def banned(regex: str, pieces: list[str]) -> Options:
        bias = {PIECES.index(piece): -math.inf for piece in pieces}
        more = {"num_draft": num_draft, "temperature": temperature, "rule": rule}
        return make_options(0, regex=regex, logit_bias=bias, **more)

    with pytest.raises(OptionError, match="logit-bias bans"):
        generate(pair, PROMPT, banned("[ab]", ["a", "b"]))
    with pytest.raises(DecodingError, match="logit-bias bans"):
        generate(pair, PROMPT, banned("[ab]c[de]", ["d", "e"]))
    result = generate(pair, PROMPT, banned("[ab]c[de]", ["</s>", "d"]))
    assert (result.text[1:], result.finish_reason) == ("ce", "eos")
    assert len(result.tokens) == 3, "no token ends it"
    result = generate(pair, PROMPT, replace(banned("[ab]+", ["</s>"]), max_tokens=9))
    assert (len(result.tokens), result.finish_reason) == (9, "length")


def test_damaged_logits_are_reported_as_such() -> None:
    pair = bound("llama")
    network = tiny.build("llama")
    network.lm_head.weight = network.lm_head.weight * mx.nan
    damaged = replace(pair, target=DecoderOnlyModel(network), draft=None)
    for changes in ({}, {"temperature": 1.0}, {"temperature": 1.0, "rule": "token"}):
        with pytest.raises(DecodingError, match="not numbers"):
            generate(damaged, PROMPT, make_options(0, regex="[ab]{20}", **changes))


def test_a_model_without_an_end_is_refused() -> None:
    pair = replace(bound("llama"), eos_token_ids=frozenset())
    with pytest.raises(OptionError, match="name one with extra-eos-token"):
        generate(pair, PROMPT, make_options(0, regex="a"))
    options = make_options(0, regex="a", extra_eos_token=OTHER_END)
    assert generate(pair, PROMPT, options).text == "a"


def test_a_prompt_whose_text_cannot_begin_fails_alone(pair: Pair) -> None:
    requests = [Request(PROMPT, make_options(0, regex=regex)) for regex in ("z+", "ab")]
    parts = [part for part in stream_many(pair, requests, make_options(0)) if part.last]
    assert [(part.number, part.error is None) for part in parts] == [(0, False), (1, True)]


@pytest.fixture(scope="module")
def translator() -> Pair:
    return load(ROOT / "weights" / "t5-enfr", ROOT / "weights" / "t5-enfr-draft")


@equal_rows
@pytest.mark.parametrize(("num_draft", "temperature"), [(0, 0.8), (4, 0.0), (4, 0.8)])
def test_what_ends_a_text_comes_before_what_cannot_follow_it(
    translator: Pair, num_draft: int, temperature: float
) -> None:
    """The vocabulary has no {, and behind x nothing but a banned end may come."""
    prompt = "translate English to French: Good morning, my friend."
    settings = {"num_draft": num_draft, "temperature": temperature, "cost_cache": False}
    settings["proposer"] = "draft" if num_draft else "none"
    hello = Options(regex=r"Bonjour, mon ami\{", stop="ami", **settings)
    short = replace(hello, stop=(), max_tokens=3)
    banned = Options(regex="(ab)?x{3}", logit_bias={1: -math.inf}, **settings)
    free = Options(max_tokens=8, **settings)
    requests = [Request(prompt, options) for options in (hello, short, banned, free)]
    texts = [
        (result.text, result.finish_reason) for result in generate_many(translator, requests, free)
    ]
    plain = [replace(request.options, regular=True) for request in requests]
    alone = [generate(translator, prompt, options) for options in plain]
    assert texts == [(result.text, result.finish_reason) for result in alone]
    assert texts[0] == ("Bonjour, mon ", "stop")
    assert texts[1][1] == "length"
    assert texts[2] in [("xxx", "eos"), ("abxxx", "eos")]
