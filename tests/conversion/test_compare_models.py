"""What a conversion is said to do to the fixed text is what an unhurried computation finds."""

import json
import math
from pathlib import Path

import mlx.core as mx
import pytest

from mlx_specdec.conversion.convert import convert
from mlx_specdec.conversion.verify import (
    LONGEST,
    PAIRS,
    PASSAGE,
    TextChange,
    compare_logits,
    compare_text,
)
from mlx_specdec.models.loading import load_model
from mlx_specdec.text.tokenizer import load_tokenizer

from ..support.models import make_llama, make_t5


@pytest.fixture(scope="module")
def t5(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_t5(tmp_path_factory.mktemp("t5"))


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_llama(tmp_path_factory.mktemp("llama"))


def token_by_token(directory: Path) -> list[float]:
    """Log p of every token of the text, one pass a token."""
    loaded = load_model(directory, dtype="float32")
    tokenizer = load_tokenizer(directory, kind=loaded.kind)
    if loaded.kind == "encoder-decoder":
        texts = [(tokenizer.encode(prompt), tokenizer.encode(text)) for prompt, text in PAIRS]
    else:
        ids = tokenizer.encode(PASSAGE)
        texts = [(ids[:1], ids[1:])]
    found = []
    for prompt, text in texts:
        context, last = loaded.model.open(prompt), loaded.model.prefix(prompt)[-1]
        room = min(LONGEST, (loaded.model.max_length or 10**9) - 1)
        for token in text[:room]:
            row = context.advance(mx.array([[last]])).logits[0, -1]
            found.append((row[token] - mx.logsumexp(row)).item())
            last = token
    return found


@pytest.mark.slow
@pytest.mark.parametrize("family", ["t5", "llama"])
def test_perplexity_and_change_are_those_of_single_steps(
    family: str, request: pytest.FixtureRequest, tmp_path: Path
) -> None:
    source = request.getfixturevalue(family)
    convert(str(source), tmp_path / "q", quantize=True, q_bits=3, q_group_size=32)
    found = compare_text(source, tmp_path / "q")
    assert isinstance(found, TextChange)
    first, second = token_by_token(source), token_by_token(tmp_path / "q")
    assert found.tokens == len(first) == len(second) > 100
    assert found.source_perplexity == pytest.approx(math.exp(-sum(first) / len(first)), rel=1e-4)
    assert found.result_perplexity == pytest.approx(math.exp(-sum(second) / len(first)), rel=1e-4)
    changes = [abs(one - two) for one, two in zip(first, second, strict=True)]
    assert found.largest == pytest.approx(max(changes), abs=1e-4)
    assert found.mean == pytest.approx(sum(changes) / len(changes), abs=1e-4)
    assert 0 < found.mean < found.largest and 0 <= found.same_first <= 1


def test_fewer_bits_change_more(t5: Path, tmp_path: Path) -> None:
    means = []
    for bits in (8, 4, 2):
        out = tmp_path / str(bits)
        report = convert(
            str(t5),
            out,
            quantize=True,
            q_bits=bits,
            q_group_size=32,
            compare_logits=compare_logits,
            compare_text=compare_text,
        )
        assert report.verified.text is not None
        means.append(report.verified.text.mean)
        result = json.loads((out / "provenance.json").read_text())["result"]["fixed_text"]
        assert result["mean"] == report.verified.text.mean
        assert "perplexity" in report.describe()
    assert means == sorted(means) and means[0] < means[2]
