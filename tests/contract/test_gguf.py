"""GGUF files become models that compute what torch computes with the same weights."""

import io
import json
import re
import shutil
import struct
import tempfile
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import sentencepiece
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer

from mlx_specdec import CheckpointError, Options, convert, generate, load

from ..support.gguf_files import Gguf, Raw, halves, llama
from .converted import provenance, tensors
from .scores import distance, letters
from .support import ROOT, quick

FIXTURES = ROOT / "tests" / "fixtures" / "gguf"
MODELS = sorted(file.stem for file in FIXTURES.glob("*.gguf"))
CONVERTED = ("llama-bf16", "t5-copied-head", "t5-f16", "umt5-f32")
"""Files that are converted, too. test_gguf_blocks.py converts those whose blocks MLX has."""
TEXTS = json.loads((FIXTURES / "texts.json").read_text(encoding="utf-8"))


QUICK = ("llama-q4_0", "llama-q5", "mixtral", "qwen2-q8_0", "t5-q8_0", "umt5-f32")


@pytest.mark.parametrize("name", quick(MODELS, *QUICK))
def test_log_probabilities_are_those_of_torch_before_and_after_a_conversion(
    name: str, tmp_path: Path
) -> None:
    expected, place = FIXTURES / f"{name}.npz", tmp_path / "loaded"
    with np.load(expected) as arrays:
        size = arrays["log_p"].shape[1]
    shutil.copy(FIXTURES / f"{name}.gguf", letters(place, size))
    assert distance(place, expected) < 1e-4
    if name in CONVERTED:
        convert(str(FIXTURES / f"{name}.gguf"), tmp_path / "out")
        assert provenance(tmp_path / "out")["result"]["largest_difference"] == 0
        assert distance(letters(tmp_path / "out", size), expected) < 1e-4


@pytest.mark.parametrize("name", sorted(TEXTS))
def test_tokenizer_splits_text_as_the_original_does(name: str, tmp_path: Path) -> None:
    convert(str(FIXTURES / f"{name}.gguf"), tmp_path / "out")
    for source in (FIXTURES / f"{name}.gguf", tmp_path / "out"):
        pair = load(source)
        for text, ids in TEXTS[name]["pairs"]:
            assert pair.tokenizer.encode(text) == ids
        assert pair.tokenizer.size == TEXTS[name]["size"]
        assert pair.eos_token_ids == ({2} if name == "llama-f16" else {1})


def test_a_directory_with_one_file_and_parts_give_the_same(tmp_path: Path) -> None:
    """Parts may be links to another place."""
    single, parts, links = (tmp_path / name for name in ("whole", "parts", "links"))
    for directory in (single, parts, links):
        directory.mkdir()
    model = llama()
    model.write(single / "m.gguf")
    for number, part in enumerate(halves(model), 1):
        name = f"m-{number:05d}-of-00002.gguf"
        part.write(parts / name)
        (links / name).symlink_to(part.write(tmp_path / f"drive-{name}"))
    for source in (single, parts, parts / "m-00002-of-00002.gguf", links):
        convert(str(source), tmp_path / "out", overwrite=True)
        found = tensors(tmp_path / "out")
        assert len(found) == len(model.arrays)
        assert np.array_equal(np.array(found["lm_head.weight"]), model.arrays["output.weight"])


# Tokenizers rebuilt from GGUF metadata split any text as the originals do.


LLAMA = {
    "model_type": "bpe",
    "byte_fallback": True,
    "normalization_rule_name": "identity",
    "split_digits": True,
    "remove_extra_whitespaces": False,
    "allow_whitespace_only_pieces": True,
}
KINDS: dict[str, dict[str, Any]] = {
    "llama": LLAMA,
    "without prefix": {**LLAMA, "add_dummy_prefix": False},
    "without double spaces": {**LLAMA, "remove_extra_whitespaces": True},
}
LETTERS = "abcdefghi XYZ  .,'\"\n\t0123456789éüœßﬁ½Ⅳａ日本語🙂–’"

PRINTED = st.characters(exclude_categories=("C",), exclude_characters="<")
"""Nothing that sentencepiece removes: of a text of nothing else it leaves a space. Nothing like
<unk> either, which is a token to us, as to transformers, and text to sentencepiece."""


