"""The promise: for the same seed, speculation never changes the text, in any family of models."""

from __future__ import annotations

import itertools
from dataclasses import replace

import mlx.core as mx
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from mlx_lm.generate import generate_step
from mlx_lm.models.cache import RotatingKVCache

from mlx_specdec.engine.generate import generate, stream_generate
from mlx_specdec.engine.pair import Pair
from mlx_specdec.errors import OptionError
from mlx_specdec.models.cache_settings import CacheSettings
from mlx_specdec.models.mlx_lm.model import DecoderOnlyModel
from mlx_specdec.models.self_draft import self_draft
from mlx_specdec.options import Options
from mlx_specdec.proposers.documents import DocumentIndex, backwards, order, stored

from .support import tiny
from .support.pairs import (
    FIXTURES,
    ONE_OF_EACH_CACHE,
    PROMPT,
    SIZE,
    Numbers,
    Switching,
    decoder_only,
    encoder_decoder,
    pair_for,
    pair_of,
    perturbed,
)

LENGTH = 32
LONGER = 60
"""Where something has to repeat, to be looked up."""
MIXED_CACHES = ("llama_sliding", "gpt_oss", "qwen3_next", "falcon_h1", "recurrent_gemma", "llama4")
"""Several kinds of caches in one model. models/test_every_family.py has all families."""


def check(pair: Pair, **changes) -> None:
    """Greedy texts are drafted by a fixed length, others by one that switches."""
    plain = generate(pair, PROMPT, Options(max_tokens=LENGTH, regular=True, **changes))
    assert len(set(plain.tokens)) > 3, "a text of one token would prove little"
    options = Options(max_tokens=LENGTH, num_draft=6, **changes)
    lengths = Switching() if options.temperature else None
    result = stream_generate(pair, PROMPT, options, draft_length=lengths).result()
    assert result.tokens == plain.tokens
    assert result.text == plain.text
    assert result.stats.drafted > 0


@pytest.mark.slow
@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("name", MIXED_CACHES)
def test_decoder_only_models_write_the_same_text(name: str, temperature: float) -> None:
    check(decoder_only(name), temperature=temperature, seed=3)


@pytest.mark.parametrize("temperature", [pytest.param(0.0, marks=pytest.mark.slow), 0.8])
@pytest.mark.parametrize(
    "kind", sorted({path.name for path in FIXTURES.iterdir()} - {*ONE_OF_EACH_CACHE})
)
def test_encoder_decoder_models_write_the_same_text(kind: str, temperature: float) -> None:
    # Tied random weights repeat one token; the penalty makes the text worth comparing.
    pair = encoder_decoder(kind, 0.1)
    check(pair, temperature=temperature, frequency_penalty=2.0, seed=3)


FAST_CASES = {
    ("llama", "auto", 0.0),
    ("llama", "auto", 1.0),
    ("llama", "draft", 0.0),
    ("llama", "ngram", 1.0),
    ("own-head-scaled", "auto", 0.0),
    ("own-head-scaled", "draft", 1.0),
    ("mamba2", "auto", 1.0),
}


@pytest.mark.parametrize(
    ("name", "proposer", "temperature"),
    [
        case if case in FAST_CASES else pytest.param(*case, marks=pytest.mark.slow)
        for case in itertools.product(ONE_OF_EACH_CACHE, ("draft", "ngram", "auto"), (0.0, 1.0))
    ],
)
def test_what_users_run_writes_the_same_text(name: str, proposer: str, temperature: float) -> None:
    """As in `check`."""
    pair = pair_for(name)
    prompt = [5, 9, 12, 7, 33, 5, 9, 12, 7, 21, 5, 9]
    asked = Options(
        max_tokens=LENGTH if proposer == "draft" else LONGER,
        temperature=temperature,
        frequency_penalty=0.5,
        seed=2,
        ngram_min=1,
    )
    plain = generate(pair, prompt, replace(asked, regular=True))
    assert len(set(plain.tokens)) > 3, "a text of one token would prove little"
    options = replace(asked, proposer=proposer, num_draft=6)
    lengths = Switching() if temperature else None
    result = stream_generate(pair, prompt, options, draft_length=lengths).result()
    assert (result.tokens, result.text) == (plain.tokens, plain.text)
    assert result.labels.proposer == proposer
    assert result.labels.draft_model == (None if proposer == "ngram" else "draft")
    stats = result.stats
    assert stats.drafted > 0
    if proposer == "auto":
        assert set(stats.by_source) == {"ngram", "draft"}
        assert sum(one.drafted for one in stats.by_source.values()) == stats.drafted
        assert sum(one.accepted for one in stats.by_source.values()) == stats.accepted
    if lengths is not None:
        assert 0 < stats.drafted_by_position[0] < stats.rounds, "plain steps between drafts"


