"""Conversion of drafters on hidden states: what is written drafts as its source did."""

from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx_lm.utils
import pytest

from mlx_specdec import OptionError, Options, Request, convert, generate_many, load

from ..support import mtp, tiny
from ..support.checkpoints import write_t5
from ..support.speculators import VOCABULARY, WIDTH, dflash, eagle3, speculators_eagle3
from .converted import SMALL, config_of, dequantized, provenance, same, tensors
from .scores import letters
from .support import ROOT, command

MAKERS = {
    "eagle3": eagle3,
    "speculators": speculators_eagle3,
    "dflash": dflash,
    "dflash2": lambda directory, **options: dflash(directory, second=True, **options),
    "dspark": lambda directory, **options: dflash(directory, markov="rnn", **options),
    "encoder": lambda directory, **options: dflash(directory, encoder=WIDTH, **options),
}
NARROW = {"hidden_size": 16, "num_attention_heads": 2, "head_dim": 8, "vocab_size": 40}
"""The target of the drafter in tests/fixtures."""
MTP_FILE = "mtp.safetensors"


@pytest.fixture(scope="module")
def targets(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("targets")
    llama = tiny.write("llama", root / "llama", num_hidden_layers=3)
    t5 = write_t5(root / "t5", {"num_decoder_layers": 3}, tokenizer=False)
    narrow = tiny.write("llama", root / "narrow", num_hidden_layers=6, **NARROW)
    made = {"decoder": llama, "encoder": t5, "narrow": narrow}
    sizes = {"narrow": NARROW["vocab_size"]}
    return {name: letters(made[name], sizes.get(name, VOCABULARY)) for name in made}


def drafts(target: Path, drafter: Path) -> tuple[int, ...]:
    """Return tokens that are mostly the drafter's own: every draft token is accepted."""
    options = Options(max_tokens=12, num_draft=3, delta=1.0)
    request = Request([3, 14, 15, 9, 1], options, ignore_eos=True)
    [result] = generate_many(load(target, drafter, dtype="float32"), [request])
    assert result.stats.accepted == result.stats.drafted >= 8
    return result.tokens


@pytest.mark.parametrize("name", MAKERS)
def test_every_kind_is_converted_and_quantized_but_for_fc_and_norms(
    name: str, targets: dict[str, Path], tmp_path: Path
) -> None:
    source, result, whole = MAKERS[name](tmp_path / "s"), tmp_path / "r", tmp_path / "whole"
    target = targets["encoder" if name == "encoder" else "decoder"]
    expected = drafts(target, source)
    assert drafts(target, convert(str(source), tmp_path / "same").path) == expected
    flags = ("--quantize", "--q-bits", 8, "--q-group-size", 32)
    done = command("convert", "--model", source, "--mlx-path", result, *flags)
    assert done.code == 0 and "norms and fc" in done.err
    stored = tensors(result)
    assert stored["fc.weight"].dtype == stored["norm.weight"].dtype == mx.float32
    assert stored["layers.0.self_attn.q_proj.weight"].dtype == mx.uint32
    quantized = drafts(target, result)
    convert(str(result), whole, quantize="none", dtype="float32")
    assert "quantization" not in config_of(whole)
    assert drafts(target, whole) == quantized
    assert same(tensors(whole), dequantized(stored, config_of(result)))
    with pytest.raises(OptionError, match="quantized already"):
        load(target, result, draft_q_bits=4)


def test_a_torch_archive_becomes_safetensors(targets: dict[str, Path], tmp_path: Path) -> None:
    source = ROOT / "tests" / "fixtures" / "drafters" / "eagle3-authors"
    convert(str(source), tmp_path / "result")
    report = provenance(tmp_path / "result")["tensors"]
    assert report["renamed"]["midlayer.hidden_norm.weight"] == "layers.0.hidden_norm.weight"
    assert set(report["dropped"]) <= {"t2d", "embed_tokens.weight"}
    assert not list((tmp_path / "result").glob("*.bin"))
    assert drafts(targets["narrow"], tmp_path / "result") == drafts(targets["narrow"], source)


# Layers for multi-token prediction


@pytest.mark.parametrize("family", ["glm4_moe", pytest.param("qwen3_next", marks=pytest.mark.slow)])
def test_mlx_lm_reads_a_conversion_as_one_without_the_layers(family: str, tmp_path: Path) -> None:
    wide = {"hidden_size": 64, "moe_intermediate_size": 64, "intermediate_size": 64}
    source = mtp.write(family, tmp_path / "source", **wide)
    bare = mtp.write(family, tmp_path / "bare", layer=False, **wide)
    flags = ("--quantize", "--q-group-size", 32)
    done = command("convert", "--model", source, "--mlx-path", tmp_path / "with", *flags)
    convert(str(bare), tmp_path / "plain", **SMALL)
    copied: Any = mx.load(str(tmp_path / "with" / MTP_FILE))
    assert (
        f"the layers for multi-token prediction ({len(copied)} tensors) are kept as they are, in "
        f"{MTP_FILE}" in done.err
    )
    stored = tensors(source)
    assert all(mx.array_equal(array, stored[name]) for name, array in copied.items())
    assert not {*copied} & {*provenance(tmp_path / "with")["tensors"]["dropped"]}
    assert same(tensors(tmp_path / "with"), tensors(tmp_path / "plain"))
    tokens = mx.array([[3, 14, 15, 9]])
    one, two = (mlx_lm.utils.load_model(tmp_path / name)[0](tokens) for name in ("with", "plain"))
    assert mx.array_equal(one, two)
