"""Conversion keeps layers for multi-token prediction, where mlx-lm does not see them."""

from __future__ import annotations

import shutil
from pathlib import Path

import mlx.core as mx
import mlx_lm.utils
import pytest

from mlx_specdec.checkpoints import files
from mlx_specdec.checkpoints.mtp_layers import FILE
from mlx_specdec.conversion.convert import convert
from mlx_specdec.errors import OutputError

from ..support import mtp


@pytest.mark.parametrize("family", ["glm4_moe", pytest.param("qwen3_next", marks=pytest.mark.slow)])
def test_mlx_lm_reads_a_conversion_as_one_without_the_layers(family: str, tmp_path: Path) -> None:
    source = mtp.write(family, tmp_path / "source")
    bare = mtp.write(family, tmp_path / "bare", layer=False)
    asked = {"quantize": True, "q_group_size": 32}
    report = convert(str(source), tmp_path / "with", **asked)
    plain = convert(str(bare), tmp_path / "plain", **asked)
    kept = mx.load(str(report.path / FILE))
    assert (
        f"the layers for multi-token prediction ({len(kept)} tensors) are kept as they are, in "
        f"{FILE}" in report.notes
    )
    stored = mx.load(str(source / "model.safetensors"))
    assert all(mx.array_equal(array, stored[name]) for name, array in kept.items())
    assert not {*kept} & {*report.tensor_report.dropped}
    one, other = (files.Weights(each.path).infos for each in (report, plain))
    assert one == other
    tokens = mx.array([[3, 14, 15, 9]])
    model, _ = mlx_lm.utils.load_model(report.path)
    same, _ = mlx_lm.utils.load_model(plain.path)
    assert mx.array_equal(model(tokens), same(tokens))


def test_a_conversion_is_converted_again_with_them(tmp_path: Path) -> None:
    source = mtp.write("qwen3_next", tmp_path / "source")
    first = convert(str(source), tmp_path / "first").path
    second = convert(str(first), tmp_path / "second", quantize=True, q_group_size=32).path
    assert (second / FILE).read_bytes() == (first / FILE).read_bytes()
    # Over a result that had them goes one that has none.
    bare = mtp.write("qwen3_next", tmp_path / "bare", layer=False)
    assert not (convert(str(bare), second, overwrite=True).path / FILE).exists()


def test_layers_that_an_mlx_program_laid_out_are_left_to_it(tmp_path: Path) -> None:
    """Their norms are not what the file would say they are."""
    source = mtp.write("qwen3_next", tmp_path / "source", original=False)
    report = convert(str(source), tmp_path / "result")
    assert not (report.path / FILE).exists()
    assert {name.split(".")[0] for name in report.tensor_report.dropped} == {"mtp"}


def test_a_file_that_was_read_back_otherwise_is_no_result(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = mtp.write("glm4_moe", tmp_path / "source")
    plain = mtp.write("glm4_moe", tmp_path / "other", layer=True, num_attention_heads=2)
    other = convert(str(plain), tmp_path / "plain").path / FILE

    def write(file: Path, *_: object) -> None:
        shutil.copyfile(other, file)

    monkeypatch.setattr("mlx_specdec.conversion.convert.write_beside", write)
    with pytest.raises(OutputError, match="another type or shape"):
        convert(str(source), tmp_path / "result")
    assert not (tmp_path / "result").exists()
