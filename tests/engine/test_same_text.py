"""The promise: whoever drafts, a request gets the text that plain decoding writes for it alone.

One matrix of pairs and proposers. Each case decodes its requests alone and in a batch, with a
prompt cache; the first models do so without one, too. Sampling, constraints and ends are drawn for
each request from a seed: stop strings, end tokens and max_tokens fall inside of drafts.
"""

import functools
import math
import random
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mlx_specdec import (
    CacheSettings,
    Options,
    Request,
    Result,
    generate,
    generate_many,
    load,
    stream_generate,
)
from mlx_specdec.engine.memory import BatchSize
from mlx_specdec.engine.pair import Pair
from mlx_specdec.engine.prompt_cache import PromptCache
from mlx_specdec.engine.scheduler import Scheduler
from mlx_specdec.errors import DecodingError
from mlx_specdec.interfaces.records import Step
from mlx_specdec.models.encoder_decoder.context import EncoderDecoderModel
from mlx_specdec.models.mlx_lm.model import DecoderOnlyModel
from mlx_specdec.models.number_format import twin_of

from ..support import drafter_pairs, heads, mtp, pairs, tiny
from ..support.letters import CASES, END, OTHER_END, PIECES, SIZE, Letters, bound
from ..support.pairs import (
    BART,
    FIXTURES,
    Switching,
    encoder_decoder,
    pair_of,
    perturbed,
    translator,
    with_heads,
)
from ..support.shipped import ROOT, equal_rows, prompts
from ..support.tokenizers import byte_level

TRANSLATOR = "own-head-scaled"
T5GEMMA = "../t5gemma2/grouped"
MARIAN = "marian-two-vocabularies"
BARTS = sorted(path.name for path in BART.iterdir())
ROOM = 1 << 24
SYSTEM = [11, 23, 5, 9, 31, 7, 8, 19, 33, 4]
CONSTRAINTS: list[dict[str, Any]] = [
    *[{}] * 5,
    *CASES.values(),
    {"regex": "ab(ab|c)?"},
    {"regex": "[abc]{4,9}z"},
    {"regex": "abc: (1|2) [ab]{3}z"},
]
"""The last two need a token that the model lacks, and the one before them soon leaves none."""
ENDLESS = {END: -math.inf}
Outcome = tuple[tuple[int, ...], str, str] | str
"""Tokens, text and finish reason, or the error."""


@dataclass(frozen=True)
class Row:
    """One row of the matrix. make: the pair, which may write into a directory. requests: in each
    case. free: none of them is constrained. prompts: a file in prompts/, for shipped models."""

    make: Callable[[Path], Pair]
    proposers: tuple[str, ...] = ("draft",)
    requests: int = 3
    free: bool = False
    prompts: str | None = None


def lettered(pair: Pair) -> Pair:
    """The pair with a tokenizer whose texts a grammar can bind."""
    return replace(pair, tokenizer=Letters(), eos_token_ids=frozenset({END}))


def decoder(name: str, caches: CacheSettings | None = None, **changes: Any) -> Row:
    """A tiny model and the same with its weights moved a little."""

    def make(path: Path) -> Pair:
        draft = perturbed(tiny.build(name, **changes), 0.3)
        target = DecoderOnlyModel(tiny.build(name, **changes), caches=caches)
        return lettered(pair_of(target, DecoderOnlyModel(draft, caches=caches)))

    return Row(make)


def by_another(target: str, draft: str, **changes: Any) -> Row:
    """A draft of another architecture or vocabulary."""

    def make(path: Path) -> Pair:
        network = DecoderOnlyModel(tiny.build(draft, **changes))
        return lettered(pair_of(DecoderOnlyModel(tiny.build(target)), network))

    return Row(make)


def with_shared_encoder(kind: str) -> Row:
    """A translator and a draft that uses its encoder."""

    def make(path: Path) -> Pair:
        target = translator(kind)
        draft = EncoderDecoderModel(twin_of(target.network))
        for layer in draft.network.layers:
            perturbed(layer, 0.1)
        draft.share_encoder(target)
        return lettered(pair_of(target, draft))

    return Row(make)


