"""The check of a conversion: every tensor, log-probabilities, and a fixed text."""

import json
import math
import re
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest

from mlx_specdec.checkpoints import writer
from mlx_specdec.conversion import convert as conversion
from mlx_specdec.conversion import verify
from mlx_specdec.conversion.convert import convert
from mlx_specdec.conversion.verify import LONGEST_SCORED, PAIRS, PASSAGE, TextChange, Verified
from mlx_specdec.errors import CheckpointError, OutputError
from mlx_specdec.models.loading import load_model
from mlx_specdec.text.tokenizer import load_tokenizer

from ..support.checkpoints import T5, listing, t5_weights, write_t5
from ..support.models import make_llama, make_t5
from ..support.shipped import ROOT

LINEAR = "encoder.block.1.layer.0.SelfAttention.q"
SMALL: dict[str, Any] = {"quantize": 4, "q_group_size": 32}


@pytest.mark.parametrize("value", [0.5, float("nan")])
def test_other_logits_from_the_same_weights_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, value: float
) -> None:
    source = write_t5(tmp_path / "t5")
    before = listing(tmp_path)
    rows = iter((0.0, value))
    none = (mx.array([]), mx.array([]))
    answers = lambda *_: (mx.array([next(rows)]), none, "")  # noqa: E731
    monkeypatch.setattr(verify, "_answers", answers)
    with pytest.raises(CheckpointError, match="log-probabilities differ"):
        convert(str(source), tmp_path / "out")
    assert listing(tmp_path) == before


def test_logits_are_left_out_where_they_would_take_longer_than_the_conversion(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = str(write_t5(tmp_path / "t5"))
    needed = 6 * sum(array.size for array in t5_weights(T5).values())
    monkeypatch.setattr(verify, "QUICK_BYTES", needed - 1)
    report = convert(source, tmp_path / "a")
    assert report.verified.logits is None
    assert "longer than the conversion" in report.describe()
    assert convert(source, tmp_path / "c", **SMALL).verified.logits is not None
    monkeypatch.setattr(verify, "QUICK_BYTES", needed)
    assert convert(source, tmp_path / "d").verified.logits == 0.0
    monkeypatch.setattr("mlx_specdec.system.memory", lambda: 3 * needed)
    assert "too much memory" in convert(source, tmp_path / "e", **SMALL).verified.note


@pytest.mark.parametrize("options", [{}, SMALL])
@pytest.mark.parametrize("name", [f"{LINEAR}.weight", "encoder.final_layer_norm.weight"])
def test_a_byte_that_arrives_wrong_is_found_by_the_check(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, options: dict[str, Any], name: str
) -> None:
    source = write_t5(tmp_path / "t5")
    real = writer.write_file

    def spoil(file: Path, *rest: Any) -> None:
        real(file, *rest)
        content = bytearray(file.read_bytes())
        length = int.from_bytes(content[:8], "little")
        begin = json.loads(content[8 : 8 + length])[name]["data_offsets"][0]
        content[8 + length + begin + 3] ^= 0x70
        file.write_bytes(bytes(content))

    monkeypatch.setattr(writer, "write_file", spoil)
    with pytest.raises(OutputError, match=re.escape(name)):
        convert(str(source), tmp_path / "out", **options)
    assert [path.name for path in tmp_path.iterdir()] == ["t5"]


@pytest.mark.parametrize(
    ("same", "settings", "advice"),
    [
        (0.6, {}, "likeliest token changed at 40% .*: take --q-bits 5, or leave --quantize out"),
        (0.6, {"quantize": "mxfp4"}, "take --q-bits 5 in place of the mode or predicate, or leave"),
        (0.6, {"quantize": 8}, "40% of the positions: leave --quantize out"),
        (0.95, {}, ""),
    ],
)
def test_a_poor_result_is_called_one(
    same: float,
    settings: dict[str, Any],
    advice: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    text = TextChange(100, 20.0, 30.0, 0.5, 2.0, same)
    monkeypatch.setattr(conversion, "compare", lambda *_: Verified(1.0, text, ""))
    source = ROOT / "tests" / "fixtures" / "gguf" / "llama-f32.gguf"
    report = convert(str(source), tmp_path / "out", **{**SMALL, **settings})
    assert ("this conversion loses a lot" in report.describe()) == bool(advice)
    assert re.search(advice, report.verdict)


# Scores of the fixed text


@pytest.fixture(scope="module")
def t5(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_t5(tmp_path_factory.mktemp("t5"))


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_llama(tmp_path_factory.mktemp("llama"))


def token_by_token(directory: Path) -> list[float]:
    """Log p of every token of the text, one pass a token."""
    loaded = load_model(directory, dtype="float32")
    tokenizer = load_tokenizer(directory, kind=loaded.model.kind)
    if loaded.model.kind == "encoder-decoder":
        texts = [(tokenizer.encode(prompt), tokenizer.encode(text)) for prompt, text in PAIRS]
    else:
        ids = tokenizer.encode(PASSAGE)
        texts = [(ids[:1], ids[1:])]
    found = []
    for prompt, text in texts:
        context, last = loaded.model.open_batch([prompt]), loaded.model.prefix(prompt)[-1]
        room = min(LONGEST_SCORED, (loaded.model.max_length or 10**9) - 1)
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
    found = convert(str(source), tmp_path / "q", quantize=3, q_group_size=32).verified.text
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
        report = convert(str(t5), out, quantize=bits, q_group_size=32)
        assert report.verified.text is not None
        means.append(report.verified.text.mean)
        result = json.loads((out / "provenance.json").read_text())["result"]["fixed_text"]
        assert result["mean"] == report.verified.text.mean
        assert "perplexity" in report.describe()
    assert means == sorted(means) and means[0] < means[2]
