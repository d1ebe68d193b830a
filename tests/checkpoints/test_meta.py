"""Meta's own layout: what comes out computes what a reference with Meta's rotation does."""

import base64
import json
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest

from mlx_specdec import Options, generate, load
from mlx_specdec.checkpoints import files
from mlx_specdec.checkpoints.formats.meta import read_params
from mlx_specdec.checkpoints.formats.torch import TorchFile
from mlx_specdec.checkpoints.formats.vocabularies import read_tokenizer
from mlx_specdec.conversion.convert import convert
from mlx_specdec.conversion.verify import compare_logits
from mlx_specdec.errors import CheckpointError
from mlx_specdec.text.tokenizer import load_tokenizer

from ..support.checkpoints import refusal
from ..support.models import distance
from ..support.torch_files import save_torch

FIXTURES = Path(__file__).parents[1] / "fixtures"
META = FIXTURES / "meta"


def copy_meta(name: str, root: Path, params: Mapping[str, Any] | None = None) -> Path:
    """Copy a fixture and its tokenizer. params: Changed entries of params.json; None removes
    one."""
    shutil.copytree(META / name, root / name, ignore=shutil.ignore_patterns("*.npz"))
    if not (root / name / "tokenizer.model").is_file():
        shutil.copy(META / "tokenizer.model", root)
    file = root / name / "params.json"
    changed = {**json.loads(file.read_text(encoding="utf-8")), **(params or {})}
    written = {key: value for key, value in changed.items() if value is not None}
    file.write_text(json.dumps(written), encoding="utf-8")
    return root / name


def change_part(file: Path, change: Callable[[dict[str, mx.array]], Any]) -> None:
    """Change the tensors of one part."""
    part = TorchFile(file)
    weights = {name: part.rows(name, 0, info.extent) for name, info in part.infos.items()}
    change(weights)
    save_torch(file, weights)


MODELS = ("llama1", "llama2", "llama3")
FIRST, SECOND = "consolidated.00.pth", "consolidated.01.pth"


def refused(source: Path, out: Path) -> str:
    """Return the message of a conversion that fails and leaves nothing at `out`."""
    text = refusal(CheckpointError, convert, str(source), out)
    assert len(text) < 500 and "/mlx-specdec-" not in text and not out.exists()
    return text


def config_of(directory: Path) -> dict[str, Any]:
    return json.loads((directory / "config.json").read_text(encoding="utf-8"))


@pytest.mark.parametrize("name", MODELS)
def test_a_converted_model_computes_what_the_reference_does(tmp_path: Path, name: str) -> None:
    report = convert(str(META / name), tmp_path / "out", compare_logits=compare_logits)
    assert report.verified.logits == 0.0
    assert distance(report.path, META / name / "expected.npz") < 1e-4


def test_a_model_is_loaded_directly_and_writes_what_its_conversion_writes(tmp_path: Path) -> None:
    out = convert(str(META / "llama3"), tmp_path / "out").path
    options = Options(max_tokens=12, temperature=0.0, regular=True)
    sequences = {
        tuple(generate(load(str(model)), "Once upon a time", options).tokens)
        for model in (META / "llama3", out)
    }
    assert len(sequences) == 1


@pytest.mark.parametrize(
    ("params", "length", "factor"),
    [
        ({"norm_eps": 1e-6}, 2048, None),
        ({"norm_eps": 1e-5}, 4096, None),
        ({"rope_theta": 1_000_000.0}, 16384, None),
        ({"rope_theta": 500_000.0}, 8192, None),
        ({"rope_theta": 12_345.0}, 4096, None),
        ({"rope_theta": 500_000.0, "max_seq_len": 77}, 77, None),
        ({"rope_theta": 500_000.0, "use_scaled_rope": True}, 131_072, 8.0),
        ({"dim": 2048, "n_layers": 16, "use_scaled_rope": True}, 131_072, 32.0),
        ({"dim": 3072, "n_layers": 28, "use_scaled_rope": True}, 131_072, 32.0),
        ({"use_scaled_rope": True, "rope_scaling_factor": 4}, 131_072, 4.0),
    ],
)
def test_lengths_and_scaling_are_those_of_hugging_face(
    params: dict[str, Any], length: int, factor: float | None, tmp_path: Path
) -> None:
    config = described(tmp_path, {"dim": 4096, "n_layers": 32, **params})
    stretched = config.get("rope_scaling", {}).get("factor")
    assert (config["max_position_embeddings"], stretched) == (length, factor)


