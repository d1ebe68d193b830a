"""The check of a conversion: every tensor, log-probabilities, and a fixed text."""

import json
import math
import re
import shutil
from dataclasses import FrozenInstanceError
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest

from mlx_specdec.checkpoints import files, writer
from mlx_specdec.checkpoints.mtp_layers import FILE
from mlx_specdec.conversion import verify
from mlx_specdec.conversion.convert import convert
from mlx_specdec.conversion.verify import (
    LONGEST_SCORED,
    PAIRS,
    PASSAGE,
    TextChange,
    compare_logits,
    compare_text,
)
from mlx_specdec.errors import CheckpointError, OutputError
from mlx_specdec.models.loading import load_model
from mlx_specdec.text.tokenizer import load_tokenizer

from ..support import mtp
from ..support.checkpoints import T5, listing, t5_weights, write_t5
from ..support.models import make_llama, make_t5
from ..support.shipped import ROOT

LINEAR = "encoder.block.1.layer.0.SelfAttention.q"


def test_logits_are_compared_before_anything_is_in_place(tmp_path: Path) -> None:
    source, out = write_t5(tmp_path / "t5"), tmp_path / "out"
    results: list[Path] = []

    def compare(first: Path, second: Path) -> float:
        assert first == source and not out.exists()
        assert files.read_config(second)["model_type"] == "t5"
        results.append(second)
        return 0.25

    report = convert(str(source), out, dtype="bfloat16", compare_logits=compare)
    assert len(results) == 1 and report.verified.logits == 0.25
    assert "0.25" in report.describe()
    assert "not compared" in convert(str(source), tmp_path / "other").describe()
    with pytest.raises(FrozenInstanceError):
        report.nbytes = 0  # type: ignore[misc]


@pytest.mark.parametrize("value", [0.5, float("nan")])
def test_other_logits_from_the_same_weights_are_refused(tmp_path: Path, value: float) -> None:
    source = write_t5(tmp_path / "t5")
    before = listing(tmp_path)
    with pytest.raises(CheckpointError, match="log-probabilities differ"):
        convert(str(source), tmp_path / "out", compare_logits=lambda first, second: value)
    assert listing(tmp_path) == before


def test_logits_are_left_out_where_they_would_take_longer_than_the_conversion(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = str(write_t5(tmp_path / "t5"))
    needed = 6 * sum(array.size for array in t5_weights(T5).values())
    monkeypatch.setattr(verify, "QUICK_BYTES", needed - 1)
    report = convert(source, tmp_path / "a", compare_logits=lambda a, b: 1 / 0)
    assert report.verified.logits is None
    assert "longer than the conversion" in report.describe()
    compared: dict[str, Any] = {"compare_logits": lambda a, b: 0.0}
    packed = convert(source, tmp_path / "c", quantize=True, q_group_size=32, **compared)
    assert packed.verified.logits == 0.0
    small = convert(
        source, tmp_path / "e", shard_bytes=needed // 2, compare_logits=lambda *_: 1 / 0
    )
    assert "more memory than its conversion" in small.verified.note
    monkeypatch.setattr(verify, "QUICK_BYTES", needed)
    assert convert(source, tmp_path / "d", **compared).verified.logits == 0.0


@pytest.mark.parametrize("options", [{}, {"quantize": True, "q_group_size": 32}])
@pytest.mark.parametrize("name", [f"{LINEAR}.weight", "encoder.final_layer_norm.weight"])
def test_a_byte_that_arrives_wrong_is_found_by_the_check(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, options: dict[str, Any], name: str
) -> None:
    source = write_t5(tmp_path / "t5")
    real = writer._name_shards

    def spoil(directory: Path, *rest: Any) -> None:
        real(directory, *rest)
        file = directory / "model.safetensors"
        content = bytearray(file.read_bytes())
        length = int.from_bytes(content[:8], "little")
        begin = json.loads(content[8 : 8 + length])[name]["data_offsets"][0]
        content[8 + length + begin + 3] ^= 0x70
        file.write_bytes(bytes(content))

    monkeypatch.setattr(writer, "_name_shards", spoil)
    with pytest.raises(OutputError, match=re.escape(name)):
        convert(str(source), tmp_path / "out", **options)
    assert [path.name for path in tmp_path.iterdir()] == ["t5"]


def test_a_file_that_was_read_back_otherwise_is_no_result(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = mtp.write("glm4_moe", tmp_path / "source")
    plain = mtp.write("glm4_moe", tmp_path / "other", layer=True, num_attention_heads=2)
    wrong = convert(str(plain), tmp_path / "plain").path / FILE

    def write(file: Path, *_: object) -> None:
        shutil.copyfile(wrong, file)

    monkeypatch.setattr("mlx_specdec.checkpoints.writer.write_unchanged", write)
    with pytest.raises(OutputError, match="another type or shape"):
        convert(str(source), tmp_path / "result")
    assert not (tmp_path / "result").exists()


@pytest.mark.parametrize(
    ("same", "settings", "advice"),
    [
        (0.6, {}, "likeliest token changed at 40% .*: take --q-bits 5, or leave --quantize out"),
        (0.6, {"q_mode": "mxfp4"}, "take --q-bits 5 in place of the mode or predicate, or leave"),
        (0.6, {"q_bits": 8}, "40% of the positions: leave --quantize out"),
        (0.95, {}, ""),
    ],
)
def test_a_poor_result_is_called_one(
    same: float, settings: dict[str, Any], advice: str, tmp_path: Path
) -> None:
    text = TextChange(100, 20.0, 30.0, 0.5, 2.0, same)
    report = convert(
        str(ROOT / "tests" / "fixtures" / "gguf" / "llama-f32.gguf"),
        tmp_path / "out",
        quantize=True,
        compare_logits=lambda source, result: 1.0,
        compare_text=lambda source, result: text,
        **{**({} if "q_mode" in settings else {"q_group_size": 32}), **settings},
    )
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
    tokenizer = load_tokenizer(directory, kind=loaded.kind)
    if loaded.kind == "encoder-decoder":
        texts = [(tokenizer.encode(prompt), tokenizer.encode(text)) for prompt, text in PAIRS]
    else:
        ids = tokenizer.encode(PASSAGE)
        texts = [(ids[:1], ids[1:])]
    found = []
    for prompt, text in texts:
        context, last = loaded.model.open(prompt), loaded.model.prefix(prompt)[-1]
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