def headed(name: str, own_output: bool) -> Row:
    def make(path: Path) -> Pair:
        base = heads.base_of(name)
        return lettered(heads.pair_of(base, heads.some_heads(base, own_output)))

    return Row(make, ("medusa",))


def hidden_states(kind: str, family: str, attending: bool = False) -> Row:
    """A drafter that reads the target's hidden states. attending: to the source as well."""

    def make(path: Path) -> Pair:
        encoder = {"encoder": drafter_pairs.target_of(family).width} if attending else {}
        return lettered(drafter_pairs.made(kind, family, path, **encoder))

    return Row(make, (kind,))


def multi_token(family: str) -> Row:
    def make(path: Path) -> Pair:
        return load(byte_level(mtp.write(family, path / family, vocabulary=400)))

    return Row(make, ("mtp",))


def shipped(model: str, drafter: str | None, proposer: str, file: str) -> Row:
    """Models in weights/, with prompts of theirs. drafter: None where the model names its base."""
    names = [ROOT / "weights" / name for name in (model, drafter) if name is not None]
    return Row(lambda path: load(*names), (proposer,), 2, free=True, prompts=file)


MAIN = ("draft", "ngram", "medusa", "auto")
MANY = 8
"""Requests of the rows that stand for most models."""
ROWS: dict[str, Row] = {
    "llama": Row(lambda path: with_heads(bound("llama")), MAIN, MANY),
    TRANSLATOR: Row(lambda path: with_heads(bound(TRANSLATOR)), MAIN, MANY),
    **{
        name: replace(decoder(name), proposers=("draft", "ngram", "auto"))
        for name in ("gemma3_wrapped", "mamba2")
    },
    **{
        name: decoder(name)
        for name in (
            *("llama_sliding", "gpt_oss", "qwen3_next", "falcon_h1", "recurrent_gemma", "llama4"),
            *("lfm2", "gemma3"),
        )
    },
    **{
        kind: Row(lambda path, kind=kind: lettered(encoder_decoder(kind, 0.1)))
        for kind in sorted({path.name for path in FIXTURES.iterdir()} - {TRANSLATOR})
    },
    T5GEMMA: Row(lambda path: with_heads(bound(T5GEMMA)), MAIN),
    "../t5gemma2/old": Row(lambda path: bound("../t5gemma2/old")),
    **{
        kind: Row(
            lambda path, kind=kind: with_heads(lettered(encoder_decoder(kind, 0.1))),
            ("draft", "ngram", "medusa") if kind in ("bart", MARIAN, "m2m100") else ("draft",),
        )
        for kind in BARTS
    },
    **{
        f"{kind}, shared encoder": with_shared_encoder(kind)
        for kind in (TRANSLATOR, "bart", "m2m100")
    },
    "llama, 2 bits": decoder("llama", CacheSettings(2, 32), head_dim=32),
    "qwen3_moe, 4 bits": decoder("qwen3_moe", CacheSettings(4, 32), head_dim=32),
    "llama, newest 16": decoder("llama", CacheSettings(max_size=16)),
    "qwen3, newest 9": decoder("qwen3", CacheSettings(max_size=9)),
    "llama by mamba2": by_another("llama", "mamba2"),
    "gemma3 by mamba2": by_another("gemma3_wrapped", "mamba2", seed=4),
    "llama by fewer tokens": by_another("llama", "llama", vocab_size=40),
    **{f"{name}, heads": headed(name, True) for name in (*heads.DECODERS, TRANSLATOR)},
    **{f"{name}, tied heads": headed(name, False) for name in ("llama", *heads.TRANSLATORS)},
    **{
        f"{family}, {kind}": hidden_states(kind, family)
        for kind in drafter_pairs.MAKERS
        for family in ("llama", TRANSLATOR)
    },
    **{
        f"{family}, {kind}": hidden_states(kind, family)
        for kind in ("eagle3", "dspark", "mtp")
        for family in ("gemma3_wrapped", "qwen3_next", T5GEMMA)
    },
    **{
        f"{family}, attending {kind}": hidden_states(kind, family, attending=True)
        for family, kinds in (
            (TRANSLATOR, ("dspark", "dflash2", "dflash", "eagle3")),
            (T5GEMMA, ("dspark", "eagle3")),
            ("bart", ("dspark",)),
            ("m2m100", ("eagle3",)),
        )
        for kind in kinds
    },
    **{f"{family}, its own layer": multi_token(family) for family in mtp.CONFIGS},
    **{
        f"gemma4, {name}": Row(
            lambda path, name=name: drafter_pairs.gemma4(name), ("gemma4_assistant",), free=True
        )
        for name in ("dense", "ordered")
    },
    "py-llama, draft": shipped("py-llama", "py-llama-draft", "draft", "python.jsonl"),
    "py-llama, dspark": shipped("py-llama", "py-llama-dspark", "dspark", "python.jsonl"),
    "py-llama, heads": shipped("py-llama-medusa", None, "medusa", "python.jsonl"),
    "t5-enfr, heads": shipped("t5-enfr-medusa", None, "medusa", "translation.jsonl"),
}
FAST = {
    *(("llama", proposer) for proposer in MAIN),
    (TRANSLATOR, "auto"),
    (T5GEMMA, "auto"),
    ("m2m100", "draft"),
    (MARIAN, "ngram"),
    ("mamba2", "auto"),
    ("llama, 2 bits", "draft"),
    ("llama by fewer tokens", "draft"),
    ("llama, heads", "medusa"),
    *((f"llama, {kind}", kind) for kind in ("eagle3", "dflash")),
    (f"{TRANSLATOR}, eagle3", "eagle3"),
    ("glm4_moe, its own layer", "mtp"),
    ("gemma4, ordered", "gemma4_assistant"),
}
MATRIX = [
    pytest.param(
        name,
        proposer,
        id=f"{name}-{proposer}",
        marks=[
            *([] if (name, proposer) in FAST else [pytest.mark.slow]),
            *([] if row.prompts is None else [equal_rows]),
        ],
    )
    for name, row in ROWS.items()
    for proposer in row.proposers
]