def described(directory: Path, params: dict[str, Any]) -> dict[str, Any]:
    file = directory / "params.json"
    file.write_text(json.dumps({"n_heads": 32, "n_layers": 2, **params}), encoding="utf-8")
    return read_params(file)


@pytest.mark.parametrize(
    ("inner", "params"),
    [
        (11008, {"dim": 4096, "multiple_of": 256}),
        (28672, {"dim": 8192, "multiple_of": 4096, "ffn_dim_multiplier": 1.3}),
        (8192, {"dim": 2048, "multiple_of": 256, "ffn_dim_multiplier": 1.5}),
        (14336, {"dim": 4096, "hidden_dim": 14336}),
    ],
)
def test_feed_forward_widths_are_those_of_the_published_models(
    inner: int, params: dict[str, Any], tmp_path: Path
) -> None:
    assert described(tmp_path, params)["intermediate_size"] == inner


@pytest.mark.parametrize("stored", [True, False])
def test_a_head_that_repeats_the_embedding_is_left_out(tmp_path: Path, stored: bool) -> None:
    source = copy_meta("llama1", tmp_path)

    def tie(weights: dict[str, mx.array]) -> None:
        weights["layers.0.attention.inner_attention.rope.freqs"] = mx.zeros(4)
        del weights["output.weight"]
        if stored:
            weights["output.weight"] = weights["tok_embeddings.weight"]

    change_part(source / FIRST, tie)
    out = convert(str(source), tmp_path / "out", compare_logits=compare_logits).path
    assert config_of(out)["tie_word_embeddings"] is True
    assert "lm_head.weight" not in files.Weights(out).infos


def test_a_missing_part_is_named(tmp_path: Path) -> None:
    source = copy_meta("llama2", tmp_path)
    (source / FIRST).rename(tmp_path / "kept")
    assert "lacks consolidated.00.pth" in refused(source, tmp_path / "out")
    (tmp_path / "kept").rename(source / FIRST)
    (source / SECOND).rename(source / "consolidated.02.pth")
    assert "lacks consolidated.01.pth" in refused(source, tmp_path / "out")
    (source / "consolidated.02.pth").unlink()
    assert "a part may be missing" in refused(source, tmp_path / "out")


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda w: w.pop("layers.1.ffn_norm.weight"), "lacks layers.1.ffn_norm.weight"),
        (lambda w: w.update(extra=mx.zeros(2)), "holds 'extra'"),
        (
            lambda w: w.update({"output.weight": mx.zeros((340, 32), mx.int32)}),
            "stores output.weight as I32",
        ),
    ],
)
def test_tensors_that_are_not_as_expected_are_named(
    tmp_path: Path, change: Any, words: str
) -> None:
    source = copy_meta("llama1", tmp_path)
    change_part(source / FIRST, change)
    assert words in refused(source, tmp_path / "out")


@pytest.mark.parametrize(
    ("params", "words"),
    [
        ({"dim": 64}, "params.json asks for"),
        ({"n_layers": 1}, "holds 'layers.1."),
        ({"n_kv_heads": 3}, "4 heads that share 3 keys"),
        ({"vocab_size": 32000}, "asks for 32000 tokens where the weights have 340"),
        ({"norm_eps": float("nan")}, "needs norm_eps"),
        ({"moe": {"num_experts": 8}}, "asks for 'moe', which is not supported"),
    ],
)
def test_a_params_json_that_lies_is_one_sentence(
    tmp_path: Path, params: dict[str, Any], words: str
) -> None:
    source = copy_meta("llama2", tmp_path, params)
    text = refused(source, tmp_path / "out")
    assert words in text and str(source) in text


