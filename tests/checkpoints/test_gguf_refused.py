"""Damaged and hostile GGUF files cost one CheckpointError: no crash, no memory, no half a model."""

from __future__ import annotations

import re
import struct
import tracemalloc
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from mlx_specdec.checkpoints.formats.gguf_header import read_header
from mlx_specdec.checkpoints.source import as_directory
from mlx_specdec.conversion.convert import convert
from mlx_specdec.errors import CheckpointError

from ..support.gguf_files import Gguf, Raw, llama

HUGE = 2**62
LAST, END = "output_norm.weight", 20_736
"""The last tensor of a sound model, and where it lies."""
VOCABULARY: dict[str, Any] = {
    "tokenizer.ggml.model": "llama",
    "tokenizer.ggml.tokens": ["<unk>", "<s>", "</s>", "a", "b", "ab"],
    "tokenizer.ggml.scores": [0.0, 0.0, 0.0, -1.0, -2.0, -3.0],
    "tokenizer.ggml.token_type": [2, 3, 3, 1, 1, 1],
    "tokenizer.ggml.eos_token_id": 2,
}


def changed(
    said: dict[str, Any] | None = None,
    *,
    lists: dict[str, tuple[tuple[int, ...], int, int]] | None = None,
    arrays: dict[str, np.ndarray] | None = None,
    lacks: str = "",
    **header: Any,
) -> Gguf:
    """A sound model but for what is given. said: metadata, where "." stands for llama and "t" for
    tokenizer.ggml, with which a vocabulary comes. lists: how a tensor is listed."""
    said = said or {}
    model = llama(**VOCABULARY if any(key.startswith("t.") for key in said) else {})
    for key, value in said.items():
        model.metadata[re.sub(r"^t\.", "tokenizer.ggml.", re.sub(r"^\.", "llama.", key))] = value
    model.lists |= lists or {}
    model.arrays |= {name: np.float32(array) for name, array in (arrays or {}).items()}
    model.metadata.pop(lacks, None)
    model.arrays.pop(lacks, None)
    vars(model).update(header)
    return model


def listed(*how: Any) -> Gguf:
    """A sound model whose last matrix is listed as (axes, type, offset)."""
    return changed(lists={"output.weight": how})


def raw(kind: int, form: str, *values: int) -> Gguf:
    """A sound model with one more value of the metadata, spelled byte by byte."""
    return changed({"x": Raw(kind, struct.pack(form, *values))})