@pytest.mark.slow
def test_a_draft_of_another_architecture_does_not_change_the_text() -> None:
    draft = DecoderOnlyModel(tiny.build("mamba2", seed=4))
    check(pair_of(DecoderOnlyModel(tiny.build("gemma3_wrapped")), draft), temperature=0.7)


def test_a_draft_that_knows_fewer_tokens_does_not_change_the_text() -> None:
    draft = DecoderOnlyModel(tiny.build("llama", vocab_size=40))
    check(pair_of(DecoderOnlyModel(tiny.build("llama")), draft), temperature=1.0)


def test_the_identical_draft_is_always_right() -> None:
    target = DecoderOnlyModel(tiny.build("llama"))
    for temperature in (0.0, 1.0):
        options = Options(max_tokens=40, num_draft=4, temperature=temperature)
        stats = generate(pair_of(target, target), PROMPT, options).stats
        assert stats.acceptance_rate == 1.0
        assert stats.tokens_per_round == 5.0


@pytest.mark.parametrize("family", ["llama", "own-head-scaled"])
def test_top_choices_are_excluded_from_draft_and_target_alike(family: str) -> None:
    asked = {"temperature": 1.0, "xtc_probability": 0.5, "xtc_threshold": 0.02, "seed": 3}
    check(pair_for(family), **asked)
    plain = Options(max_tokens=LENGTH, regular=True, **asked)
    target = pair_for(family).target
    own = pair_of(target, target)
    without = replace(plain, xtc_probability=0.0)
    assert generate(own, PROMPT, plain).tokens != generate(own, PROMPT, without).tokens
    for rule in ("coupled", "token", "block"):
        options = replace(plain, regular=False, num_draft=4, proposer="draft", rule=rule)
        assert generate(own, PROMPT, options).stats.acceptance_rate == 1.0


def test_line_ends_and_what_ends_a_text_are_never_excluded() -> None:
    class Lines(Numbers):
        def encode(self, text: str) -> list[int]:
            return [7] if text == "\n" else super().encode(text)

    pair = replace(decoder_only("llama"), tokenizer=Lines())
    # Two top choices everywhere, of which the likelier one is excluded unless it is special.
    biases = {7: 1e6, 8: 0.999e6}
    asked = Options(
        max_tokens=20, temperature=1e3, xtc_probability=1.0, xtc_threshold=0.2, logit_bias=biases
    )
    excluded = generate(pair, PROMPT, replace(asked, xtc_special_tokens=()))
    assert set(excluded.tokens) == {8}
    assert set(generate(pair, PROMPT, asked).tokens) == {7, 8}
    ends = replace(decoder_only("llama"), eos_token_ids=frozenset({7}))
    assert generate(ends, PROMPT, asked).finish_reason == "eos"


pairs: dict[str, Pair] = {}
families = ("llama", "own-head-scaled", "gemma3_wrapped", "mamba2", "gated-silu")
anything = given(
    family=st.sampled_from(families),
    prompt=st.lists(st.integers(2, SIZE - 1), min_size=1, max_size=20),
    num_draft=st.integers(0, 8),
    seed=st.integers(0, 1 << 40),
    temperature=st.sampled_from([0.0, 0.3, 1.0, 2.0]),
    top_k=st.sampled_from([0, 1, 5]),
    top_p=st.sampled_from([1.0, 0.9, 0.3]),
    min_p=st.sampled_from([0.0, 0.1]),
    xtc_probability=st.sampled_from([0.0, 0.5, 1.0]),
    xtc_threshold=st.sampled_from([0.02, 0.1]),
    repetition_penalty=st.sampled_from([1.0, 1.3]),
    presence_penalty=st.sampled_from([0.0, 0.5]),
    frequency_penalty=st.sampled_from([0.0, 0.3]),
    logit_bias=st.dictionaries(st.integers(0, SIZE - 1), st.floats(-5, 5), max_size=3),
    stop=st.sampled_from([(), ("3 ",), ("1 2", "7 ")]),
    max_tokens=st.integers(0, 30),
)