# Meta's tokenizers: the ids that sentencepiece and tiktoken give, out of tokenizer.json.


EXPECTED = json.loads((META / "expected_ids.json").read_text(encoding="ascii"))
SENTENCEPIECE, TIKTOKEN = META / "tokenizer.model", META / "llama3" / "tokenizer.model"


def tokenizer_refusal(file: Path, vocabulary: int = 340) -> str:
    text = refusal(CheckpointError, read_tokenizer, file, vocabulary)
    assert text.startswith(str(file)) and len(text) < len(str(file)) + 300
    return text


@pytest.mark.parametrize(
    ("kind", "file", "size", "ends"),
    [("sentencepiece", SENTENCEPIECE, 340, (1, 2)), ("tiktoken", TIKTOKEN, 576, (320, 321))],
)
def test_ids_are_those_of_the_original_tokenizer_after_bos(
    kind: str, file: Path, size: int, ends: tuple[int, int], tmp_path: Path
) -> None:
    for name, text in read_tokenizer(file, size)[0].items():
        (tmp_path / name).write_text(text, encoding="utf-8")
    tokenizer = load_tokenizer(tmp_path, kind="decoder-only")
    for text, ids in EXPECTED[kind].items():
        assert tokenizer.encode(text) == [ends[0], *ids]
        assert tokenizer.decode([ends[0], *ids, ends[1]]) == text
    assert tokenizer.size == size and {*ends} <= tokenizer.special_ids
    assert ends[1] in tokenizer.eos_token_ids


@pytest.mark.parametrize("since_31", [False, True])
def test_llama_3s_special_tokens_lie_where_its_generation_has_them(since_31: bool) -> None:
    made, ids = read_tokenizer(TIKTOKEN, 576, since_31=since_31)
    added = json.loads(made["tokenizer.json"])["added_tokens"]
    names = {token["content"]: token["id"] - 320 for token in added}
    assert len(names) == 256 and all(token["special"] for token in added)
    for place, name in ((0, "begin_of_text"), (1, "end_of_text"), (6, "start_header_id")):
        assert names[f"<|{name}|>"] == place
    assert names["<|eot_id|>"] == 9
    assert names.get("<|eom_id|>") == (8 if since_31 else None)
    assert names["<|reserved_special_token_2|>"] == (5 if since_31 else 4)
    assert names["<|reserved_special_token_247|>"] == (255 if since_31 else 252)
    assert ids["eos_token_id"] == ([321, 328, 329] if since_31 else [321, 329])


def test_the_tokenizer_beside_the_folder_is_taken_where_the_folder_has_none(tmp_path: Path) -> None:
    source = copy_meta("llama1", tmp_path)
    tokenizer = convert(str(source), tmp_path / "first").path / "tokenizer.json"
    shutil.copy(SENTENCEPIECE, source)
    (tmp_path / "tokenizer.model").unlink()
    assert (convert(str(source), tmp_path / "second").path / tokenizer.name).read_bytes() == (
        tokenizer.read_bytes()
    )


def test_a_tokenizer_of_another_model_is_refused() -> None:
    assert "340 tokens where the model knows 339" in tokenizer_refusal(SENTENCEPIECE, 339)
    assert "320 tokens and 256 more" in tokenizer_refusal(TIKTOKEN, 575)


def line(token: bytes, rank: object) -> bytes:
    return base64.b64encode(token) + f" {rank}\n".encode()


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda data: data[:500], "line"),
        (lambda data: data + line(b"xyz", 400), "line 321"),
        (lambda data: data + line(b"a", 320), "line 321"),
        (lambda data: line(b"\xff", 0) + line(b"b", 1), "single bytes"),
    ],
)
def test_a_damaged_tiktoken_file_is_one_sentence(tmp_path: Path, change: Any, words: str) -> None:
    file = tmp_path / "tokenizer.model"
    file.write_bytes(change(TIKTOKEN.read_bytes()))
    assert words in tokenizer_refusal(file, 1000)
