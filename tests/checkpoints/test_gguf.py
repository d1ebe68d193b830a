"""GGUF: rules of vocabularies, and how often blocks are decoded and in how much memory."""

import tracemalloc
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from mlx_specdec import convert
from mlx_specdec.checkpoints.formats.gguf_blocks import TYPES, BlockType
from mlx_specdec.checkpoints.formats.vocabularies import SPLIT_RULES
from mlx_specdec.checkpoints.source import as_directory
from mlx_specdec.conversion import convert as conversion
from mlx_specdec.models.loading import load_model

FIXTURES = Path(__file__).parents[1] / "fixtures" / "gguf"


def test_rules_for_bytes_are_those_of_transformers_where_it_has_them() -> None:
    name = "transformers.integrations.gguf.gguf_tokenizer_mapping"
    splits = pytest.importorskip(name, exc_type=ImportError).GGUF_PRE_TOKENIZER_SPLITS
    common = SPLIT_RULES.keys() & splits.keys()
    assert len(common) > 15
    for name in common:
        assert SPLIT_RULES[name].get("split", "") == splits[name], name


@pytest.mark.parametrize(("name", "compared"), [("llama-q4_0", 0), ("mixtral", 0), ("t5-q4_1", 2)])
def test_each_matrix_is_decoded_once(
    name: str, compared: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The head and the embedding of a T5 are compared as well."""
    decoded: list[int] = []
    real = BlockType.decode

    def decode(self: BlockType, raw: np.ndarray[Any, Any]) -> Any:
        decoded.append(raw.ctypes.data)
        return real(self, raw)

    monkeypatch.setattr(BlockType, "decode", decode)
    monkeypatch.setattr(conversion, "QUICK_BYTES", 0)  # neither source nor result is loaded
    source = FIXTURES / f"{name}.gguf"
    convert(str(source), tmp_path / "out")
    assert sum(count > 1 for count in Counter(decoded).values()) == compared < len(decoded)
    decoded.clear()
    with as_directory(source) as directory:
        load_model(directory)
    assert sum(count > 1 for count in Counter(decoded).values()) == compared < len(decoded)


@pytest.mark.parametrize("name", ["Q4_K", "Q6_K"])
def test_decoding_takes_little_more_memory_than_its_result(name: str) -> None:
    raw = np.zeros((1024, 64 * TYPES[name].nbytes), np.uint8)
    TYPES[name].decode(raw[:1])  # imports what it needs
    tracemalloc.start()
    parts, _ = TYPES[name].decode(raw)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 1.25 * sum(part.nbytes for part in parts.values())
