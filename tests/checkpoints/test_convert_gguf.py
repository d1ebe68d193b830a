"""GGUF files become models that compute what torch computes with the same weights."""

from __future__ import annotations

import errno
import json
import shutil
import subprocess
import sys
from pathlib import Path

import mlx.core as mx
import numpy as np
import pytest

from mlx_specdec.checkpoints import files
from mlx_specdec.conversion.compare import compare_logits
from mlx_specdec.conversion.convert import convert
from mlx_specdec.errors import CheckpointError, OutputError, SourceError
from mlx_specdec.models.loading import load_model
from mlx_specdec.text.tokenizer import load_tokenizer

from ..support.gguf_files import Gguf, halves, llama

FIXTURES = Path(__file__).parents[1] / "fixtures" / "gguf"
MODELS = sorted(file.stem for file in FIXTURES.glob("*.gguf"))
TEXTS = json.loads((FIXTURES / "texts.json").read_text(encoding="utf-8"))


def log_p(directory: Path, expected: np.lib.npyio.NpzFile) -> np.ndarray:
    """What the model in `directory` computes for a fixture's tokens."""
    tokens = expected["tokens"].tolist()
    prompt = expected["source"].tolist() if "source" in expected else tokens[:1]
    context = load_model(directory, dtype="float32").model.open(prompt)
    logits = context.advance(mx.array([tokens])).logits[0].astype(mx.float32)
    return np.array(logits - mx.logsumexp(logits, axis=-1, keepdims=True))


@pytest.mark.parametrize("name", MODELS)
def test_logits_are_those_of_torch(name: str, tmp_path: Path) -> None:
    report = convert(
        str(FIXTURES / f"{name}.gguf"), tmp_path / "out", compare_logits=compare_logits
    )
    assert report.verified.logits == 0
    assert report.differences.plain == 0
    with np.load(FIXTURES / f"{name}.npz") as expected:
        assert np.abs(log_p(tmp_path / "out", expected) - expected["log_p"]).max() < 1e-4


def test_there_are_fixtures_of_both_families() -> None:
    assert {"llama-q4_0", "llama-many", "mixtral", "qwen3-q4_0", "t5-f32", "umt5-f32"} <= {*MODELS}


@pytest.mark.parametrize("name", sorted(TEXTS))
def test_tokenizer_splits_text_as_the_original_does(name: str, tmp_path: Path) -> None:
    convert(str(FIXTURES / f"{name}.gguf"), tmp_path / "out")
    kind = "encoder-decoder" if name.startswith("t5") else "decoder-only"
    tokenizer = load_tokenizer(tmp_path / "out", kind=kind)
    for text, ids in TEXTS[name]["pairs"]:
        assert tokenizer.encode(text) == ids
    assert tokenizer.size == TEXTS[name]["size"]
    assert tokenizer.eos_token_ids == ((2,) if name == "llama-f16" else (1,))


@pytest.mark.parametrize("name", ["llama-f16", "llama-three", "qwen2-q8_0"])
def test_tokenizer_gives_text_back(name: str, tmp_path: Path) -> None:
    convert(str(FIXTURES / f"{name}.gguf"), tmp_path / "out")
    tokenizer = load_tokenizer(tmp_path / "out", kind="decoder-only")
    for text, _ in TEXTS[name]["pairs"]:
        assert tokenizer.decode(tokenizer.encode(text)) == text


def test_the_chat_template_is_carried_over(tmp_path: Path) -> None:
    convert(str(FIXTURES / "llama-three.gguf"), tmp_path / "out")
    tokenizer = load_tokenizer(tmp_path / "out", kind="decoder-only")
    assert tokenizer.has_chat_template
    assert tokenizer.apply_chat("fox") == tokenizer.encode("[fox]")[1:]


def test_a_tokenizer_beside_the_file_is_taken_instead(tmp_path: Path) -> None:
    source = tmp_path / "source"
    source.mkdir()
    shutil.copy(FIXTURES / "llama-q4_0.gguf", source)
    convert(str(FIXTURES / "llama-three.gguf"), tmp_path / "three")
    shutil.copy(tmp_path / "three" / "tokenizer.json", source)
    convert(str(source), tmp_path / "out")
    assert (tmp_path / "out" / "tokenizer.json").read_bytes() == (
        tmp_path / "three" / "tokenizer.json"
    ).read_bytes()


@pytest.mark.parametrize("name", ["llama-f16", "t5-f16"])
def test_vectors_that_were_widened_get_their_half_type_back(name: str, tmp_path: Path) -> None:
    convert(str(FIXTURES / f"{name}.gguf"), tmp_path / "out")
    kinds = {str(array.dtype) for _, array in files.tensors(tmp_path / "out")}
    assert kinds == {"mlx.core.float16"}