def metadata_of(processor: sentencepiece.SentencePieceProcessor) -> dict[str, Any]:
    """Return a SentencePiece vocabulary in the form of a GGUF file's metadata."""
    every = range(processor.get_piece_size())
    kinds = {2: processor.is_unknown, 3: processor.is_control}
    kinds |= {5: processor.is_unused, 6: processor.is_byte}
    types = [next((n for n, kind in kinds.items() if kind(id)), 1) for id in every]
    ids = {"bos": processor.bos_id(), "eos": processor.eos_id(), "unknown": processor.unk_id()}
    spaced = processor.encode("x  x", out_type=str)
    values = {
        "model": "llama",
        "tokens": [processor.id_to_piece(id) for id in every],
        "scores": [float(processor.get_score(id)) for id in every],
        "token_type": types,
        "add_space_prefix": spaced[0].startswith("▁"),
        "remove_extra_whitespaces": 2 * "▁" not in "".join(spaced),
        **{f"{name}_token_id": id for name, id in ids.items() if id >= 0},
    }
    return {f"tokenizer.ggml.{name}": value for name, value in values.items()}


@cache
def pair(kind: str) -> tuple[sentencepiece.SentencePieceProcessor, Tokenizer]:
    """A vocabulary of this file, and the same of a converted GGUF file."""
    lines = Path(__file__).read_text(encoding="utf-8").splitlines()
    written = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter([line for line in lines if line.strip()]),
        model_writer=written,
        vocab_size=600,
        hard_vocab_limit=False,
        minloglevel=2,
        **KINDS[kind],
    )
    processor = sentencepiece.SentencePieceProcessor(model_proto=written.getvalue())
    model = llama(**metadata_of(processor))
    for name in ("token_embd.weight", "output.weight"):
        model.arrays[name] = np.zeros((processor.get_piece_size(), 32), np.float16)
    with tempfile.TemporaryDirectory() as place:
        convert(str(model.write(Path(place) / "m.gguf")), Path(place) / "out")
        return processor, Tokenizer.from_file(f"{place}/out/tokenizer.json")


@pytest.mark.parametrize("kind", KINDS)
@settings(max_examples=60, deadline=None, derandomize=True)
@given(text=st.one_of(st.text(LETTERS, max_size=40), st.text(PRINTED, max_size=12)))
def test_any_text_is_split_the_same(kind: str, text: str) -> None:
    processor, rebuilt = pair(kind)
    found = rebuilt.encode(text, add_special_tokens=False).ids
    expected = processor.encode(text)
    # Of pieces whose scores add up to the same sum, the order of adding decides which are taken.
    scores = [sum(map(processor.get_score, ids)) for ids in (found, expected)]
    assert found == expected or (
        sorted(found) == sorted(expected) and scores[0] == pytest.approx(scores[1], abs=1e-5)
    )


# Damaged and hostile GGUF files cost one CheckpointError: no crash, no memory, no half a model.


HUGE = 2**62
LAST, END = "output_norm.weight", 20_736
"""The last tensor of a sound model, and its position."""
VOCABULARY: dict[str, Any] = {
    "tokenizer.ggml.model": "llama",
    "tokenizer.ggml.tokens": ["<unk>", "<s>", "</s>", "a", "b", "ab"],
    "tokenizer.ggml.scores": [0.0, 0.0, 0.0, -1.0, -2.0, -3.0],
    "tokenizer.ggml.token_type": [2, 3, 3, 1, 1, 1],
    "tokenizer.ggml.eos_token_id": 2,
}


def changed(
    metadata: dict[str, Any] | None = None,
    *,
    lists: dict[str, tuple[tuple[int, ...], int, int]] | None = None,
    arrays: dict[str, np.ndarray] | None = None,
    lacks: str = "",
    **header: Any,
) -> Gguf:
    """Return a sound model with changes. metadata: Changed entries; "." stands for llama, and "t"
    for tokenizer.ggml, which adds a vocabulary. lists: Name -> (axes, type, offset) of a tensor."""
    metadata = metadata or {}
    model = llama(**VOCABULARY if any(key.startswith("t.") for key in metadata) else {})
    for key, value in metadata.items():
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


