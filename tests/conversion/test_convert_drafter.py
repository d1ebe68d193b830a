"""Conversion of drafters on hidden states: what is written drafts as its source did."""

import json
import shutil
from pathlib import Path

import mlx.core as mx
import mlx_lm.utils
import pytest

from mlx_specdec.checkpoints import files
from mlx_specdec.checkpoints.files import Weights
from mlx_specdec.checkpoints.mtp_layers import FILE
from mlx_specdec.conversion.convert import convert
from mlx_specdec.conversion.report import ConversionReport
from mlx_specdec.errors import CheckpointError, OptionError, OutputError
from mlx_specdec.models.drafters.kinds import on_target, read
from mlx_specdec.models.number_format import NumberFormat, on_cpu

from ..support import mtp
from ..support.lender import FIXTURES, Lender, drafts_of
from ..support.speculators import VOCABULARY, WIDTH, dflash, eagle3, speculators_eagle3

MAKERS = {
    "eagle3": eagle3,
    "speculators": speculators_eagle3,
    "dflash": dflash,
    "dflash2": lambda directory, **options: dflash(directory, second=True, **options),
    "dspark": lambda directory, **options: dflash(directory, markov="rnn", **options),
    "encoder": lambda directory, **options: dflash(directory, encoder=WIDTH, **options),
}


def converted(source: Path, result: Path, **options) -> ConversionReport:
    return convert(str(source), result, **options)


def network_in(directory: Path, numbers: NumberFormat):
    files = read(directory)
    assert files is not None
    embedding = mx.random.normal((VOCABULARY, WIDTH), key=mx.random.key(1))
    network = on_target(files, Lender(embedding))
    network.load(files, numbers)
    return network


@pytest.mark.parametrize("name", MAKERS)
def test_every_kind_is_quantized_but_for_fc_and_norms(name: str, tmp_path: Path) -> None:
    source, result = MAKERS[name](tmp_path / "source"), tmp_path / "result"
    report = converted(source, result, quantize=True, q_bits=8, q_group_size=32)
    assert "norms and fc" in report.describe()
    stored = Weights(result).infos
    assert stored["fc.weight"].dtype == stored["norm.weight"].dtype == "F32"
    assert stored["layers.0.self_attn.q_proj.weight"].dtype == "U32"
    # On load the same matrices would be quantized, to the same numbers.
    plain = network_in(source, NumberFormat("float32", q_bits=8, q_group_size=32))
    loaded = network_in(result, NumberFormat("float32"))
    assert loaded.nbytes == plain.nbytes
    for name_of, array in tree(plain).items():
        assert mx.array_equal(tree(loaded)[name_of], array), name_of
    # Small ones are expanded on the CPU.
    projection = network_in(result, NumberFormat()).layers[0].self_attn.q_proj
    assert hasattr(projection, "bits") is not on_cpu()
    with pytest.raises(OptionError, match="quantized already"):
        network_in(result, NumberFormat(q_bits=4, q_group_size=32))


def tree(network) -> dict[str, mx.array]:
    from mlx.utils import tree_flatten

    return dict(tree_flatten(network.parameters()))


@pytest.mark.parametrize("name", ["eagle3", "dflash", "dflash2", "dspark"])
def test_what_is_not_quantized_drafts_the_very_same(name: str, tmp_path: Path) -> None:
    source = MAKERS[name](tmp_path / "source")
    converted(source, tmp_path / "result")
    assert mx.array_equal(drafts_of(source), drafts_of(tmp_path / "result"))


def test_a_torch_archive_becomes_safetensors(tmp_path: Path) -> None:
    source = FIXTURES / "eagle3-authors"
    report = converted(source, tmp_path / "result")
    assert report.tensor_report.renamed["midlayer.hidden_norm.weight"] == (
        "layers.0.hidden_norm.weight"
    )
    assert set(report.tensor_report.dropped) <= {"t2d", "embed_tokens.weight"}
    before, after = read(source), read(tmp_path / "result")
    assert before is not None and after is not None
    assert before.target_ids == after.target_ids is not None
    assert before.tensors.keys() == after.tensors.keys()
    assert all(mx.array_equal(before.tensors[name], after.tensors[name]) for name in before.tensors)
    assert not list((tmp_path / "result").glob("*.bin"))


