"""Conversion of T5 directories: results, reports, errors and upload."""

import json
import subprocess
import sys
from collections.abc import Callable
from dataclasses import FrozenInstanceError
from functools import partial
from pathlib import Path
from typing import Any

import huggingface_hub as hub
import mlx.core as mx
import pytest

from mlx_specdec.checkpoints import files, writer
from mlx_specdec.checkpoints.tensors import PIECE_BYTES
from mlx_specdec.conversion import verify
from mlx_specdec.conversion.convert import convert
from mlx_specdec.errors import CheckpointError, OutputError, SpecdecError
from mlx_specdec.models.loading import load_model
from mlx_specdec.models.t5 import TWINS, scales_output

from ..support import tiny
from ..support.checkpoints import T5, listing, refusal, save, t5_weights, write_sharded_t5, write_t5
from ..support.speculators import eagle3

INDEX = "model.safetensors.index.json"
LINEAR = "encoder.block.1.layer.0.SelfAttention.q"


def read(directory: Path) -> dict[str, mx.array]:
    return dict(files.tensors(directory))


def config_of(directory: Path) -> dict[str, Any]:
    return json.loads((directory / "config.json").read_text())


@pytest.mark.parametrize("dtype", [None, "float32", "float16", "bfloat16"])
def test_every_tensor_arrives_in_the_type_requested(tmp_path: Path, dtype: str | None) -> None:
    source = write_t5(tmp_path / "t5")
    report = convert(str(source), tmp_path / "out", dtype=dtype)
    wanted = getattr(mx, dtype or "float32")
    before, after = read(source), read(tmp_path / "out")
    assert before.keys() == after.keys()
    for name, array in after.items():
        assert array.dtype == wanted and mx.array_equal(array, before[name].astype(wanted))
    assert config_of(tmp_path / "out")["torch_dtype"] == (dtype or "float32")
    half = dtype in ("float16", "bfloat16")
    assert (report.differences.plain > 0) is half
    exact = max(
        mx.max(mx.abs(after[name].astype(mx.float32) - before[name])).item() for name in after
    )
    assert report.differences.plain == exact
    assert report.differences.tensors == report.written.tensors == len(before)
    assert report.parameters == sum(array.size for array in before.values())
    assert report.nbytes == sum(array.nbytes for array in after.values())


@pytest.mark.parametrize("bits", [2, 3, 4, 5, 6, 8])
@pytest.mark.parametrize("dtype", [None, "float16", "bfloat16"])
def test_quantized_weights_lie_within_a_step_of_their_source(
    tmp_path: Path, bits: int, dtype: str | None
) -> None:
    source = write_t5(tmp_path / "t5")
    out = tmp_path / "out"
    report = convert(str(source), out, dtype=dtype, quantize=True, q_bits=bits, q_group_size=32)
    before, after, entry = read(source), read(out), config_of(out)["quantization"]
    assert entry == config_of(out)["quantization_config"]
    assert (entry["bits"], entry["group_size"]) == (bits, 32)
    packed = {name.removesuffix(".scales") for name in after if name.endswith(".scales")}
    assert packed == {
        name.removesuffix(".weight")
        for name, array in before.items()
        if array.ndim == 2 and "relative_attention_bias" not in name
    }
    largest = 0.0
    for path in packed:
        how = entry.get(path, entry)
        values = mx.dequantize(
            after[f"{path}.weight"],
            *(after[f"{path}.{part}"].astype(mx.float32) for part in ("scales", "biases")),
            group_size=how["group_size"],
            bits=how["bits"],
        )
        off = mx.abs(values - before[f"{path}.weight"])
        step = mx.repeat(mx.abs(after[f"{path}.scales"].astype(mx.float32)), 32, axis=-1)
        assert mx.all(off <= 1.05 * step + 0.05).item()
        largest = max(largest, mx.max(off).item())
    assert report.differences.quantized == pytest.approx(largest)
    assert report.parameters == sum(array.size for array in before.values())