@pytest.fixture(scope="module")
def pair_for(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Pair]:
    """The pair of a row, made once."""
    return functools.cache(lambda name: ROWS[name].make(tmp_path_factory.mktemp("pair")))


def drawn(pair: Pair, row: Row, number: int, dice: random.Random) -> Request:
    """A request whose end is likely to be inside of a draft. Odd ones begin alike, and the first
    one is free to go on."""
    prompt: str | list[int]
    if row.prompts is not None:
        prompt = dice.choice(prompts(row.prompts, 8))
    else:
        tail = [dice.randrange(3, len(PIECES)) for _ in range(dice.choice([1, 2, 9, 20]))]
        prompt = SYSTEM * (number % 2) + tail
    options = Options(
        max_tokens=dice.choice([1, 6, 7, 13, 18]) if number else 13,
        temperature=dice.choice([0.0, 0.8, 1.0]),
        seed=dice.randrange(1 << 30),
        frequency_penalty=dice.choice([0.0, 1.0]),
        repetition_penalty=dice.choice([1.0, 1.0, 1.3]),
        top_k=dice.choice([0, 9]),
        top_p=dice.choice([1.0, 0.9]),
        xtc_probability=dice.choice([0.0, 0.0, 0.5]),
        logit_bias=dice.choice([{}, ENDLESS, {END: 4.0}] if number else [ENDLESS]),
        num_draft=dice.choice([0, 1, 2, 4]),
        ngram_min=1,
        ngram_choice=dice.choice(["recent", "frequent"]),
        cost_cache=False,
        **({} if row.free or not number else dice.choice(CONSTRAINTS)),
    )
    request = Request(prompt, options)
    if not number:
        return request
    run = stream_generate(pair, prompt, replace(options, regular=True))
    text, tokens, stuck = "", 0, False
    try:
        for emission in run:
            text, tokens = text + emission.text, tokens + len(emission.tokens)
    except DecodingError:
        stuck = True
    if len(text) < 4:
        return request
    # Half of the texts that cannot go on end just there, for another reason.
    at = len(text) - 2 if stuck else dice.randrange(len(text) - 1)
    ends: list[dict[str, Any]] = [{"stop": text[at : at + 2]}, {"max_tokens": tokens}, {}]
    if not row.free:
        ends.append({"extra_eos_token": "b"})
    return replace(request, options=replace(options, **dice.choice(ends)))