@pytest.mark.parametrize(
    ("pieces", "types", "ends"),
    [
        (["<|im_end|>", "<|endoftext|>", "<|eot_id|>"], [3, 3, 3], [2, 6, 5, 7]),
        (["<|im_end|>", "<|endoftext|>", "x"], [1, 4, 3], [2]),
        (["<|end|>", "<|return|>", "x"], [3, 3, 3], [2, 6]),
        (["<|end|>", "x", "y"], [3, 3, 3], [2, 5]),
    ],
)
def test_control_tokens_with_known_names_end_a_sequence(
    pieces: list[str], types: list[int], ends: list[int], tmp_path: Path
) -> None:
    tokens = ["<unk>", "<s>", "<done>", "a", "b", *pieces]
    metadata = {"t.tokens": tokens, "t.scores": [0.0] * 8, "t.token_type": [2, 3, 3, 1, 1, *types]}
    file = changed(metadata).write(tmp_path / "m.gguf")
    convert(str(file), tmp_path / "out")
    generation = json.loads((tmp_path / "out" / "generation_config.json").read_text())
    assert generation["eos_token_id"] == (ends if len(ends) > 1 else ends[0])
    loaded = load(file)
    assert loaded.eos_token_ids == set(ends)
    for end in ends:
        options = Options(max_tokens=9, logit_bias={end: 1e6}, chat_template=False)
        result = generate(loaded, [3, 4], options)
        assert (result.tokens, result.finish_reason) == ((end,), "eos")


REFUSED: dict[str, Gguf] = {
    "truncated at x": raw(8, "<Q", HUGE),
    "x is of an unknown type": raw(77, ""),
    "a string at x is not UTF-8": raw(8, "<QB", 1, 255),
    "of GGUF version 4": changed(version=4),
    "has no llama.embedding_length": changed(lacks="llama.embedding_length"),
    "architecture 'mamba'; .* cohere2, gemma, .*, starcoder2, t5 are read": Gguf("mamba"),
    "an encoder alone, which cannot generate text": Gguf("t5encoder"),
    "no model but 'adapter'": changed({"general.type": "adapter"}),
    "lacks the tensor blk.0.ffn_up.weight": changed(lacks="blk.0.ffn_up.weight"),
    "is truncated in": changed(lists={LAST: ((2**31 - 1,) * 4, 0, END)}),
    "no whole Q8_0 blocks": listed((33, 40), 8, 0),
    "ggml's type 999": listed((32, 40), 999, 0),
    r"has shape \(31,\)": changed(lists={LAST: ((31,), 0, END)}),
    "as files of 2023": changed(arrays={"blk.0.ffn_gate.0.weight": np.ones(2)}),
    "holds blk.1.x": changed(arrays={"blk.1.x": np.ones(2)}),
    "has '4' for .* instead of int": changed({".context_length": "4"}),
    "part of each head": changed({".rope.dimension_count": 4}),
    "positions by 'yarn'": changed({".rope.scaling.type": "yarn"}),
    "not those of Llama 3.1": changed(arrays=FACTORS),
    "vocabulary of the kind 'rwkv'": changed({"t.model": "rwkv"}),
    "rule 'my-own'": changed({"t.model": "gpt2", "t.pre": "my-own"}),
    "6 tokens and 1 scores": changed({"t.scores": [1.0]}),
    "damaged vocabulary": changed({"t.model": "t5", "t.precompiled_charsmap": [255, 255, 255]}),
}


@pytest.mark.parametrize("sentence", REFUSED)
def test_refused_in_one_sentence(sentence: str, tmp_path: Path) -> None:
    file = REFUSED[sentence].write(tmp_path / "m.gguf")
    for act in (load, lambda name: convert(str(name), tmp_path / "out")):
        with pytest.raises(CheckpointError, match=sentence) as caught:
            act(file)
        assert "\n" not in str(caught.value)
        assert len(str(caught.value)) < 400 + len(str(tmp_path))
        assert [file.name for file in tmp_path.iterdir()] == ["m.gguf"]


def test_every_truncation_is_refused(tmp_path: Path) -> None:
    content = llama(**VOCABULARY).bytes()
    file = tmp_path / "m.gguf"
    for length in [*range(0, 1200, 13), *range(1200, len(content), 997), len(content) - 1]:
        file.write_bytes(content[:length])
        with pytest.raises(CheckpointError):
            convert(str(file), tmp_path / "out")
        assert not (tmp_path / "out").exists()
