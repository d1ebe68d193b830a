"""T5, mT5, UMT5, BART, mBART, Marian, M2M100, Pegasus, T5Gemma 2 and MADLAD compute what
transformers computes, in one pass and token by token, in batches, and with drafts.

The fixtures are tiny models with every switch and every trap among them. T5's have sources and
targets of 150 positions, so that the far buckets of the relative positions are used."""

import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest

from mlx_specdec import Options, PromptError, Request, convert, generate, generate_many, load

from .forced import copied, log_p, unused
from .support import moved, quick

FIXTURES = Path(__file__).parents[1] / "fixtures"
CLOSE = 1e-4
"""Largest difference of a log-probability."""


def fixtures(group: str) -> list[str]:
    return sorted(f"{group}/{path.name}" for path in (FIXTURES / group).iterdir())


T5, FAMILIES, BART, GEMMA = map(fixtures, ("t5", "t5-families", "bart", "t5gemma2"))
PADDING = {"bart/marian": 55, "bart/marian-two-vocabularies": 55}
"""Tokens that are never written, and would be likely."""


def arrays(name: str) -> dict[str, Any]:
    """The arrays of a fixture, integers as lists."""
    with np.load(FIXTURES / name / "expected.npz") as file:
        return {key: a if a.dtype.kind == "f" else a.tolist() for key, a in file.items()}


def normalized(logits: np.ndarray) -> np.ndarray:
    largest = logits.max(-1, keepdims=True)
    return logits - largest - np.log(np.exp(logits - largest).sum(-1, keepdims=True))


def beginning(name: str) -> int:
    """The number of tokens before a text: the start, and what is forced after it."""
    file = FIXTURES / name / "generation_config.json"
    settings = json.loads(file.read_text()) if file.is_file() else {}
    return 1 + (settings.get("forced_bos_token_id") is not None)


def references(name: str) -> list[tuple[list[int], list[int], np.ndarray]]:
    """Return sources, texts with their beginning, and log-probabilities after each token."""
    if name in GEMMA:
        logits = mx.load(str(FIXTURES / name / "logits.st"), format="safetensors")
        rows = enumerate(lines(name)[20::21])
        return [(s, [2, *t[:-1]], normalized(np.array(logits[str(n)]))) for n, (s, t) in rows]
    expected = arrays(name)
    if name in BART:
        rows = expected["logits"].copy()
        rows[:, PADDING.get(name, rows.shape[1]) :] = -np.inf
        return [(expected["source"], expected["fed"], normalized(rows))]
    rows = np.full((len(expected["target"]), expected["log_p"].shape[1]), np.nan)
    first = min(40, len(expected["log_p"]))
    rows[:first], rows[-first:] = expected["log_p"][:first], expected["log_p"][-first:]
    return [(expected["source"], expected["target"], rows)]


def lines(name: str) -> list[tuple[list[int], list[int]]]:
    """Sources, and what transformers writes to them, ends of texts among it."""
    if name in BART:
        expected, start = arrays(name), beginning(name) - 1
        sources = [[id for id in source if id >= 0] for source in expected["sources"]]
        return list(zip(sources, [text[start:] for text in expected["tokens"]], strict=True))
    texts = map(json.loads, (FIXTURES / name / "texts.jsonl").read_text().splitlines())
    return [(line["source"], line["text"]) for line in texts]


def differs(source: Path, directory: Path, name: str, *ways: dict[str, Any]) -> float:
    """Return the largest difference of a log-probability between a model and a fixture."""
    largest, start, given = 0.0, beginning(name), references(name)
    eos = unused([id for _, fed, _ in given for id in fed], given[0][2].shape[1])
    pair = load(copied(source, directory, eos=eos), dtype="float32")
    for prompt, fed, expected in given:
        for how in ways:
            rows, wanted = log_p(pair, prompt, fed[start:], **how), expected[start - 1 :]
            assert np.array_equal(np.isneginf(rows), np.isneginf(wanted))
            finite = np.isfinite(rows)
            largest = max(largest, float(np.nanmax(np.abs(rows[finite] - wanted[finite]))))
    return largest


SOME = ("t5/own-head-scaled", "t5-families/byt5", "t5-families/umt5", "bart/bart", "bart/m2m100")
SOME += ("bart/marian-two-vocabularies", "t5gemma2/grouped", "t5gemma2/old", "madlad")
"""One of each kind of layer, position, embedding and head."""


@pytest.mark.parametrize("name", quick([*T5, *FAMILIES, *BART, *GEMMA], *SOME))
def test_log_probabilities_are_those_of_transformers(name: str, tmp_path: Path) -> None:
    """In passes of many tokens, and most of them also token by token."""
    ways = [{"num_draft": 40}, {}][: 1 if name in (*T5[1:], GEMMA[1]) else 2]
    assert differs(FIXTURES / name, tmp_path / "model", name, *ways) < CLOSE


@pytest.mark.parametrize("name", [name for name in SOME if name in (*T5, *BART, *GEMMA)])
def test_exact_completions_have_the_same_tokens(name: str, tmp_path: Path) -> None:
    """Of a source so short that the rows of its encoder might be taken for those of a decoder."""
    source, options = references(name)[0][0][:20], Options(max_tokens=12, cost_cache=False)
    pair = load(copied(FIXTURES / name, tmp_path / "model"), dtype="float32")
    plain, exact = (generate(pair, source, replace(options, exact=way)) for way in (False, True))
    assert exact.tokens == plain.tokens