def test_what_was_quantized_can_be_made_whole(tmp_path: Path) -> None:
    source = eagle3(tmp_path / "source")
    converted(source, tmp_path / "small", quantize=True, q_bits=8, q_group_size=32)
    converted(tmp_path / "small", tmp_path / "whole", dequantize=True)
    small, dequantized = read(tmp_path / "small"), read(tmp_path / "whole")
    assert small is not None and dequantized is not None and not dequantized.tensors.quantized
    assert dequantized.tensors.shapes == small.tensors.shapes
    for path, how in small.tensors.quantized.items():
        parts = (small.tensors[f"{path}.{part}"] for part in ("weight", "scales", "biases"))
        assert mx.array_equal(dequantized.tensors[f"{path}.weight"], how.dequantize(*parts)), path
    assert dequantized.target_ids == small.target_ids


def test_biases_of_quantized_matrices_stay(tmp_path: Path) -> None:
    bias = "layers.0.self_attn.q_proj.bias"
    source = dflash(tmp_path / "source", extra={bias: (WIDTH,)})
    converted(source, tmp_path / "small", quantize=True, q_bits=8, q_group_size=32)
    before, after = read(source), read(tmp_path / "small")
    assert before is not None and after is not None
    assert bias in after.tensors.shapes


def test_what_does_not_suit_a_drafter_is_refused(tmp_path: Path) -> None:
    source = dflash(tmp_path / "source")
    for options, match in (
        ({"quantize": True}, "divide into groups of 64"),
        ({"quantize": True, "quant_predicate": "mixed_4_6", "q_group_size": 32}, "whole models"),
        ({"dequantize": True}, "not quantized"),
    ):
        with pytest.raises(OptionError, match=match):
            converted(source, tmp_path / "result", **options)
        assert not (tmp_path / "result").exists()


@pytest.mark.parametrize(
    ("damage", "match"),
    [
        ({"bits": 8, "group_size": 64}, "has shape"),
        ({"bits": 8.5, "group_size": 32}, "MLX has no 8.5 bits"),
        ("8 bits", "quantization entry that is no object"),
    ],
)
def test_a_quantization_that_config_json_does_not_tell_is_refused(
    damage: object, match: str, tmp_path: Path
) -> None:
    source, result = eagle3(tmp_path / "source"), tmp_path / "result"
    converted(source, result, quantize=True, q_bits=8, q_group_size=32)
    file = result / "config.json"
    config = json.loads(file.read_text())
    file.write_text(json.dumps({**config, "quantization": damage}))
    with pytest.raises(CheckpointError, match=match):
        read(result)


# Layers for multi-token prediction


@pytest.mark.parametrize("family", ["glm4_moe", pytest.param("qwen3_next", marks=pytest.mark.slow)])
def test_mlx_lm_reads_a_conversion_as_one_without_the_layers(family: str, tmp_path: Path) -> None:
    source = mtp.write(family, tmp_path / "source")
    bare = mtp.write(family, tmp_path / "bare", layer=False)
    options = {"quantize": True, "q_group_size": 32}
    report = convert(str(source), tmp_path / "with", **options)
    plain = convert(str(bare), tmp_path / "plain", **options)
    copied = mx.load(str(report.path / FILE))
    assert (
        f"the layers for multi-token prediction ({len(copied)} tensors) are kept as they are, in "
        f"{FILE}" in report.notes
    )
    stored = mx.load(str(source / "model.safetensors"))
    assert all(mx.array_equal(array, stored[name]) for name, array in copied.items())
    assert not {*copied} & {*report.tensor_report.dropped}
    one, two = (files.Weights(result.path).infos for result in (report, plain))
    assert one == two
    tokens = mx.array([[3, 14, 15, 9]])
    model, _ = mlx_lm.utils.load_model(report.path)
    same, _ = mlx_lm.utils.load_model(plain.path)
    assert mx.array_equal(model(tokens), same(tokens))


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
    wrong = convert(str(plain), tmp_path / "plain").path / FILE

    def write(file: Path, *_: object) -> None:
        shutil.copyfile(wrong, file)

    monkeypatch.setattr("mlx_specdec.checkpoints.writer.write_unchanged", write)
    with pytest.raises(OutputError, match="another type or shape"):
        convert(str(source), tmp_path / "result")
    assert not (tmp_path / "result").exists()