def compare(family: str, prompt: list[int], num_draft: int, **asked) -> None:
    if family not in pairs:
        pairs[family] = pair_for(family)
    pair = pairs[family]
    plain = generate(pair, prompt, Options(regular=True, **asked))
    result = generate(pair, prompt, Options(num_draft=num_draft, **asked))
    assert (result.tokens, result.text) == (plain.tokens, plain.text)
    assert result.finish_reason == plain.finish_reason
    assert len(result.tokens) <= asked["max_tokens"]


@settings(max_examples=15, deadline=None, derandomize=True)
@anything
def test_whatever_is_asked_the_text_is_that_of_plain_decoding(**asked) -> None:
    compare(**asked)


@pytest.mark.slow
@settings(max_examples=150, deadline=None, derandomize=True)
@anything
def test_in_hundreds_of_cases_the_text_is_that_of_plain_decoding(**asked) -> None:
    compare(**asked)


@pytest.mark.parametrize("temperature", [pytest.param(0.0, marks=pytest.mark.slow), 1.0])
@pytest.mark.parametrize(
    ("family", "caches"),
    [
        ("llama", CacheSettings(2, 32)),
        pytest.param("qwen3_moe", CacheSettings(4, 32), marks=pytest.mark.slow),
        ("llama", CacheSettings(max_size=16)),
        pytest.param("qwen3", CacheSettings(max_size=9), marks=pytest.mark.slow),
    ],
)
def test_smaller_caches_change_the_text_but_not_between_plain_and_speculative(
    family: str, caches: CacheSettings, temperature: float
) -> None:
    shape = {"head_dim": 32}
    target = DecoderOnlyModel(tiny.build(family, **shape), caches=caches)
    draft = DecoderOnlyModel(perturbed(tiny.build(family, **shape), 0.3), caches=caches)
    check(pair_of(target, draft), temperature=temperature, seed=3)
    options = Options(max_tokens=LENGTH, regular=True, temperature=temperature, seed=3)
    small = generate(pair_of(target, None), PROMPT, options)
    whole = generate(pair_of(DecoderOnlyModel(tiny.build(family, **shape)), None), PROMPT, options)
    assert small.tokens != whole.tokens


@pytest.mark.parametrize("length", [1, 30])
def test_plain_text_under_smaller_caches_is_that_of_mlx_lm(length: int) -> None:
    network = tiny.build("llama", head_dim=32)
    prompt = [2 + index * 7 % 60 for index in range(length)]

    def reference(**asked) -> tuple[int, ...]:
        steps = generate_step(mx.array(prompt), network, max_tokens=LENGTH, **asked)
        return tuple(token for token, _ in steps)

    def plain(caches: CacheSettings) -> tuple[int, ...]:
        pair = pair_of(DecoderOnlyModel(network, caches=caches), None)
        return generate(pair, prompt, Options(max_tokens=LENGTH, regular=True)).tokens

    quantized = reference(kv_bits=8, kv_group_size=32, quantized_kv_start=0)
    assert plain(CacheSettings(8, 32)) == quantized
    windows = [RotatingKVCache(max_size=9, keep=0) for _ in network.layers]
    assert plain(CacheSettings(max_size=9)) == reference(prompt_cache=windows) != quantized


@pytest.mark.parametrize("eos_after", [1, 2, 5, 9])
def test_an_eos_ends_speculative_and_plain_text_alike(eos_after: int) -> None:
    free = decoder_only("llama")
    text = generate(free, PROMPT, Options(max_tokens=12, regular=True)).tokens
    eos = text[eos_after]
    pair = pair_of(free.target, free.draft, frozenset({eos}))
    expected = text[: text.index(eos) + 1]
    for num_draft in (0, 1, 4, 8):
        result = generate(pair, PROMPT, Options(max_tokens=30, num_draft=num_draft))
        assert result.tokens == expected
        assert result.finish_reason == "eos"


def test_lenience_accepts_more_and_says_so() -> None:
    pair = decoder_only("llama", 0.6)
    rates = []
    for delta in (0.0, 0.3, 1.0):
        result = generate(pair, PROMPT, Options(max_tokens=LENGTH, num_draft=5, delta=delta))
        rates.append(result.stats.accepted / result.stats.drafted)
        assert result.labels.rule == ("coupled" if delta == 0 else "lenient")
    assert rates == sorted(rates) and rates[-1] == 1.0


