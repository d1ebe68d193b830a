"""Many sequences at once: each text is what its prompt becomes alone, whatever is beside it."""

import random
import re
from collections.abc import Callable
from dataclasses import replace

import mlx.core as mx
import pytest

from mlx_specdec.decoding.loop import Decoding
from mlx_specdec.draft_length import saved
from mlx_specdec.engine.generate import generate, generate_many, stream_many
from mlx_specdec.engine.memory import AutoBatchSize, BatchSize
from mlx_specdec.engine.opening import drafters, pair_key, source
from mlx_specdec.engine.pair import Pair
from mlx_specdec.engine.request import Request
from mlx_specdec.engine.scheduler import Scheduler
from mlx_specdec.errors import DecodingError, OptionError
from mlx_specdec.interfaces.records import Step
from mlx_specdec.options import Options

from ..support.pairs import SIZE, decoder_only, encoder_decoder, with_heads

FAMILIES = ("llama", "own-head-scaled")


@pytest.fixture(scope="module", params=FAMILIES)
def pair(request: pytest.FixtureRequest) -> Pair:
    return with_heads(
        encoder_decoder(request.param, 0.1)
        if request.param == "own-head-scaled"
        else decoder_only(request.param)
    )


def request(seed: int, **settings) -> Request:
    """A prompt of its own with a length, a room and a seed of its own."""
    dice = random.Random(seed)
    prompt = [dice.randrange(3, SIZE) for _ in range(dice.choice([1, 2, 3, 9, 20, 41]))]
    drawn = {"max_tokens": dice.choice([1, 5, 11, 18]), "seed": seed, "frequency_penalty": 1.0}
    return Request(prompt, Options(cost_cache=False, **{**drawn, **settings}))


def alone(pair: Pair, requests: list[Request]) -> list[tuple[str, str]]:
    results = (generate(pair, request.prompt, request.options) for request in requests)
    return [(result.text, result.finish_reason) for result in results]


def together(pair: Pair, requests: list[Request], batch_size: int) -> list[tuple[str, str]]:
    results = generate_many(pair, requests, requests[0].options, batch_size=batch_size)
    return [(result.text, result.finish_reason) for result in results]


def test_what_a_model_does_not_take_is_an_error_of_its_own(pair: Pair) -> None:
    good = request(1, num_draft=2)
    bad = [replace(good, prompt=[]), replace(good, prompt=[SIZE + 5])]
    banned = dict.fromkeys(range(SIZE), -float("inf"))
    bad.append(replace(good, options=replace(good.options, logit_bias=banned)))
    requests = [bad[0], good, bad[1], good, bad[2]]
    parts = [part for part in stream_many(pair, requests, good.options) if part.last]
    errors = {part.number: part.error for part in parts if part.error is not None}
    assert sorted(errors) == [0, 2, 4]
    assert "empty" in errors[0]
    assert "not among the model's" in errors[2]
    assert "bans every token" in errors[4]
    [expected] = alone(pair, [good])
    texts = [(p.result.text, p.result.finish_reason) for p in parts if p.result is not None]
    assert texts == [expected] * 2
    with pytest.raises(DecodingError, match=r"prompt 0: .*empty"):
        generate_many(pair, requests, good.options)


@pytest.mark.parametrize(("rule", "num_draft"), [("coupled", 0), ("coupled", 2), ("token", 0)])
def test_damage_of_one_sequence_does_not_touch_the_others(
    monkeypatch: pytest.MonkeyPatch, rule: str, num_draft: int
) -> None:
    pair, damaged = decoder_only("llama"), SIZE - 1
    run = type(pair.target).run

    def broken(self, tokens, entries, taps=()):
        scores = run(self, tokens, entries, taps)
        seen = mx.any(tokens == damaged, axis=1)[:, None, None]
        return replace(scores, logits=mx.where(seen, mx.nan, scores.logits))

    options = {"num_draft": num_draft, "rule": rule, "temperature": 1.0, "max_tokens": 12}
    bans = {damaged: -float("inf")}
    requests = [request(seed, logit_bias=bans, **options) for seed in range(5)]
    expected = alone(pair, requests)
    requests[2] = replace(requests[2], prompt=[*requests[2].prompt, damaged])
    monkeypatch.setattr(type(pair.target), "run", broken)
    parts = [part for part in stream_many(pair, requests, requests[0].options) if part.last]
    assert [part.number for part in parts if part.error is not None] == [2]
    for part in parts:
        if part.result is not None:
            assert (part.result.text, part.result.finish_reason) == expected[part.number]


