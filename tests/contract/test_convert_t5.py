"""Conversion of T5 checkpoints: what arrives, what is refused, and what is uploaded."""

import hashlib
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest

from mlx_specdec import CheckpointError, OptionError, convert

from ..support.checkpoints import T5, save, t5_weights, write_sharded_t5, write_t5
from .converted import SMALL, change_config, config_of, dequantized, provenance, refused, tensors
from .support import command

INDEX = "model.safetensors.index.json"
LINEAR = "encoder.block.1.layer.0.SelfAttention.q"
COPIES = ("encoder.embed_tokens.weight", "decoder.embed_tokens.weight")
NO_BIAS = "decoder.block.0.layer.1.EncDecAttention.relative_attention_bias.weight"


@pytest.fixture
def source(tmp_path: Path) -> Path:
    return write_t5(tmp_path / "t5")


@pytest.mark.parametrize("dtype", [None, "float32", "float16", "bfloat16"])
def test_every_tensor_arrives_in_the_type_requested(source: Path, dtype: str | None) -> None:
    out = source.parent / "out"
    convert(str(source), out, dtype=dtype)
    wanted = getattr(mx, dtype or "float32")
    before, after, report = tensors(source), tensors(out), provenance(out)["result"]
    assert before.keys() == after.keys()
    for name, array in after.items():
        assert array.dtype == wanted and mx.array_equal(array, before[name].astype(wanted))
    assert config_of(out)["torch_dtype"] == (dtype or "float32")
    exact = max(
        float(mx.abs(array.astype(mx.float32) - before[name]).max())
        for name, array in after.items()
    )
    assert report["largest_difference"] == exact
    assert (exact > 0) is (dtype in ("float16", "bfloat16"))
    assert report["tensors"] == len(before)
    assert report["parameters"] == sum(array.size for array in before.values())
    assert report["bytes"] == sum(array.nbytes for array in after.values())
    assert (out / "spiece.model").read_bytes() == b"pieces"


@pytest.mark.parametrize(
    ("bits", "dtype"),
    [*((bits, None) for bits in (2, 3, 4, 5, 6, 8)), (3, "float16"), (8, "bfloat16")],
)
def test_quantized_weights_lie_within_a_step_of_their_source(
    source: Path, bits: int, dtype: str | None
) -> None:
    out = source.parent / "out"
    convert(str(source), out, dtype=dtype, quantize=bits, q_group_size=32)
    before, after, config = tensors(source), tensors(out), config_of(out)
    entry, report = config["quantization"], provenance(out)["result"]
    assert entry == config["quantization_config"]
    assert (entry["bits"], entry["group_size"]) == (bits, 32)
    packed = {name.removesuffix(".scales") for name in after if name.endswith(".scales")}
    assert packed == {
        name.removesuffix(".weight")
        for name, array in before.items()
        if array.ndim == 2 and "relative_attention_bias" not in name
    }
    whole, largest = dequantized(after, config), 0.0
    for path in packed:
        off = mx.abs(whole[f"{path}.weight"] - before[f"{path}.weight"])
        step = mx.repeat(mx.abs(after[f"{path}.scales"].astype(mx.float32)), 32, axis=-1)
        assert mx.all(off <= 1.05 * step + 0.05).item()
        largest = max(largest, float(mx.max(off)))
    assert report["largest_difference_of_quantized"] == pytest.approx(largest)
    assert report["parameters"] == sum(array.size for array in before.values())
    bits_each = 8 * sum(array.nbytes for array in after.values()) / report["parameters"]
    assert report["bits_per_weight"] == pytest.approx(bits_each, abs=1e-3)
    assert f"{bits}-bit" in report["dtype"]