def alone(pair: Pair, request: Request, cache: PromptCache | None = None, **how: Any) -> Any:
    """The result of one request, or what went wrong."""
    lengths = how.pop("draft_length", None)
    options = replace(request.options, **how)
    with pytest.MonkeyPatch.context() as patch:
        if lengths is not None:
            patch.setattr("mlx_specdec.engine.opening.make_draft_length", lambda *_: lengths)
        run = stream_generate(pair, request.prompt, options, cache=cache)
    try:
        return run.result()
    except DecodingError as problem:
        return str(problem)


def together(
    pair: Pair, requests: list[Request], cache: PromptCache | None, dice: random.Random
) -> list[Any]:
    """Requests that come one by one, some of them while others are decoded."""
    many = Scheduler(pair, None, requests[0].options, BatchSize(5), cache)
    parts: list[Step] = []
    for number, request in enumerate(requests):
        many.add(number, request)
        for _ in range(dice.choice([0, 0, 1, 4])):
            parts += many.step()
    last = {part.number: part for part in [*parts, *many] if part.last}
    return [last[number].error or last[number].result for number in range(len(requests))]


def drafted_by(proposer: str, result: Result) -> int:
    """How many tokens it drafted, the grammar's own aside."""
    if result.labels.proposer == proposer:
        return result.stats.drafted
    figures = result.stats.by_source.get(proposer)
    return figures.drafted if figures is not None else 0


def outcomes(results: list[Any]) -> list[Outcome]:
    return [
        result if isinstance(result, str) else (result.tokens, result.text, result.finish_reason)
        for result in results
    ]


@pytest.mark.parametrize(("name", "proposer"), MATRIX)
def test_a_text_is_that_of_plain_decoding_alone(
    name: str, proposer: str, pair_for: Callable[[str], Pair]
) -> None:
    row, pair, dice = ROWS[name], pair_for(name), random.Random(f"{name} {proposer}")
    requests = [drawn(pair, row, number, dice) for number in range(row.requests)]
    plain = outcomes([alone(pair, request, regular=True) for request in requests])
    drafting = [
        replace(
            request, options=replace(request.options, proposer=proposer, num_draft=1 + number % 6)
        )
        for number, request in enumerate(requests)
    ]
    cache = PromptCache(ROOM)
    results = [
        alone(
            pair, request, (None, cache)[number % 2], draft_length=(None, Switching())[number % 2]
        )
        for number, request in enumerate(drafting)
    ]
    assert outcomes(results) == plain
    # A batch of other models has both hits and misses in the cache.
    for store in (None, cache) if row.requests == MANY else (cache,):
        batch = together(pair, drafting, store, dice)
        assert outcomes(batch) == plain
        results += batch
    complete = [result for result in results if isinstance(result, Result)]
    assert sum(drafted_by(proposer, result) for result in complete) > 0
    # Few short texts may all have ended before anything was worth keeping.
    assert row.requests < MANY or sum(result.labels.cached_tokens for result in complete) > 0


RULES = [
    {"rule": "token", "temperature": 0.8},
    {"rule": "block", "temperature": 0.8},
    {"rule": "typical", "temperature": 0.8},
    {"rule": "typical", "temperature": 0.0},
    {"delta": 0.5, "temperature": 0.8},
    {"delta": 1.0, "temperature": 0.0},
]


