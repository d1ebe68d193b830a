"""GGUF: rules of vocabularies, and a note about files that take more memory than bytes."""

from pathlib import Path

import pytest

from mlx_specdec.checkpoints.formats.vocabularies import SPLIT_RULES

FIXTURES = Path(__file__).parents[1] / "fixtures" / "gguf"


def test_rules_for_bytes_are_those_of_transformers_where_it_has_them() -> None:
    name = "transformers.integrations.gguf.gguf_tokenizer_mapping"
    splits = pytest.importorskip(name, exc_type=ImportError).GGUF_PRE_TOKENIZER_SPLITS
    common = SPLIT_RULES.keys() & splits.keys()
    assert len(common) > 15
    for name in common:
        assert SPLIT_RULES[name].get("split", "") == splits[name], name