def test_shards_in_and_shards_out_have_the_same_tensors_and_digests(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source, out, limit = write_sharded_t5(tmp_path / "t5"), tmp_path / "out", 20_000
    monkeypatch.setattr("mlx_specdec.system.SHARD_BYTES", limit)
    convert(str(source), out)
    shards = sorted(file.name for file in out.glob("*.safetensors"))
    count = len(shards)
    assert count > 2
    assert shards == [f"model-{i + 1:05d}-of-{count:05d}.safetensors" for i in range(count)]
    index = json.loads((out / INDEX).read_text())
    before, after = tensors(source), tensors(out)
    assert index["weight_map"].keys() == before.keys() == after.keys()
    assert index["metadata"]["total_size"] == sum(array.nbytes for array in after.values())
    assert all(mx.array_equal(before[name], after[name]) for name in before)
    for name in shards:
        arrays: Any = mx.load(str(out / name))
        assert {index["weight_map"][key] for key in arrays} == {name}
        assert len(arrays) == 1 or sum(array.nbytes for array in arrays.values()) <= limit
    found = provenance(out)
    for directory, side in ((source, "source"), (out, "result")):
        files = found[side]["files"]
        weights = {file.name for file in directory.glob("*.safetensors")}
        assert weights | {"config.json"} <= files.keys()
        for name, entry in files.items():
            content = (directory / name).read_bytes()
            digest = hashlib.sha256(content).hexdigest()
            assert entry == {"bytes": len(content), "sha256": digest}
        lines = "".join(f"{files[name]['sha256']}  {name}\n" for name in sorted(files))
        assert found[side]["digest"] == hashlib.sha256(lines.encode()).hexdigest()
    assert (found["source"]["name"], found["source"]["format"]) == ("t5", "safetensors")
    assert str(tmp_path) not in json.dumps(found)


def test_tensors_that_repeat_the_embedding_or_mean_nothing_are_left_out(tmp_path: Path) -> None:
    weights = t5_weights(T5)
    copies = ("lm_head.weight", *COPIES)
    weights |= dict.fromkeys(copies, weights["shared.weight"] + 0)
    weights[NO_BIAS] = mx.zeros((8, 4))
    source = write_t5(tmp_path / "t5", {"tie_word_embeddings": False}, weights=weights)
    out = tmp_path / "out"
    convert(str(source), out)
    assert tensors(out).keys() == t5_weights(T5).keys()
    written = config_of(out)
    assert written["tie_word_embeddings"] is True and written["scale_decoder_outputs"] is False
    report = provenance(out)["tensors"]
    assert report["tied"] == dict.fromkeys(sorted(copies), "shared.weight")
    assert [*report["dropped"]] == [NO_BIAS]
    shown = command("inspect", source)
    assert shown.code == 0 and f"dropped: {report['dropped'][NO_BIAS]}" in " ".join(
        shown.out.split()
    )


def test_a_head_of_its_own_is_kept(tmp_path: Path) -> None:
    convert(str(write_t5(tmp_path / "t5", own_head=True)), tmp_path / "out", **SMALL)
    assert "lm_head.scales" in tensors(tmp_path / "out")
    written = config_of(tmp_path / "out")
    assert written["tie_word_embeddings"] is False and written["scale_decoder_outputs"] is True
    assert written["quantization"]["lm_head"] == {"bits": 8, "group_size": 32}


@pytest.mark.parametrize(
    ("config", "scales"),
    [
        ({"model_type": "t5"}, True),
        ({"model_type": "t5", "tie_word_embeddings": False}, False),
        ({"model_type": "umt5"}, True),
        ({"model_type": "mt5"}, False),
        ({"model_type": "t5", "tie_word_embeddings": True, "scale_decoder_outputs": False}, False),
        ({"model_type": "t5", "tie_word_embeddings": False, "scale_decoder_outputs": True}, True),
    ],
)
def test_whether_outputs_are_scaled_is_a_fact_of_its_own(
    tmp_path: Path, config: dict[str, Any], scales: bool
) -> None:
    source = write_t5(tmp_path / "t5", {"tie_word_embeddings": None, **config})
    convert(str(change_config(source)), tmp_path / "out")
    assert config_of(tmp_path / "out")["scale_decoder_outputs"] is scales


# What is refused


def break_weights(change: Callable[[dict[str, mx.array]], Any]) -> Callable[[Path], None]:
    def apply(directory: Path) -> None:
        weights = t5_weights(T5)
        change(weights)
        save(directory / "model.safetensors", weights)

    return apply


def replace(name: str, array: mx.array) -> Callable[[Path], None]:
    return break_weights(lambda weights: weights.update({name: array}))


def cut(directory: Path) -> None:
    file = directory / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-1000])


@pytest.mark.parametrize(
    ("harm", "says"),
    [
        (lambda directory: (directory / "config.json").unlink(), "config.json"),
        (lambda directory: (directory / "model.safetensors").unlink(), "no .safetensors files"),
        (cut, "truncated"),
        (lambda directory: change_config(directory, model_type="warp_drive"), "warp_drive"),
        (lambda directory: change_config(directory, d_ff=65), "config.json asks for"),
        (break_weights(lambda weights: weights.pop(f"{LINEAR}.weight")), f"{LINEAR}.weight"),
        (replace(f"{LINEAR}.weight", mx.zeros((8, 8))), "(8, 8)"),
        (replace("extra.weight", mx.zeros((8, 8))), "extra.weight"),
        (replace(f"{LINEAR}.weight", mx.zeros((32, 32), dtype=mx.int32)), "I32 instead of weights"),
        (replace(f"{LINEAR}.weight", mx.full((32, 32), mx.inf)), LINEAR),
    ],
)
def test_a_bad_source_is_one_sentence_and_leaves_nothing(
    source: Path, harm: Callable[[Path], Any], says: str
) -> None:
    harm(source)
    assert says in refused(CheckpointError, source)


def test_a_value_too_large_for_float16_names_the_tensor_and_bfloat16(tmp_path: Path) -> None:
    weights = {**t5_weights(T5), f"{LINEAR}.weight": mx.full((32, 32), 1e5)}
    source = write_t5(tmp_path / "t5", weights=weights)
    for options in ({}, SMALL):
        text = refused(CheckpointError, source, dtype="float16", **options)
        assert LINEAR in text and "bfloat16" in text
    convert(str(source), tmp_path / "out", dtype="bfloat16")


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"quantize": "none"}, "not quantized"),
        ({"q_group_size": 64}, "--quantize"),
        ({"quantize": "fp3"}, "quantize must be one of"),
        ({"quantize": True}, "quantize must be one of"),
        ({"quantize": 7}, "q-bits must be one of 2, 3, 4, 5, 6, 8, not 7"),
        ({"quantize": "mxfp4", "q_group_size": 64}, "leave --q-group-size"),
        ({"quantize": 4, "q_group_size": 128}, "smaller --q-group-size"),
        ({"dtype": "float64"}, "dtype must be one of"),
    ],
)
def test_options_that_contradict_each_other_are_one_sentence_before_anything_is_written(
    source: Path, monkeypatch: pytest.MonkeyPatch, options: dict[str, Any], says: str
) -> None:
    monkeypatch.chdir(source.parent)
    with pytest.raises(OptionError, match=says):
        convert(str(source), **options)
    assert not Path("weights").exists()
    assert convert(str(source)).path == Path("weights/t5")