def test_vectors_that_do_not_fit_the_half_type_stay_wide(tmp_path: Path) -> None:
    model = llama()
    model.arrays["output_norm.weight"] = np.full(32, 1 + 2**-20, np.float32)
    model.write(tmp_path / "m.gguf")
    convert(str(tmp_path / "m.gguf"), tmp_path / "out")
    found = dict(files.tensors(tmp_path / "out"))
    assert found["model.norm.weight"].dtype == mx.float32
    assert found["model.layers.0.input_layernorm.weight"].dtype == mx.float16


def test_packed_types_are_named_and_can_be_packed_again(tmp_path: Path) -> None:
    report = convert(str(FIXTURES / "llama-q4_0.gguf"), tmp_path / "out", quantize=True)
    assert any("Q4_0" in note for note in report.notes)
    assert report.differences.quantized is not None


def test_a_directory_with_one_file_and_parts_give_the_same(tmp_path: Path) -> None:
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    whole.mkdir()
    parts.mkdir()
    model = llama()
    model.write(whole / "m.gguf")
    for number, part in enumerate(halves(model), 1):
        part.write(parts / f"m-{number:05d}-of-00002.gguf")
    for source in (whole, parts, parts / "m-00002-of-00002.gguf"):
        convert(str(source), tmp_path / "out", overwrite=True)
        found = dict(files.tensors(tmp_path / "out"))
        assert len(found) == len(model.arrays)
        assert np.array_equal(np.array(found["lm_head.weight"]), model.arrays["output.weight"])


def test_a_missing_part_is_named(tmp_path: Path) -> None:
    first, _ = halves(llama())
    first.write(tmp_path / "m-00001-of-00002.gguf")
    with pytest.raises(CheckpointError, match=r"lacks the shard m-00002-of-00002\.gguf"):
        convert(str(tmp_path), tmp_path / "out")


def test_two_models_in_one_directory_are_a_question(tmp_path: Path) -> None:
    for name in ("a", "b"):
        llama().write(tmp_path / f"{name}.gguf")
    with pytest.raises(CheckpointError, match=r"a\.gguf, b\.gguf: name the file"):
        convert(str(tmp_path), tmp_path / "out")


def test_safetensors_win_where_both_are(tmp_path: Path) -> None:
    source = tmp_path / "source"
    convert(str(FIXTURES / "llama-f32.gguf"), source)
    (source / "other.gguf").write_bytes(b"GGUF and no more")
    report = convert(str(source), tmp_path / "out", compare_logits=compare_logits)
    assert report.verified.logits == 0


def test_the_result_is_called_as_the_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert convert(str(FIXTURES / "llama-f32.gguf")).path == Path("weights/llama-f32")


def test_the_source_is_not_overwritten(tmp_path: Path) -> None:
    source = tmp_path / "model"
    source.mkdir()
    llama().write(source / "m.gguf")
    with pytest.raises(OutputError, match="holds the model to convert"):
        convert(str(source / "m.gguf"), source, overwrite=True)


def test_other_files_are_no_models(tmp_path: Path) -> None:
    (tmp_path / "m.txt").write_text("x")
    with pytest.raises(SourceError, match="is a file"):
        convert(str(tmp_path / "m.txt"), tmp_path / "out")


def test_nothing_temporary_stays(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "temporary").mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / "temporary"))
    convert(str(FIXTURES / "llama-three.gguf"), tmp_path / "out")
    model = Gguf("llama")
    model.write(tmp_path / "bad.gguf")
    with pytest.raises(CheckpointError):
        convert(str(tmp_path / "bad.gguf"), tmp_path / "bad")
    assert not any((tmp_path / "temporary").iterdir())


def test_a_full_temporary_directory_is_one_sentence(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object, **__: object) -> int:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(Path, "write_text", full)
    with pytest.raises(OutputError, match="No space left on device: make room, or set TMPDIR"):
        convert(str(FIXTURES / "llama-three.gguf"), tmp_path / "out")


def test_a_t5_is_converted_without_mlx_lm_and_torch(tmp_path: Path) -> None:
    script = (
        "import sys\n"
        "from pathlib import Path\n"
        "from mlx_specdec.conversion.convert import convert\n"
        f"convert({str(FIXTURES / 't5-q8_0.gguf')!r}, Path({str(tmp_path / 'out')!r}))\n"
        "assert not {'mlx_lm', 'transformers', 'torch'} & set(sys.modules)\n"
    )
    subprocess.run([sys.executable, "-c", script], check=True)


def test_what_is_not_converted_yet_says_so(tmp_path: Path) -> None:
    llama().write(tmp_path / "m.gguf")
    for source in (tmp_path, tmp_path / "m.gguf"):
        with pytest.raises(CheckpointError, match="is a GGUF model: convert it first"):
            load_model(source)