@pytest.mark.parametrize("family", ["gemma3_wrapped", "mamba2", "qwen3_next"])
def test_windows_and_recurrent_states_share_passes(family: str) -> None:
    pair = decoder_only(family)
    requests = [request(seed, num_draft=2, temperature=0.8) for seed in range(6)]
    run = stream_many(pair, requests, requests[0].options, batch_size=4)
    assert run.why_not is None and run.batch_size == 4
    texts = {p.number: (p.result.text, p.result.finish_reason) for p in run if p.result}
    assert [texts[number] for number in range(6)] == alone(pair, requests)


@pytest.mark.parametrize("family", ["llama4", "recurrent_gemma"])
def test_other_models_are_decoded_in_turns(family: str) -> None:
    pair = decoder_only(family)
    requests = [request(seed, num_draft=2, temperature=0.8) for seed in range(4)]
    run = stream_many(pair, requests, requests[0].options, batch_size=4)
    reason = {
        "llama4": "its caches of type ChunkedKVCache hold one sequence",
        "recurrent_gemma": "the recurrent state of an empty sequence is not zero",
    }[family]
    assert run.why_not == f"target cannot take several sequences in one pass: {reason}"
    assert run.batch_size == 1
    texts = {p.number: (p.result.text, p.result.finish_reason) for p in run if p.result}
    assert [texts[number] for number in range(4)] == alone(pair, requests)


