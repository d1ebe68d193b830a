"""Drafters of every kind load with `load(target, drafter)`, draft what they should, and change no
text, whatever their target. With a lenience of 1 every draft token is accepted and seen."""

import functools
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest

from mlx_specdec import (
    CheckpointError,
    OptionError,
    Options,
    Request,
    generate,
    generate_many,
    load,
    stream_generate,
)

from ..support import speculators, tiny
from ..support.speculators import MAKERS
from .forced import copied
from .support import numbered, quick

FIXTURES = Path(__file__).parents[1] / "fixtures"
CASES = [(kind, "llama") for kind in MAKERS]
CASES += [("mtp", "gemma3_wrapped"), ("eagle3", "gemma3_wrapped"), ("peagle", "qwen3_next")]
CASES += [("dspark", "qwen3_next"), ("dflash2", "falcon_h1"), ("eagle", "falcon_h1")]
"""Each kind of drafter on a plain target, and some on targets with windows and recurrent states."""
QUICK = (*((kind, "llama") for kind in ("eagle", "eagle3", "dspark")), ("mtp", "gemma3_wrapped"))
PROMPT = [5, 9, 12, 7, 33, 21, 8]
Made = Callable[..., Any]
"""Returns a pair of a drafter of a kind and a target of a family."""


def target_of(name: str, directory: Path) -> Path:
    return numbered(tiny.write(name, directory), tiny.VOCABULARY)


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Made:
    """Each pair is loaded once, since no test changes it."""

    @functools.cache
    def make(kind: str, target: str = "llama") -> Any:
        home = tmp_path_factory.mktemp(kind)
        return load(target_of(target, home / target), MAKERS[kind](home / kind))

    return make


def options(**settings: Any) -> Options:
    """Texts that do not end, with draft lengths that do not depend on the machine."""
    usual = {"max_tokens": 12, "num_draft": 3, "logit_bias": {1: -1e9, 2: -1e9}}
    return Options(**(usual | {"cost_cache": False} | settings))


@pytest.mark.parametrize("names", quick(CASES, *QUICK), ids="-".join)
def test_a_drafter_reads_a_completion_as_it_reads_a_prompt(
    names: tuple[str, str], made: Made
) -> None:
    """Round after round it drafts what it drafts after a prompt of the same tokens, however many
    of these a pass reads."""
    kind, pair, seen = names[0], made(*names), list(PROMPT)
    lenient, drafted = options(proposer=kind, delta=1.0), 0
    for step in stream_generate(pair, PROMPT, lenient):
        length = len(step.tokens)
        for size in (2, None):
            how = options(proposer=kind, delta=1.0, max_tokens=length, prefill_step_size=size)
            assert generate(pair, seen, how).tokens == step.tokens
        seen += step.tokens
        drafted += step.accepted
    assert drafted == 8 + 1


@pytest.mark.parametrize("names", quick(CASES, *QUICK), ids="-".join)
def test_a_batch_drafts_what_each_row_drafts_alone(names: tuple[str, str], made: Made) -> None:
    """Prompts have different lengths, and rows join while others are decoded."""
    kind, pair = names[0], made(*names)
    prompts = [PROMPT * count + PROMPT[:more] for count, more in ((0, 3), (3, 0), (1, 2), (0, 2))]
    requests = [
        Request(prompt, options(proposer=kind, delta=1.0, max_tokens=11 + 4 * number))
        for number, prompt in enumerate(prompts)
    ]
    alone = [generate(pair, request.prompt, request.options) for request in requests]
    assert all(result.stats.accepted == result.stats.drafted > 6 for result in alone)
    results = generate_many(pair, requests, requests[0].options, batch_size=3)
    assert [result.tokens for result in results] == [result.tokens for result in alone]


def test_a_long_prompt_is_read_in_chunks_as_at_once(made: Made) -> None:
    prompt = [2 + 7 * index % 60 for index in range(199)]
    for kind in MAKERS:
        pair = made(kind)
        drafts = {
            generate(pair, prompt, options(prefill_step_size=size, delta=1.0, max_tokens=8)).tokens
            for size in (23, 73, 512)
        }
        assert len(drafts) == 1, kind


