"""GGUF: rules of vocabularies, and a note about files that take more memory than bytes."""

from pathlib import Path

import pytest

from mlx_specdec.checkpoints.formats.vocabularies import SPLIT_RULES
from mlx_specdec.checkpoints.source import as_directory
from mlx_specdec.models import number_format
from mlx_specdec.models.loading import load_model

FIXTURES = Path(__file__).parents[1] / "fixtures" / "gguf"


@pytest.mark.parametrize(
    ("name", "is_noted"), [("llama-q5", True), ("llama-f16", False), ("llama-f32", False)]
)
def test_a_file_that_grows_in_memory_is_announced(
    name: str, is_noted: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(number_format, "NOTED_ABOVE", 1)
    with as_directory(FIXTURES / f"{name}.gguf") as directory:
        note = load_model(directory).note
    assert (f"{name}.gguf: its " in note and "in memory" in note) is is_noted


def test_rules_for_bytes_are_those_of_transformers_where_it_has_them() -> None:
    name = "transformers.integrations.gguf.gguf_tokenizer_mapping"
    splits = pytest.importorskip(name, exc_type=ImportError).GGUF_PRE_TOKENIZER_SPLITS
    common = SPLIT_RULES.keys() & splits.keys()
    assert len(common) > 15
    for name in common:
        assert SPLIT_RULES[name].split == splits[name], name