@pytest.mark.parametrize(
    ("name", "changes"),
    [
        ("bart/marian", {"pad_token_id": None}),
        ("bart/bart", {"eos_token_id": [2], "pad_token_id": -1}),
        ("t5/tied-unscaled", {"pad_token_id": -1, "decoder_start_token_id": 0, "n_positions": 0}),
    ],
)
def test_unusual_entries_change_nothing(name: str, changes: dict[str, Any], tmp_path: Path) -> None:
    source, options = references(name)[0][0], Options(max_tokens=6, cost_cache=False)
    model = copied(FIXTURES / name, tmp_path / "model")
    before = generate(load(model), source, options).tokens
    config = model / "config.json"
    config.write_text(json.dumps({**json.loads(config.read_text()), **changes}))
    assert generate(load(model), source, options).tokens == before


@pytest.mark.parametrize("name", quick([*BART, *GEMMA, "madlad"], *SOME))
def test_texts_are_those_of_transformers_in_batches_and_with_drafts(
    name: str, tmp_path: Path
) -> None:
    """Every eighth of 64 sources."""
    target = copied(FIXTURES / name, tmp_path / "target")
    pair = load(target, moved(target, tmp_path / "draft", 0.02), dtype="float32")
    sources, texts = zip(*lines(name)[::8], strict=True)
    ways = {"regular": True}, {"proposer": "draft"}, {"proposer": "ngram", "ngram_min": 1}
    requests = [
        Request(source, Options(max_tokens=len(text), num_draft=3, **how), ignore_eos=True)
        for number, (source, text) in enumerate(zip(sources, texts, strict=True))
        for how in ways[number % 3 :][:1]
    ]
    results = generate_many(pair, requests, requests[0].options, batch_size=16)
    assert [list(result.tokens) for result in results] == list(texts)
    assert sum(result.stats.accepted for result in results) > 0


@pytest.mark.parametrize("name", quick(BART, "bart/bart", "bart/m2m100"))
def test_positions_are_bounded(name: str, tmp_path: Path) -> None:
    """64 in all fixtures, for the source and for the text; also beside a shorter text."""
    pair = load(copied(FIXTURES / name, tmp_path))
    with pytest.raises(PromptError, match="takes 64: shorten it"):
        generate(pair, [5] * 65, Options())
    requests = [
        Request([5] * 64, Options(max_tokens=900, **how), ignore_eos=True)
        for how in ({"regular": True}, {"proposer": "ngram", "num_draft": 5})
    ]
    long = [generate_many(pair, [request])[0] for request in requests]
    assert {result.finish_reason for result in long} == {"length"}
    assert {len(result.tokens) for result in long} == {64 - beginning(name)}
    first = Request([6, 2], Options(max_tokens=7, proposer="ngram", num_draft=5), ignore_eos=True)
    batch = generate_many(pair, [first, requests[1], requests[1]], first.options, batch_size=2)
    assert [each.tokens for each in batch[1:]] == [long[0].tokens] * 2


def test_a_source_has_its_own_vocabulary(tmp_path: Path) -> None:
    pair = load(copied(FIXTURES / "bart/marian-two-vocabularies", tmp_path))
    for rule in ("coupled", "token", "block"):
        how: dict[str, Any] = {"temperature": 1.0, "rule": rule, "max_tokens": 20}
        plain = generate(pair, [63, 60, 57, 0], Options(regular=True, **how))
        drafted = generate(pair, [63, 60, 57, 0] * 4, Options(proposer="ngram", num_draft=3, **how))
        assert all(0 <= id < 55 for id in (*plain.tokens, *drafted.tokens))
    with pytest.raises(PromptError, match="not among the model's 64"):
        generate(pair, [64], Options())


@pytest.mark.parametrize(("family", "eos"), [("byt5", 1), ("codet5", 2)])
def test_text_goes_through_the_familys_own_tokenizer(family: str, eos: int, tmp_path: Path) -> None:
    source = with_tokenizer(family, tmp_path / "source")
    convert(str(source), tmp_path / "out")
    options = Options(max_tokens=12, num_draft=3, seed=3, temperature=1.0)
    texts = set()
    for directory in (source, tmp_path / "out"):
        pair = load(directory, directory)
        assert pair.eos_token_ids == {eos}
        assert pair.vocabulary == json.loads((source / "config.json").read_text())["vocab_size"]
        texts.add(generate(pair, "def f(x):", options).text)
    assert len(texts) == 1


def with_tokenizer(family: str, place: Path) -> Path:
    """Return the family's checkpoint with its own tokenizer."""
    shutil.copytree(FIXTURES / "t5-families" / family, place)
    return shutil.copytree(FIXTURES / "t5-text" / family, place, dirs_exist_ok=True)


def test_ids_that_only_pad_the_models_vocabulary_are_never_chosen(tmp_path: Path) -> None:
    source, out = with_tokenizer("codet5", tmp_path / "source"), tmp_path / "out"
    for name in ("added_tokens.json", "special_tokens_map.json", "tokenizer_config.json"):
        (source / name).unlink()
    convert(str(source), out)
    options, prompt, padding = Options(max_tokens=1), [5, 6, 2], 332
    pair = load(out)
    assert pair.vocabulary == 330
    first = generate(pair, prompt, options).tokens[0]
    weights = mx.load(str(out / "model.safetensors"))
    shared = np.array(weights["shared.weight"])
    shared[padding] = 10 * shared[first]
    weights["shared.weight"] = mx.array(shared)
    mx.eval(weights)
    mx.save_safetensors(str(out / "model.safetensors"), weights, {"format": "mlx"})
    assert generate(load(out), prompt, options).tokens[0] == first