def test_shards_in_and_shards_out_hold_the_same_tensors(tmp_path: Path) -> None:
    source = write_sharded_t5(tmp_path / "t5")
    out = tmp_path / "out"
    limit = 20_000
    convert(str(source), out, shard_bytes=limit)
    shards = sorted(file.name for file in out.glob("*.safetensors"))
    count = len(shards)
    assert count > 2
    assert shards == [f"model-{i + 1:05d}-of-{count:05d}.safetensors" for i in range(count)]
    index = json.loads((out / INDEX).read_text())
    before, after = read(source), read(out)
    assert index["weight_map"].keys() == before.keys()
    assert index["metadata"]["total_size"] == sum(array.nbytes for array in after.values())
    assert all(mx.array_equal(before[name], after[name]) for name in before)
    for name in shards:
        arrays = mx.load(str(out / name))
        assert isinstance(arrays, dict)
        assert len(arrays) == 1 or sum(array.nbytes for array in arrays.values()) <= limit


def test_a_head_that_repeats_the_embedding_is_left_out(tmp_path: Path) -> None:
    weights = t5_weights(T5)
    copies = ("lm_head.weight", *TWINS)
    weights.update(dict.fromkeys(copies, weights["shared.weight"] + 0))
    source = write_t5(tmp_path / "t5", {"tie_word_embeddings": False}, weights=weights)
    report = convert(str(source), tmp_path / "out")
    assert not set(copies) & read(tmp_path / "out").keys()
    written = config_of(tmp_path / "out")
    assert written["tie_word_embeddings"] is True and written["scale_decoder_outputs"] is False
    assert report.tensor_report.tied.keys() == set(copies)


def test_a_head_of_its_own_is_kept(tmp_path: Path) -> None:
    source = write_t5(tmp_path / "t5", own_head=True)
    convert(str(source), tmp_path / "out", quantize=True, q_group_size=32)
    assert "lm_head.scales" in read(tmp_path / "out")
    written = config_of(tmp_path / "out")
    assert written["tie_word_embeddings"] is False and written["scale_decoder_outputs"] is True
    assert written["quantization"]["lm_head"] == {"bits": 8, "group_size": 32}


@pytest.mark.parametrize("remaining", [(), ("tokenizer_config.json", "generation_config.json")])
def test_a_source_without_vocabulary_is_converted_and_the_report_says_so(
    remaining: tuple[str, ...], tmp_path: Path
) -> None:
    source = write_t5(tmp_path / "t5")
    for file in files.tokenizer_files(source):
        if file.name not in remaining:
            file.unlink()
    assert any("tokenizer" in note for note in convert(str(source), tmp_path / "out").notes)


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


@pytest.mark.slow
def test_memory_does_not_grow_with_the_size_of_a_tensor(tmp_path: Path) -> None:
    vocabulary = 500_000
    config = {**T5, "vocab_size": vocabulary}
    weights = {**t5_weights(T5), "shared.weight": mx.ones((vocabulary, 32), dtype=mx.float32)}
    source = write_t5(tmp_path / "t5", config, weights=weights)
    del weights
    for how in ({}, {"dtype": "bfloat16"}, {"quantize": True, "q_group_size": 32}):
        mx.clear_cache()
        before = mx.get_active_memory()
        mx.reset_peak_memory()
        convert(str(source), tmp_path / "out", overwrite=True, **how)
        assert mx.get_peak_memory() - before < 6 * PIECE_BYTES < 4 * 32 * vocabulary


def refused(kind: type[SpecdecError], root: Path, source: Path | str, **options: Any) -> str:
    """Return the message of a conversion that fails and leaves no file below `root`."""
    before = listing(root)
    text = refusal(kind, convert, str(source), root / "deep" / "out", **options)
    assert listing(root) == before
    return text


def break_weights(change: Callable[[dict[str, mx.array]], Any]) -> Callable[[Path], None]:
    def apply(directory: Path) -> None:
        weights = t5_weights(T5)
        change(weights)
        save(directory / "model.safetensors", weights)

    return apply


def replace(name: str, array: mx.array) -> Callable[[dict[str, mx.array]], Any]:
    return lambda weights: weights.update({name: array})