@pytest.mark.parametrize(
    ("name", "settings"),
    [
        pytest.param(
            name,
            settings,
            id="-".join(map(str, (name, *settings.values()))),
            marks=() if (name, settings.get("rule")) == ("llama", "block") else pytest.mark.slow,
        )
        for name in ("llama", TRANSLATOR, T5GEMMA, "m2m100")
        for settings in (RULES if name in ("llama", TRANSLATOR) else RULES[1::3])
    ],
)
def test_under_other_rules_a_text_is_what_the_same_drafts_give_alone(
    name: str, settings: dict[str, Any], pair_for: Callable[[str], Pair]
) -> None:
    """Under these rules a text depends on how many tokens were drafted. A row of a batch drafts as
    many as alone, but for its end: it knows only how far the longest one may go."""
    free = replace(pair_for(name), eos_token_ids=frozenset())
    common = {"max_tokens": 16, "proposer": "draft", "cost_cache": False, **settings}
    dice = random.Random(7)
    requests = [
        Request(
            [dice.randrange(3, 40) for _ in range(1 + 3 * seed)],
            Options(seed=seed, num_draft=(4, 0, 2, 1, 3)[seed], **common),
        )
        for seed in range(5)
    ]
    expected = [generate(free, request.prompt, request.options).tokens for request in requests]
    results = generate_many(free, requests, Options(num_draft=4, **common), batch_size=5)
    assert [r.tokens[:-5] for r in results] == [tokens[:-5] for tokens in expected]
    cache = PromptCache(ROOM)
    for request, tokens in zip(requests[:3] * 2, expected[:3] * 2, strict=True):
        result = stream_generate(free, request.prompt, request.options, cache=cache).result()
        assert result.tokens == tokens


anything = given(
    family=st.sampled_from(["llama", TRANSLATOR, "gemma3_wrapped", "mamba2", "gated-silu"]),
    constraint=st.sampled_from([{}, {}, {}, *CASES.values()]),
    prompt=st.lists(st.integers(2, SIZE - 1), min_size=1, max_size=20),
    proposer=st.sampled_from([None, "auto", "draft", "ngram"]),
    num_draft=st.integers(0, 8),
    seed=st.integers(0, 1 << 40),
    temperature=st.sampled_from([0.0, 0.3, 1.0, 3.0]),
    top_k=st.sampled_from([0, 1, 5]),
    top_p=st.sampled_from([1.0, 0.9, 0.3]),
    min_p=st.sampled_from([0.0, 0.1]),
    xtc_probability=st.sampled_from([0.0, 0.5, 1.0]),
    xtc_threshold=st.sampled_from([0.02, 0.1]),
    repetition_penalty=st.sampled_from([1.0, 1.3]),
    presence_penalty=st.sampled_from([0.0, 0.5]),
    frequency_penalty=st.sampled_from([0.0, 0.3]),
    logit_bias=st.dictionaries(st.integers(0, SIZE - 1), st.floats(-5, 5), max_size=3),
    stop=st.sampled_from([(), ("b1",), ("]", "ab")]),
    extra_eos_token=st.sampled_from([(), (OTHER_END,), (5,)]),
    max_tokens=st.integers(0, 40),
)


def compare(
    family: str,
    constraint: dict[str, Any],
    prompt: list[int],
    proposer: str | None,
    num_draft: int,
    **common: Any,
) -> None:
    pair = lettered(pairs.pair_for(family))
    options = Options(cost_cache=False, **common, **constraint)
    request = Request(prompt, options)
    plain = outcomes([alone(pair, request, regular=True)])
    assert outcomes([alone(pair, request, proposer=proposer, num_draft=num_draft)]) == plain
    assert isinstance(plain[0], str) or len(plain[0][0]) <= options.max_tokens


@settings(max_examples=15, deadline=None, derandomize=True)
@anything
def test_whatever_is_requested_the_text_is_that_of_plain_decoding(**request: Any) -> None:
    compare(**request)


@pytest.mark.slow
@settings(max_examples=120, deadline=None, derandomize=True)
@anything
def test_in_hundreds_of_cases_the_text_is_that_of_plain_decoding(**request: Any) -> None:
    compare(**request)