def test_a_drafter_that_is_always_right_saves_passes(made: Made, tmp_path: Path) -> None:
    # It has to know the one token that is possible.
    knowing: dict[str, Any] = {
        "eagle3": {"drafted": None},
        "peagle": {"drafted": None},
        "dflash2": {"nested": {"selector_top_k": tiny.VOCABULARY}},
    }
    target = target_of("llama", tmp_path / "target")
    for kind in MAKERS:
        pair = made(kind)
        if kind in knowing:
            pair = load(target, MAKERS[kind](tmp_path / kind, **knowing[kind]))
        stats = generate(pair, PROMPT, options(max_tokens=22, logit_bias={9: 1000.0})).stats
        assert stats.acceptance_rate == 1.0
        assert stats.tokens_per_round > 3


LACKING = r"or another drafter was named|no such drafter"


def test_a_kind_that_the_pair_lacks_is_refused(made: Made, tmp_path: Path) -> None:
    plain = load(target_of("llama", tmp_path / "plain"))
    for kind, other in zip(MAKERS, reversed(MAKERS), strict=True):
        with pytest.raises(OptionError, match=LACKING):
            generate(plain, PROMPT, Options(proposer=kind))
        if kind != other:
            with pytest.raises(OptionError, match=LACKING):
                generate(made(kind), PROMPT, Options(proposer=other))


def test_medusa_heads_and_a_drafter_share_a_target(tmp_path: Path) -> None:
    target = target_of("llama", tmp_path / "target")
    heads = tmp_path / "heads"
    heads.mkdir()
    config = {"medusa_num_heads": 2, "medusa_num_layers": 1, "base_model_name_or_path": "../target"}
    (heads / "config.json").write_text(json.dumps(config))
    parts = speculators.random({f"{n}.0.linear.weight": (32, 32) for n in range(2)})
    parts |= {f"{n}.0.linear.bias": mx.zeros((32,)) for n in range(2)}
    mx.save_safetensors(str(heads / "medusa_lm_head.safetensors"), parts)
    pair = load(heads, speculators.dflash(tmp_path / "dflash"))
    plain = generate(load(target), PROMPT, options(regular=True))
    for proposer in ("medusa", "dflash"):
        result = generate(pair, PROMPT, options(proposer=proposer))
        assert (result.tokens, result.labels.proposer) == (plain.tokens, proposer)
        assert result.stats.drafted > 0
    with pytest.raises(CheckpointError, match="hidden states of width 48"):
        load(heads, speculators.eagle3(tmp_path / "wrong", width=48))


@pytest.mark.parametrize("name", ["dense", "ordered"])
def test_gemmas_assistant_drafts_what_transformers_drafts(name: str, tmp_path: Path) -> None:
    source = FIXTURES / "gemma4_assistant" / name
    reference = mx.load(str(source / "reference.st"), format="safetensors")
    pair = load(copied(source / "target", tmp_path), source / "assistant", dtype="float32")
    tokens, lengths = reference["tokens"].tolist(), reference["lengths"].tolist()
    for length, expected in zip(lengths, reference["drafted"].tolist(), strict=True):
        how = Options(max_tokens=len(expected) + 1, num_draft=len(expected), delta=1.0)
        drafted = generate(pair, tokens[:length], how).tokens[:-1]
        assert list(drafted) == expected
    plain = generate(pair, PROMPT, options(regular=True, temperature=1.0))
    result = generate(pair, PROMPT, options(temperature=1.0))
    assert result.tokens == plain.tokens and result.labels.proposer == "gemma4_assistant"
    assert result.stats.drafted > result.stats.accepted


@pytest.mark.parametrize("name", ["llama-own", "llama-own-archive", "llama-shared"])
def test_medusa_heads_draft_what_torch_drafts(name: str, tmp_path: Path) -> None:
    with np.load(FIXTURES / "medusa" / name / "expected.npz") as expected:
        tokens, drafted = expected["tokens"].tolist(), expected["logits"].argmax(-1).tolist()
    base = copied(FIXTURES / "torch" / "llama", tmp_path / "base")
    heads = copied(FIXTURES / "medusa" / name, tmp_path / name, base_model_name_or_path=str(base))
    how = options(max_tokens=4, delta=1.0, logit_bias={})
    assert list(generate(load(heads, dtype="float32"), [*tokens, 5], how).tokens[:3]) == drafted
