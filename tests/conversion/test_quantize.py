"""Number formats, mixed recipes and unpacking: what arrives, and what loads again."""

import json
import math
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx_lm.utils
import pytest
from mlx.utils import tree_flatten
from mlx_lm.convert import mixed_quant_predicate_builder

from mlx_specdec.checkpoints import disk as sizes
from mlx_specdec.checkpoints import files
from mlx_specdec.checkpoints.quantization import MIXED, MODES, Quantization
from mlx_specdec.conversion.convert import convert
from mlx_specdec.conversion.inspect import inspect
from mlx_specdec.conversion.verify import (
    LONGEST,
    PAIRS,
    PASSAGE,
    TextChange,
    compare_logits,
    compare_text,
)
from mlx_specdec.errors import OptionError
from mlx_specdec.models.loading import load_model
from mlx_specdec.text.tokenizer import load_tokenizer

from ..support import tiny
from ..support.checkpoints import write_t5
from ..support.models import make_llama, make_t5

FORMATS = ("mxfp4", "nvfp4", "mxfp8")


def entry_of(directory: Path) -> dict[str, Any]:
    return json.loads((directory / "config.json").read_text())["quantization"]


def read(directory: Path) -> dict[str, mx.array]:
    return dict(files.tensors(directory))


@pytest.mark.parametrize("mode", FORMATS)
def test_a_t5_in_every_number_format_loads_and_stays_near(tmp_path: Path, mode: str) -> None:
    source = write_t5(tmp_path / "t5")
    report = convert(
        str(source), tmp_path / "out", quantize=True, q_mode=mode, compare_logits=compare_logits
    )
    how = MODES[mode]
    entry, after, before = entry_of(tmp_path / "out"), read(tmp_path / "out"), read(source)
    assert (entry["bits"], entry["group_size"], entry["mode"]) == (how.bits, how.group_size, mode)
    assert not any(name.endswith(".biases") for name in after)
    name = "encoder.block.0.layer.0.SelfAttention.q"
    values = how.dequantize(after[f"{name}.weight"], after[f"{name}.scales"], None)
    assert mx.array_equal(values, how.dequantize(*_packed(how, before[f"{name}.weight"]), None))
    if mode != "mxfp8":
        assert entry["shared"] == {"bits": 8, "group_size": 32, "mode": "mxfp8"}
    assert report.verified.logits is not None and report.differences.quantized is not None
    assert 0 < report.differences.quantized < 1.5
    for dtype in ("auto", "float32"):
        load_model(tmp_path / "out", dtype=dtype)
    assert inspect(str(tmp_path / "out")).parameters == report.parameters


def _packed(how: Quantization, rows: mx.array) -> tuple[mx.array, mx.array]:
    parts = how.quantize(rows)
    return parts["weight"], parts["scales"]


HOWS = [{"q_mode": mode} for mode in FORMATS]
HOWS += [{"q_group_size": 32, "quant_predicate": recipe} for recipe in sorted(MIXED)]


@pytest.mark.parametrize("how", HOWS, ids=str)
def test_a_llama_is_quantized_as_mlx_lm_does(tmp_path: Path, how: dict[str, Any]) -> None:
    source = tiny.write("llama", tmp_path / "llama")
    report = convert(str(source), tmp_path / "out", quantize=True, **how)
    reference, config = mlx_lm.utils.load_model(source)
    if recipe := how.get("quant_predicate"):
        predicate = mixed_quant_predicate_builder(recipe, reference, 32)
        reference, _ = mlx_lm.utils.quantize_model(
            reference, config, 32, 4, quant_predicate=predicate
        )
        assert recipe in report.describe()
    else:
        reference, _ = mlx_lm.utils.quantize_model(reference, config, None, None, how["q_mode"])
    model, _ = mlx_lm.utils.load_model(tmp_path / "out")
    mine, expected = (dict(tree_flatten(network.parameters())) for network in (model, reference))
    assert mine.keys() == expected.keys()
    assert all(mx.array_equal(mine[name], expected[name]).item() for name in mine)


def test_a_mixed_t5_has_wider_values_in_some_blocks_and_never_a_narrow_embedding(
    tmp_path: Path,
) -> None:
    deep = {"num_layers": 8, "num_decoder_layers": 8}
    source = write_t5(tmp_path / "t5", deep)
    convert(
        str(source),
        tmp_path / "out",
        quantize=True,
        q_group_size=32,
        quant_predicate="mixed_3_6",
        compare_logits=compare_logits,
    )
    entry = entry_of(tmp_path / "out")
    assert entry["bits"] == 3 and entry["shared"]["bits"] == 8
    wide = {path for path, how in entry.items() if isinstance(how, dict) and how["bits"] == 6}
    blocks = {int(path.split(".")[2]) for path in wide}
    assert blocks == {0, 3, 6, 7}
    assert {path.rpartition(".")[2] for path in wide} == {"v", "wo"}
    load_model(tmp_path / "out")