FACTORS = {"rope_freqs.weight": np.array([1, 2, 3, 4])}
EXPERTS = {".expert_count": 4, ".expert_used_count": 2}
REFUSED: dict[str, Gguf] = {
    "claims 4611686018427387904 keys, more than fit": changed(counts=(11, HUGE)),
    "x claims 4611686018427387904 entries": raw(9, "<IQ", 8, HUGE),
    "4194304 entries of x, more than fit": raw(9, "<IQ", 8, 4 << 20),
    "a string at x claims 46": raw(8, "<Q", HUGE),
    "x is a list of a type": raw(9, "<IQ", 9, 1),
    "x is of an unknown type": raw(77, ""),
    "a string at x is not UTF-8": raw(8, "<QB", 1, 255),
    "a key is called": changed({"x\a": 1}),
    "of GGUF version 4": changed(version=4),
    "aligned to 33": changed({"general.alignment": 33}),
    "has no llama.embedding_length": changed(lacks="llama.embedding_length"),
    "architecture 'mamba'; .* cohere2, gemma, .*, starcoder2, t5 are read": Gguf("mamba"),
    "an encoder alone, which cannot generate text": Gguf("t5encoder"),
    "no model but 'adapter'": changed({"general.type": "adapter"}),
    "lacks the tensor blk.0.ffn_up.weight": changed(lacks="blk.0.ffn_up.weight"),
    "claims the shape": listed((HUGE, HUGE), 1, 0),
    "is truncated in": changed(lists={LAST: ((2**31 - 1,) * 4, 0, END)}),
    "has 0 axes": listed((), 1, 0),
    "no whole number of Q8_0 blocks": listed((33, 40), 8, 0),
    "ggml's type 999": listed((32, 40), 999, 0),
    "Q8_K, .*cannot expand": listed((256, 5), 15, 0),
    "output.weight does not begin where": listed((32, 40), 1, 7),
    "lies on top of": listed((32, 40), 1, 0),
    r"has shape \(31,\)": changed(lists={LAST: ((31,), 0, END)}),
    "holds I32 in output_norm.weight instead": changed(lists={LAST: ((32,), 26, END)}),
    "holds blk.1.x": changed(arrays={"blk.1.x": np.ones(2)}),
    "claims 1000000000 layers": changed({".block_count": 10**9}),
    "0 heads, widths": changed({".attention.head_count": 0}),
    "cannot share 3 heads of keys": changed({".attention.head_count_kv": 3}),
    "keys and values of different widths": changed({".attention.value_length": 4}),
    "it uses 5 of 4 experts": changed({**EXPERTS, ".expert_used_count": 5}),
    "has '4' for .*, which has to be one whole number": changed({".context_length": "4"}),
    r"has \[2, 1\] for": changed({".attention.head_count_kv": [2, 1]}),
    "nan for llama.rope.scaling.factor, .* a number": changed({".rope.scaling.factor": np.nan}),
    "-1.0 for llama.rope.freq_base, .* a number above 0": changed({".rope.freq_base": -1.0}),
    "part of each head": changed({".rope.dimension_count": 4}),
    "positions by 'yarn'": changed({".rope.scaling.type": "yarn"}),
    "scales rotary positions by -2.0": changed({".rope.scaling.factor": -2.0}),
    "positions of a mixtral": changed({**EXPERTS, ".rope.scaling.factor": 2.0}),
    "not those of Llama 3.1": changed(arrays=FACTORS),
    "rope_freqs.weight has shape": changed(arrays={"rope_freqs.weight": np.ones(3)}),
    "vocabulary of the kind 'rwkv'": changed({"t.model": "rwkv"}),
    "rule 'my-own'": changed({"t.model": "gpt2", "t.pre": "my-own"}),
    "6 tokens and 1 scores": changed({"t.scores": [1.0]}),
    "names the token 6 of 6": changed({"t.eos_token_id": 6}),
    "merges 'a c'": changed({"t.model": "gpt2", "t.merges": ["a c"]}),
    "damaged vocabulary": changed({"t.model": "t5", "t.precompiled_charsmap": [255, 255, 255]}),
    "vocabulary has no scores": changed({"t.model": "t5"}, lacks="tokenizer.ggml.scores"),
    "a list of texts": changed({"t.tokens": [1, 2]}),
    "a list of numbers": changed({"t.scores": ["x"]}),
    "true or false": changed({"t.add_space_prefix": 1}),
}


@pytest.mark.parametrize("sentence", REFUSED)
def test_refused_in_one_sentence(sentence: str, tmp_path: Path) -> None:
    file = REFUSED[sentence].write(tmp_path / "m.gguf")
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
    model = llama(**VOCABULARY | {"tokenizer.ggml.tokens": tokens})
    convert(str(model.write(tmp_path / "m.gguf")), tmp_path / "out")
    assert (tmp_path / "out" / "tokenizer.json").stat().st_size > 2_000_000


@pytest.mark.slow
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


@pytest.mark.slow
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
    if data.draw(st.booleans()):
        axes = st.lists(st.sampled_from([0, 1, 32, 33, 40, 2**31 - 1]), max_size=5).map(tuple)
        how = st.tuples(axes, st.integers(0, 40), st.sampled_from([0, 32, 7, 2**40]))
        model.lists["output.weight"] = data.draw(how)
    file = model.write(tmp_path / "m.gguf")
    try:
        convert(str(file), tmp_path / "out", overwrite=True)
    except CheckpointError as problem:
        assert str(problem).startswith(f"{file} ")