@pytest.mark.parametrize("rule", [pytest.param("token", marks=pytest.mark.slow), "block"])
def test_texts_of_other_exact_rules_depend_on_the_seed(rule: str) -> None:
    pair = decoder_only("llama")
    options = Options(max_tokens=LENGTH, num_draft=5, temperature=1.0, rule=rule, seed=4)
    first, again = generate(pair, PROMPT, options), generate(pair, PROMPT, options)
    other = generate(pair, PROMPT, replace(options, seed=5))
    assert first.tokens == again.tokens != other.tokens
    assert first.labels.rule == rule


def test_a_text_ends_where_the_models_positions_end() -> None:
    target = DecoderOnlyModel(tiny.build("llama"), max_length=len(PROMPT) + 9)
    for draft in (None, DecoderOnlyModel(tiny.build("llama"), max_length=len(PROMPT) + 4)):
        result = generate(pair_of(target, draft), PROMPT, Options(max_tokens=50, num_draft=4))
        assert len(result.tokens) == 9
        assert result.finish_reason == "length"


@pytest.mark.parametrize("choice", ["recent", "frequent"])
def test_whatever_prompt_lookup_chooses_does_not_change_the_text(choice: str) -> None:
    pair, prompt = decoder_only("llama"), [5, 9, 12, 7, 33, 5, 9, 12, 7, 21, 5, 9]
    asked = Options(max_tokens=LENGTH, temperature=0.7, seed=2)
    plain = generate(pair, prompt, replace(asked, regular=True))
    lookup = replace(asked, proposer="ngram", ngram_min=1, ngram_choice=choice, num_draft=8)
    result = generate(pair, prompt, lookup)
    assert result.tokens == plain.tokens
    assert result.stats.drafted > 0


@pytest.mark.parametrize("rule", ["token", "block", "typical"])
def test_lookup_works_under_every_rule(rule: str) -> None:
    asked = Options(
        max_tokens=LENGTH,
        proposer="ngram",
        ngram_min=1,
        num_draft=5,
        temperature=0.5,
        rule=rule,
        seed=1,
    )
    stats = generate(decoder_only("llama"), PROMPT, asked).stats
    assert stats.drafted > 0


def test_a_text_that_repeats_itself_is_looked_up() -> None:
    target = DecoderOnlyModel(tiny.build("llama"))
    bias = dict.fromkeys((3, 4), 50.0)
    asked = {"max_tokens": 80, "logit_bias": bias}
    plain = generate(pair_of(target, None), PROMPT, Options(regular=True, **asked))
    result = generate(
        pair_of(target, None), PROMPT, Options(proposer="ngram", num_draft=5, **asked)
    )
    assert result.tokens == plain.tokens
    assert result.stats.tokens_per_round > 1.5


@pytest.mark.parametrize("temperature", [0.0, 0.7])
@pytest.mark.parametrize("family", ["llama", "mamba2", "own-head-scaled"])
def test_documents_do_not_change_the_text(family: str, temperature: float) -> None:
    pair = pair_for(family)
    asked = {"max_tokens": LONGER, "temperature": temperature, "seed": 2, "frequency_penalty": 2.0}
    plain = generate(pair, PROMPT, Options(regular=True, **asked))
    helpful = [*PROMPT, *plain.tokens[:40], 3, 3]
    misleading = [token for own in plain.tokens for token in (own, (own + 1) % SIZE)]
    rounds = []
    for texts in ([helpful, misleading], [misleading]):
        tokens = backwards([np.array(text, np.int32) for text in texts], SIZE)
        index = DocumentIndex(order(tokens).data, stored(tokens))
        options = Options(proposer="ngram", ngram_min=1, num_draft=4, **asked)
        result = generate(replace(pair, documents=index), PROMPT, options)
        assert result.tokens == plain.tokens
        assert result.stats.drafted > result.stats.accepted
        rounds.append(result.stats.rounds)
    assert rounds[0] < rounds[1]


@pytest.mark.slow
@pytest.mark.parametrize("temperature", [0.0, 0.8])
@pytest.mark.parametrize(
    "name",
    ["llama", *(pytest.param(name, marks=pytest.mark.slow) for name in ("qwen3_next", "mixtral"))],
)
def test_a_model_that_drafts_for_itself_does_not_change_the_text(
    name: str, temperature: float
) -> None:
    target = DecoderOnlyModel(tiny.build(name))
    draft, _ = self_draft(target, 4, 32)
    check(pair_of(target, draft), temperature=temperature)


def test_a_draft_that_is_asked_for_must_be_there() -> None:
    with pytest.raises(OptionError, match="no draft model"):
        generate(
            pair_of(DecoderOnlyModel(tiny.build("llama")), None), PROMPT, Options(proposer="draft")
        )
