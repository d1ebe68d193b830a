"""Damaged and hostile GGUF files cost one CheckpointError: no crash, no memory, no half a model."""

from __future__ import annotations

import re
import struct
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from mlx_specdec.checkpoints.convert import convert
from mlx_specdec.checkpoints.formats.gguf.header import read_header
from mlx_specdec.checkpoints.layouts import as_directory
from mlx_specdec.errors import CheckpointError

from .gguf_makers import SMALL, Gguf, Raw, llama

HUGE = 2**62
LAST, END = "output_norm.weight", 20_736
"""The last tensor of a sound model, and where it lies."""
KEY_HEADS = "llama.attention.head_count_kv"
VOCABULARY: dict[str, Any] = {
    "tokenizer.ggml.model": "llama",
    "tokenizer.ggml.tokens": ["<unk>", "<s>", "</s>", "a", "b", "ab"],
    "tokenizer.ggml.scores": [0.0, 0.0, 0.0, -1.0, -2.0, -3.0],
    "tokenizer.ggml.token_type": [2, 3, 3, 1, 1, 1],
    "tokenizer.ggml.eos_token_id": 2,
}


def listed(name: str, axes: tuple[int, ...], kind: int = 1, offset: int = 0) -> Gguf:
    """A sound model but for how one tensor is listed."""
    model = llama()
    model.lists[name] = (axes, kind, offset)
    return model


def without(name: str) -> Gguf:
    """A sound model but for a tensor or a key that is not there."""
    model = llama()
    model.arrays.pop(name, None)
    model.metadata.pop(name, None)
    return model


def extra(name: str, array: np.ndarray, **changes: Any) -> Gguf:
    """A sound model and one more tensor."""
    model = llama(**changes)
    model.arrays[name] = array.astype(np.float32)
    return model


def claiming(tensors: int, keys: int) -> Gguf:
    """A sound model with other counts at its beginning."""
    model = llama()
    model.counts = (tensors, keys)
    return model


def of_version(version: int) -> Gguf:
    """A sound model of another version."""
    model = llama()
    model.version = version
    return model


def worded(**changes: Any) -> Gguf:
    """A sound model with a vocabulary, some of it changed; dots are written as two underscores."""
    values = {f"tokenizer.ggml.{name}": value for name, value in changes.items()}
    return llama(**VOCABULARY | values)