@pytest.mark.parametrize("num_draft", [0, 2])
def test_no_more_go_through_a_pass_than_were_requested(
    pair: Pair, num_draft: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen, step = [], Decoding.step

    def counted(self: Decoding) -> tuple[Step, ...]:
        emissions = step(self)
        seen.append(len(self.sequences))
        return emissions

    monkeypatch.setattr(Decoding, "step", counted)
    requests = [request(seed, num_draft=num_draft) for seed in range(12)]
    generate_many(pair, requests, requests[0].options, batch_size=5)
    assert max(seen) == 5


def test_figures_of_a_text_are_its_own(pair: Pair) -> None:
    requests = [request(seed, num_draft=3, proposer="draft", temperature=0.8) for seed in range(6)]
    for result, sent in zip(
        generate_many(pair, requests, requests[0].options, batch_size=4), requests, strict=True
    ):
        assert sum(result.stats.drafted_by_position) == result.stats.drafted
        assert result.stats.accepted + result.stats.rounds >= len(result.tokens)
        assert result.labels.prompt_tokens == len(sent.prompt)
        assert result.labels.seed == sent.options.seed


def live(pair: Pair, options: Options, batch_size: int = 4) -> Scheduler:
    """A run whose prompts come one by one."""
    return Scheduler(pair, None, options, BatchSize(batch_size))


def finish(run: Scheduler, texts: dict[int, tuple[str, str]]) -> None:
    while not run.idle:
        for part in run.step():
            assert part.error is None
            if part.result is not None:
                texts[part.number] = (part.result.text, part.result.finish_reason)


@pytest.fixture(scope="module")
def short_texts(pair: Pair) -> list[tuple[str, str]]:
    """Of seven prompts, as `plain_texts`."""
    settings = {"temperature": 0.8, "max_tokens": 9, "regular": True}
    return alone(pair, [request(seed, **settings) for seed in range(7)])


@pytest.mark.parametrize(("steps", "num_draft"), [(0, 0), (1, 2), (3, 0), (3, 2), (6, 2)])
def test_a_prompt_that_is_given_up_leaves_before_the_next_step(
    pair: Pair, steps: int, num_draft: int, short_texts: list[tuple[str, str]]
) -> None:
    """While it waits, while a chunk of it was read, before it joined, and while it is decoded."""
    settings = {"num_draft": num_draft, "proposer": "draft", "temperature": 0.8}
    settings["prefill_step_size"] = 7
    requests = [request(seed, max_tokens=9, **settings) for seed in range(7)]
    for given_up in ({0, 2}, {0, 1, 2, 3, 6}):
        run, texts = live(pair, requests[0].options), {}
        for number, prompt in enumerate(requests):
            run.add(number, prompt)
        heard: list[int] = []
        for _ in range(steps):
            for part in run.step():
                heard.append(part.number)
                if part.result is not None:
                    texts[part.number] = (part.result.text, part.result.finish_reason)
        for number in given_up:
            run.cancel(number)
        finish(run, after := {})
        assert not given_up & after.keys()
        assert texts | after == {
            number: text
            for number, text in enumerate(short_texts)
            if number in texts or number not in given_up
        }


def test_drafts_are_for_those_that_allow_them(pair: Pair) -> None:
    """Each in one batch with the others, and its text is the same."""
    changes: list[dict] = [{"regular": True}, {"num_draft": 1}, {}, {"proposer": "none"}]
    settings = {"num_draft": 3, "proposer": "draft", "temperature": 0.8, "max_tokens": 20}
    requests = [request(seed, **{**settings, **changes[seed % 4]}) for seed in range(8)]
    options = request(0, **settings).options
    results = generate_many(pair, requests, options, batch_size=8)
    assert [(one.text, one.finish_reason) for one in results] == alone(pair, requests)
    drafted = [result.stats.drafted_by_position for result in results]
    assert all(len(counts) <= 1 for counts in (*drafted[1::4],))
    assert all(len(counts) == 3 for counts in drafted[2::4])
    for seed in (0, 3, 4, 7):
        # What fills up the rectangle is the padding token, which is hardly ever right.
        assert results[seed].stats.drafted == results[seed].stats.accepted <= 2
        assert results[seed].labels.proposer == "none"


@pytest.mark.parametrize(
    ("batch_size", "options", "message"),
    [
        (0, Options(), "batch-size must be 1 or more, not 0"),
        ("4", Options(), "batch-size must be a whole number, not '4'"),
        (1.5, Options(), "batch-size must be a whole number, not 1.5"),
    ],
)
def test_what_cannot_be_is_refused(
    pair: Pair, batch_size: int, options: Options, message: str
) -> None:
    with pytest.raises(OptionError, match=message):
        stream_many(pair, [], options, batch_size=batch_size)


@pytest.mark.parametrize(
    ("settings", "part"),
    [
        ({"system_prompt": "be brief"}, "this model has none"),
        ({"chat_template_config": {"a": 1}}, "this model has none"),
        ({"chat_template_config": {"tokenize": False}}, "may not set tokenize"),
        ({"extra_eos_token": "<|none|>"}, "the model has no token '<|none|>'"),
        ({"logit_bias": {10**6: 1.0}}, "there is no token 1000000"),
    ],
)
def test_what_no_prompt_could_have_is_refused_at_once(
    pair: Pair, settings: dict, part: str
) -> None:
    with pytest.raises(OptionError, match=re.escape(part)):
        stream_many(pair, iter(()), Options(**settings))


@pytest.mark.parametrize("proposer", ["draft", "auto"])
def test_batches_save_what_they_learned_by_size(pair: Pair, proposer: str) -> None:
    options = Options(max_tokens=40, num_draft="auto", proposer=proposer, temperature=0.5)
    prompts = [[number + 5, 9, 11] for number in range(6)]
    generate_many(pair, prompts, options, batch_size=4)
    memory = saved.memory(pair_key(pair))
    draft = source(next(one for one in drafters(pair, options) if one.name == "draft"), options)
    verified, _ = memory.entries[f"acceptance {draft.text}"]
    assert memory.entries[f"costs of {draft.costs}, 4 rows, 0 doublings"] and verified[0] > 0


@pytest.mark.parametrize(
    ("rate", "most", "expected"),
    [
        (lambda size: size, 64, 64),
        (lambda size: size, 24, 16),
        (lambda size: min(size, 16), 64, 16),
        (lambda size: min(size, 4), 64, 4),
        (lambda size: 1.0, 64, 1),
        (lambda size: -abs(size - 32) + 100, 64, 32),
        (lambda size: 1 / size, 64, 1),
    ],
)
def test_the_size_of_batches_settles_where_most_tokens_come(
    rate: Callable[[int], float], most: int, expected: int
) -> None:
    size, seen = AutoBatchSize(most=most), set()
    for _ in range(12):
        seen.add(size.size)
        size.took(int(1000 * rate(size.size)), 1000.0)
    assert size.size == expected
    assert max(seen) <= most