def cut(directory: Path) -> None:
    file = directory / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-1000])


def retype(kind: str) -> Callable[[Path], None]:
    def apply(directory: Path) -> None:
        config = {**T5, "model_type": kind}
        (directory / "config.json").write_text(json.dumps(config))

    return apply


@pytest.mark.parametrize(
    ("harm", "says"),
    [
        (lambda directory: (directory / "config.json").unlink(), "config.json"),
        (lambda directory: (directory / "model.safetensors").unlink(), "no .safetensors files"),
        (cut, "truncated"),
        (retype("warp_drive"), "warp_drive"),
        (break_weights(lambda weights: weights.pop(f"{LINEAR}.weight")), f"{LINEAR}.weight"),
        (break_weights(replace(f"{LINEAR}.weight", mx.zeros((8, 8)))), "(8, 8)"),
        (break_weights(replace("extra.weight", mx.zeros((8, 8)))), "extra.weight"),
        (
            break_weights(replace(f"{LINEAR}.weight", mx.zeros((32, 32), dtype=mx.int32))),
            "I32 instead of weights",
        ),
        (break_weights(replace(f"{LINEAR}.weight", mx.full((32, 32), mx.inf))), LINEAR),
    ],
)
def test_a_bad_source_is_one_sentence_and_leaves_nothing(
    tmp_path: Path, harm: Callable[[Path], Any], says: str
) -> None:
    source = write_t5(tmp_path / "t5")
    harm(source)
    assert says in refused(CheckpointError, tmp_path, source)


def test_a_value_too_large_for_float16_names_the_tensor_and_bfloat16(tmp_path: Path) -> None:
    weights = t5_weights(T5)
    weights[f"{LINEAR}.weight"] = mx.full((32, 32), 1e5)
    source = write_t5(tmp_path / "t5", weights=weights)
    for options in ({}, {"quantize": True, "q_group_size": 32}):
        text = refused(CheckpointError, tmp_path, source, dtype="float16", **options)
        assert LINEAR in text and "bfloat16" in text
    convert(str(source), tmp_path / "out", dtype="bfloat16")


def test_an_existing_place_is_kept_unless_overwriting_is_requested(tmp_path: Path) -> None:
    source = write_t5(tmp_path / "t5")
    convert(str(source), tmp_path / "deep" / "out")
    assert "--overwrite" in refused(OutputError, tmp_path, source)
    report = convert(str(source), tmp_path / "deep" / "out", dtype="bfloat16", overwrite=True)
    assert read(report.path)["shared.weight"].dtype == mx.bfloat16
    assert sorted(path.name for path in (tmp_path / "deep").iterdir()) == ["out"]


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
    assert name in refused(OutputError, tmp_path, source, **options)


def test_a_t5_is_converted_without_mlx_lm_transformers_or_torch(tmp_path: Path) -> None:
    source = write_t5(tmp_path / "t5")
    script = (
        "import sys\n"
        "from pathlib import Path\n"
        "from mlx_specdec.conversion.convert import convert\n"
        f"convert({str(source)!r}, Path({str(tmp_path / 'out')!r}), quantize=True, "
        "q_group_size=32)\n"
        "assert not {'mlx_lm', 'transformers', 'torch'} & set(sys.modules)\n"
    )
    subprocess.run([sys.executable, "-c", script], check=True)


# Upload