LONG_LIST = Raw(9, struct.pack("<IQ", 8, HUGE))
REFUSED: dict[str, tuple[Callable[[], Gguf], str]] = {
    "keys beyond the file": (lambda: claiming(11, HUGE), "claims 4611686018427387904 keys"),
    "tensors beyond the file": (lambda: claiming(HUGE, 9), "claims 4611686018427387904 tensors"),
    "a list beyond the file": (lambda: llama(x=LONG_LIST), "x claims 46116"),
    "a list of nothing": (lambda: llama(x=Raw(9, struct.pack("<IQ", 8, 4 << 20))), "more than fit"),
    "a string beyond the file": (lambda: llama(x=Raw(8, struct.pack("<Q", HUGE))), "string at x"),
    "a nested list": (lambda: llama(x=Raw(9, struct.pack("<IQ", 9, 1))), "list of a type"),
    "an unknown kind of value": (lambda: llama(x=Raw(77, b"")), "unknown type"),
    "text that is none": (lambda: llama(x=Raw(8, struct.pack("<Q", 1) + b"\xff")), "not UTF-8"),
    "a name that rings": (lambda: llama(**{"x\a": 1}), "a key is called"),
    "version 1": (lambda: of_version(1), "of GGUF version 1"),
    "version 4": (lambda: of_version(4), "of GGUF version 4"),
    "odd alignment": (lambda: llama(**{"general.alignment": 33}), "aligned to 33"),
    "no alignment": (lambda: llama(**{"general.alignment": 0}), "aligned to 0"),
    "huge alignment": (lambda: llama(**{"general.alignment": 2**31}), "not begin where"),
    "no architecture": (lambda: Gguf("", {}, {}), "architecture ''"),
    "another architecture": (lambda: Gguf("mamba"), "cohere2, gemma, .*, starcoder2, t5 are read"),
    "an encoder alone": (lambda: Gguf("t5encoder"), "cannot generate text"),
    "an adapter": (lambda: llama(**{"general.type": "adapter"}), "no model but 'adapter'"),
    "no tensors": (lambda: Gguf("llama", dict(SMALL)), "lacks the tensor token_embd.weight"),
    "an absurd shape": (lambda: listed("output.weight", (HUGE, HUGE)), "claims the shape"),
    "a large shape": (lambda: listed(LAST, (2**31 - 1,) * 4, 0, END), "is truncated in"),
    "no axes": (lambda: listed("output.weight", ()), "has 0 axes"),
    "five axes": (lambda: listed("output.weight", (1,) * 5), "has 5 axes"),
    "half a block": (lambda: listed("output.weight", (33, 40), 8), "whole number of Q8_0 blocks"),
    "a type of its own": (lambda: listed("output.weight", (32, 40), 999), "ggml's type 999"),
    "a type without values": (
        lambda: listed("output.weight", (256, 5), 15),
        "Q8_K, .*cannot expand",
    ),
    "an offset beyond": (lambda: listed("output.weight", (32, 40), 1, 2**40), "is truncated in"),
    "an odd offset": (lambda: listed("output.weight", (32, 40), 1, 7), "does not begin where"),
    "one on another": (lambda: listed("output.weight", (32, 40), 1, 0), "lies on top of"),
    "another shape": (lambda: listed(LAST, (31,), 0, END), r"has shape \(31,\)"),
    "integers": (lambda: listed(LAST, (32,), 26, END), "holds I32 in output_norm.weight instead"),
    "no tensor": (lambda: without("blk.0.ffn_up.weight"), "lacks the tensor blk.0.ffn_up.weight"),
    "a tensor too many": (lambda: extra("blk.1.x", np.ones(2, np.float32)), "holds blk.1.x"),
    "no width": (lambda: without("llama.embedding_length"), "has no llama.embedding_length"),
    "many layers": (lambda: llama(**{"llama.block_count": 10**9}), "claims 1000000000 layers"),
    "no layers": (lambda: llama(**{"llama.block_count": 0}), "claims 0 layers"),
    "no heads": (lambda: llama(**{"llama.attention.head_count": 0}), "0 heads"),
    "heads that do not divide": (lambda: llama(**{KEY_HEADS: 3}), "cannot share 3 heads of keys"),
    "no heads of keys": (lambda: llama(**{KEY_HEADS: 0}), "cannot share 0 heads of keys"),
    "experts out of number": (
        lambda: llama(**{"llama.expert_count": 4, "llama.expert_used_count": 5}),
        "uses 5 of 4 experts",
    ),
    "heads as text": (lambda: llama(**{"llama.attention.head_count": "4"}), "one whole number"),
    "a fraction": (lambda: llama(**{"llama.context_length": 1.5}), "one whole number"),
    "no number": (
        lambda: llama(**{"llama.rope.freq_base": float("nan")}),
        "llama.rope.freq_base, which has to be a number",
    ),
    "layers that differ": (
        lambda: llama(**{"llama.attention.head_count_kv": [2, 1]}),
        "has to be one whole number",
    ),
    "partial rotation": (lambda: llama(**{"llama.rope.dimension_count": 4}), "part of each head"),
    "other scaling": (lambda: llama(**{"llama.rope.scaling.type": "yarn"}), "positions by 'yarn'"),
    "scaled backwards": (
        lambda: llama(**{"llama.rope.scaling.factor": -2.0}),
        "scales rotary positions by -2.0",
    ),
    "a rotary base below zero": (
        lambda: llama(**{"llama.rope.freq_base": -1.0}),
        "has -1.0 for llama.rope.freq_base",
    ),
    "norms without epsilon": (
        lambda: llama(**{"llama.attention.layer_norm_rms_epsilon": 0.0}),
        "which has to be a number above 0",
    ),
    "a token that is a text": (
        lambda: llama(**{"tokenizer.ggml.eos_token_id": "</s>"}),
        "tokenizer.ggml.eos_token_id, which has to be one whole number",
    ),
    "other factors": (
        lambda: extra("rope_freqs.weight", np.array([1, 2, 3, 4], np.float32)),
        "not those of Llama 3.1",
    ),
    "an unknown vocabulary": (lambda: worded(model="rwkv"), "kind 'rwkv'"),
    "an unknown rule": (lambda: worded(model="gpt2", pre="my-own"), "rule 'my-own'"),
    "fewer scores": (lambda: worded(scores=[1.0]), "6 tokens and 1 scores"),
    "no scores": (lambda: llama(**VOCABULARY | {"tokenizer.ggml.scores": [0]}), "1 scores"),
    "a token out of range": (lambda: worded(eos_token_id=6), "names the token 6 of 6"),
    "a merge of nothing": (lambda: worded(model="gpt2", merges=["a c"]), "merges 'a c'"),
    "half a merge": (lambda: worded(model="gpt2", merges=["ab"]), "merges 'ab'"),
    "a damaged map": (
        lambda: worded(model="t5", precompiled_charsmap=[255, 255, 255, 127]),
        "damaged vocabulary",
    ),
    "tokens as numbers": (lambda: worded(tokens=[1, 2]), "list of texts"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_refused_in_one_sentence(case: str, tmp_path: Path) -> None:
    make, sentence = REFUSED[case]
    file = make().write(tmp_path / "m.gguf")
    with pytest.raises(CheckpointError, match=sentence) as caught:
        convert(str(file), tmp_path / "out")
    assert "\n" not in str(caught.value)
    assert len(str(caught.value)) < 400 + len(str(tmp_path))
    assert [each.name for each in tmp_path.iterdir()] == ["m.gguf"]


def test_every_truncation_is_refused(tmp_path: Path) -> None:
    whole = llama(**VOCABULARY).bytes()
    file = tmp_path / "m.gguf"
    for length in [*range(0, 1200, 13), *range(1200, len(whole), 997), len(whole) - 1]:
        file.write_bytes(whole[:length])
        with pytest.raises(CheckpointError):
            convert(str(file), tmp_path / "out")
        assert not (tmp_path / "out").exists()


def test_a_pointer_of_git_lfs_is_named(tmp_path: Path) -> None:
    (tmp_path / "m.gguf").write_bytes(b"version https://git-lfs.github.com/spec/v1\n")
    with pytest.raises(CheckpointError, match="git lfs pull"):
        convert(str(tmp_path / "m.gguf"), tmp_path / "out")


def test_names_are_not_repeated(tmp_path: Path) -> None:
    model = llama()
    text = model.bytes()
    file = tmp_path / "m.gguf"
    file.write_bytes(text.replace(b"blk.0.attn_q.weight", b"blk.0.attn_k.weight"))
    with pytest.raises(CheckpointError, match=r"repeats the tensor blk\.0\.attn_k\.weight"):
        convert(str(file), tmp_path / "out")
    file.write_bytes(text.replace(b"llama.context_length", b"general.architecture"))
    with pytest.raises(CheckpointError, match=r"repeats the key general\.architecture"):
        convert(str(file), tmp_path / "out")


def test_sentences_name_what_the_user_named(tmp_path: Path) -> None:
    file = llama().write(tmp_path / "m.gguf")
    with (
        pytest.raises(CheckpointError, match=f"^{re.escape(str(file))}/config.json is wrong$"),
        as_directory(file) as directory,
    ):
        raise CheckpointError(f"{directory / 'config.json'} is wrong")


def test_values_that_are_not_finite_are_refused(tmp_path: Path) -> None:
    model = llama()
    model.arrays["output.weight"][3, 4] = np.nan
    with pytest.raises(CheckpointError, match="lm_head"):
        convert(str(model.write(tmp_path / "m.gguf")), tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_big_endian_files_are_read_and_packed_ones_refused(tmp_path: Path) -> None:
    big, little = llama(), llama()
    big.order = ">"
    convert(str(big.write(tmp_path / "big.gguf")), tmp_path / "big")
    convert(str(little.write(tmp_path / "little.gguf")), tmp_path / "little")
    name = "model.safetensors"
    assert (tmp_path / "big" / name).read_bytes() == (tmp_path / "little" / name).read_bytes()
    big.lists["output.weight"] = ((32, 40), 8, 0)
    with pytest.raises(CheckpointError, match="big-endian and holds Q8_0"):
        convert(str(big.write(tmp_path / "packed.gguf")), tmp_path / "packed")


def test_a_header_that_lies_costs_no_memory() -> None:
    count = struct.pack("<IQ", 8, 4_000_000)
    text = llama(x=Raw(9, count)).bytes()
    tracemalloc.start()
    with pytest.raises(Exception, match="more than fit"):
        read_header(text)
    assert tracemalloc.get_traced_memory()[1] < 1_000_000
    tracemalloc.stop()


def test_a_token_of_great_length_costs_no_time(tmp_path: Path) -> None:
    tokens = [*VOCABULARY["tokenizer.ggml.tokens"][:5], "a" * 2_000_000]
    model = worded(tokens=tokens)
    convert(str(model.write(tmp_path / "m.gguf")), tmp_path / "out")
    assert (tmp_path / "out" / "tokenizer.json").stat().st_size > 2_000_000


@settings(
    max_examples=150,
    deadline=None,
    derandomize=True,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
@given(data=st.data())
def test_changed_bytes_are_refused_or_harmless(data: st.DataObject, tmp_path: Path) -> None:
    whole = bytearray(llama(**VOCABULARY).bytes())
    for _ in range(data.draw(st.integers(1, 4))):
        place = data.draw(st.integers(0, 1700))
        whole[place] = data.draw(st.integers(0, 255))
    file = tmp_path / "m.gguf"
    file.write_bytes(whole)
    try:
        convert(str(file), tmp_path / "out", overwrite=True)
    except CheckpointError as problem:
        assert "\n" not in str(problem)


ODD = [0, 1, 3, 31, 10**6, 2**31, 0.0, -1.0, 1e30, True, "x", [1, 2], ["a"], [0.5]]


@settings(
    max_examples=150,
    deadline=None,
    derandomize=True,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
@given(data=st.data())
def test_odd_metadata_are_refused_or_harmless(data: st.DataObject, tmp_path: Path) -> None:
    model = llama(**VOCABULARY)
    for key in data.draw(st.lists(st.sampled_from(sorted(model.metadata)), min_size=1, max_size=3)):
        model.metadata[key] = data.draw(st.sampled_from(ODD))
    file = model.write(tmp_path / "m.gguf")
    try:
        convert(str(file), tmp_path / "out", overwrite=True)
    except CheckpointError as problem:
        assert str(problem).startswith(f"{file} ")