@pytest.mark.parametrize("mode", ["affine", "mxfp4"])
def test_dequantizing_gives_the_values_that_were_quantized(tmp_path: Path, mode: str) -> None:
    source = write_t5(tmp_path / "t5")
    size = {"q_group_size": 32} if mode == "affine" else {}
    convert(str(source), tmp_path / "q", quantize=True, q_mode=mode, **size)
    report = convert(
        str(tmp_path / "q"),
        tmp_path / "out",
        dtype="float32",
        dequantize=True,
        compare_logits=compare_logits,
    )
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert "quantization" not in config and "quantization_config" not in config
    packed, dequantized = read(tmp_path / "q"), read(tmp_path / "out")
    assert dequantized.keys() == read(source).keys()
    for name in (name for name in packed if name.endswith(".scales")):
        path = name.removesuffix(".scales")
        how = Quantization.of(entry_of(tmp_path / "q"), path)
        weight, biases = packed[f"{path}.weight"], packed.get(f"{path}.biases")
        values = how.dequantize(weight, packed[name], biases)
        assert mx.array_equal(dequantized[f"{path}.weight"], values).item()
    assert report.differences.plain == 0 and report.verified.logits < 1e-3
    assert report.tensor_report.computed and "dequantized" in report.describe()


WIDE = {"hidden_size": 64, "intermediate_size": 128, "head_dim": 16}


def quantized_by_mlx_lm(tmp_path: Path, predicate: str, group_size: int | None) -> tuple[Path, int]:
    """A llama as mlx-lm's own converter writes it, and how many weights it has."""
    source = tiny.write("llama", tmp_path / "llama", **WIDE)
    model, config = mlx_lm.utils.load_model(source)
    count = sum(array.size for _, array in tree_flatten(model.parameters()))
    how = mixed_quant_predicate_builder(predicate, model, group_size) if predicate else None
    model, config = mlx_lm.utils.quantize_model(model, config, group_size, 4, quant_predicate=how)
    if predicate:
        config["quantization"]["group_size"] = group_size  # as mlx_lm.convert has it
    mlx_lm.utils.save_model(tmp_path / "theirs", model)
    mlx_lm.utils.save_config(config, tmp_path / "theirs" / "config.json")
    return tmp_path / "theirs", count


@pytest.mark.parametrize(("predicate", "group_size"), [("", 32), ("", 64), ("mixed_3_6", None)])
def test_what_mlx_lm_quantized_is_counted_and_dequantized_as_mlx_lm_does(
    tmp_path: Path, predicate: str, group_size: int | None
) -> None:
    source, count = quantized_by_mlx_lm(tmp_path, predicate, group_size)
    copied = convert(str(source), tmp_path / "copy")
    assert copied.parameters == count and 3 < copied.bits_per_weight < 12
    found = inspect(str(source))
    assert (found.parameters, found.problem) == (count, "")
    assert f"in groups of {group_size or 64}" in found.quantization
    dequantized = convert(str(source), tmp_path / "whole", dequantize=True)
    assert dequantized.parameters == count and dequantized.bits_per_weight > 16
    reference = mlx_lm.utils.dequantize_model(mlx_lm.utils.load_model(source)[0])
    found = read(tmp_path / "whole")
    for name, array in tree_flatten(reference.parameters()):
        assert mx.allclose(found[name], array, atol=1e-6).item()


def test_a_group_that_divides_few_rows_is_reported(tmp_path: Path) -> None:
    source = tiny.write("llama", tmp_path / "llama", **WIDE)
    few = convert(str(source), tmp_path / "few", quantize=True, q_group_size=128)
    assert any("quantized only" in note and "groups of 128" in note for note in few.notes)
    most = convert(str(source), tmp_path / "most", quantize=True, q_group_size=64)
    assert not any("quantized only" in note for note in most.notes)


def test_a_source_that_grows_is_announced_with_both_sizes_before_the_work(tmp_path: Path) -> None:
    source = Path(__file__).parents[1] / "fixtures" / "gguf" / "llama-q5.gguf"
    announced: list[str] = []
    steps: list[int] = []
    report = convert(
        str(source),
        tmp_path / "out",
        announce=lambda sentence: announced.append(f"{sentence} after {len(steps)}"),
        progress=lambda done, total: steps.append(done),
    )
    (sentence,) = announced
    assert sizes.show(source.stat().st_size) in sentence and sizes.show(report.nbytes) in sentence
    assert "Q5_0" in sentence and sentence.endswith("after 0")
    announced.clear()
    convert(str(source), tmp_path / "q", quantize=True, q_group_size=32, announce=announced.append)
    assert not announced


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"quantize": True, "dequantize": True}, "not both"),
        ({"dequantize": True}, "not quantized"),
        ({"q_mode": "mxfp4"}, "--quantize"),
        ({"quantize": True, "q_mode": "fp3"}, "q-mode"),
        ({"quantize": True, "q_mode": "mxfp4", "q_bits": 8}, "leave --q-bits"),
        ({"quantize": True, "quant_predicate": "mixed_3_6", "q_bits": 4}, "q-bits"),
        ({"quantize": True, "q_group_size": 128}, "smaller --q-group-size"),
        ({"dtype": "float64"}, "dtype must be one of"),
        ({"shard_bytes": 0}, "at least one byte"),
        ({"upload_repo": "../../etc"}, "USER/NAME"),
    ],
)
def test_what_contradicts_itself_is_one_sentence_before_anything_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, options: dict[str, Any], says: str
) -> None:
    source = write_t5(tmp_path / "t5")
    monkeypatch.chdir(tmp_path)
    with pytest.raises(OptionError, match=says):
        convert(str(source), **options)
    assert not (tmp_path / "weights").exists()
    assert convert(str(source)).path == Path("weights/t5")


def test_a_recipe_that_does_not_suit_a_model_is_refused(tmp_path: Path) -> None:
    source = str(tiny.write("mamba2", tmp_path / "mamba2"))
    how = {"quantize": True, "q_group_size": 32, "quant_predicate": "mixed_3_6"}
    with pytest.raises(OptionError, match="does not suit"):
        convert(source, tmp_path / "out", **how)


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