class Hub:
    """Records the calls."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.made: list[str] = []
        self.uploaded: list[tuple[Path, str]] = []
        monkeypatch.setattr(hub.HfApi, "create_repo", self.create)
        monkeypatch.setattr(hub.HfApi, "upload_folder", self.upload)

    def create(self, *, repo_id: str, exist_ok: bool) -> None:
        self.made.append(repo_id)

    def upload(self, *, folder_path: str, repo_id: str, repo_type: str) -> None:
        self.uploaded.append((Path(folder_path), repo_id))


@pytest.mark.parametrize("write", [write_t5, partial(tiny.write, "llama")])
def test_a_model_is_uploaded_whole_with_a_card_that_names_this_tool(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, write: Callable[[Path], Path]
) -> None:
    api = Hub(monkeypatch)
    convert(str(write(tmp_path / "source")), tmp_path / "out", upload_repo="me/model")
    assert api.made == ["me/model"] and api.uploaded == [(tmp_path / "out", "me/model")]
    card = hub.ModelCard.load(tmp_path / "out" / "README.md")
    assert card.data.library_name == "mlx" and card.data.base_model is None
    assert "mlx-specdec generate --model me/model" in card.text


def test_a_drafter_is_uploaded_with_a_card_that_says_how_it_is_used(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    api = Hub(monkeypatch)
    convert(str(eagle3(tmp_path / "a")), tmp_path / "out", upload_repo="me/drafter")
    assert api.uploaded == [(tmp_path / "out", "me/drafter")]
    card = hub.ModelCard.load(tmp_path / "out" / "README.md").text
    assert "generate --model TARGET --draft-model me/drafter" in card


@pytest.mark.parametrize(
    ("problem", "advice"),
    [
        (RuntimeError("401 Client Error\nmore"), "run `hf auth login`"),
        (ConnectionError("401 is the line\nmore"), "check the network"),
    ],
)
def test_an_upload_that_fails_is_one_sentence_and_the_model_stays(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, problem: Exception, advice: str
) -> None:
    def refuse(self: Any, **rest: Any) -> None:
        raise problem

    monkeypatch.setattr(hub.HfApi, "create_repo", refuse)
    with pytest.raises(OutputError, match=f"is converted.* 401 .*: {advice}, then") as caught:
        convert(str(write_t5(tmp_path / "t5")), tmp_path / "out", upload_repo="me/my-t5")
    assert "\n" not in str(caught.value) and (tmp_path / "out" / "model.safetensors").is_file()


# Models that cannot generate text


def refusals(source: Path, out: Path) -> list[str]:
    messages = [refusal(CheckpointError, convert, str(source), out)]
    assert not out.exists()
    return [*messages, refusal(CheckpointError, load_model, source)]


@pytest.mark.parametrize(("kind", "copies"), [("t5", False), ("umt5", True)])
def test_an_encoder_alone_is_refused_by_name(tmp_path: Path, kind: str, copies: bool) -> None:
    architecture = f"{kind.upper()}EncoderModel"
    weights = {
        name: array
        for name, array in t5_weights({**T5, "model_type": kind}).items()
        if not name.startswith("decoder.")
    }
    if copies:
        weights["encoder.embed_tokens.weight"] = weights["shared.weight"]
        weights["decoder.embed_tokens.weight"] = weights["shared.weight"]
    changes = {"model_type": kind, "architectures": [architecture], "num_decoder_layers": None}
    source = write_t5(tmp_path / "t5", changes, weights=weights)
    for message in refusals(source, tmp_path / "out"):
        assert f"{source} holds an encoder alone ({architecture}): take" in message


def test_a_classifier_is_refused_by_name(tmp_path: Path) -> None:
    weights = {f"transformer.{name}": array for name, array in t5_weights(T5).items()}
    weights["classification_head.dense.weight"] = weights["transformer.shared.weight"]
    changes = {"architectures": ["T5ForSequenceClassification"]}
    source = write_t5(tmp_path / "t5", changes, weights=weights)
    for message in refusals(source, tmp_path / "out"):
        assert "gives labels (T5ForSequenceClassification), not text" in message


@pytest.mark.parametrize("kind", ["longt5", "prophetnet", "t5gemma", "whisper", "nllb-moe"])
def test_relatives_that_are_no_t5_are_refused_by_name(tmp_path: Path, kind: str) -> None:
    source = write_t5(tmp_path / "t5")
    config = json.loads((source / "config.json").read_text())
    (source / "config.json").write_text(json.dumps({**config, "model_type": kind}))
    for message in refusals(source, tmp_path / "out"):
        assert f"'{kind}' is not supported" in message


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
def test_scaling_is_a_fact_of_its_own(config: dict[str, Any], scales: bool) -> None:
    assert scales_output(config) is scales
