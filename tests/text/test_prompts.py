"""Prompt files: both formats are read, and whatever is wrong with one is named with its line."""

import re
from pathlib import Path

import pytest

from mlx_specdec.errors import DocumentError, PromptError
from mlx_specdec.text import prompts as documents
from mlx_specdec.text.prompts import Prompt, read_prompts
from mlx_specdec.text.tokenizer import Tokenizer, load_tokenizer

from ..support.tokenizers import byte_level

SHIPPED = Path(__file__).resolve().parents[2] / "prompts"


def written(directory: Path, text: str | bytes) -> Path:
    file = directory / "prompts"
    file.write_bytes(text if isinstance(text, bytes) else text.encode())
    return file


def test_every_line_is_a_prompt_and_empty_ones_do_not_count(tmp_path: Path) -> None:
    file = written(tmp_path, "one\n\n  \ntwo\\nlines\r\nthree\u2028still three\n")
    assert [prompt.turns for prompt in read_prompts(file)] == [
        ("one",),
        ("two\nlines",),
        ("three\u2028still three",),
    ]
    assert read_prompts(file, limit=1) == [Prompt(("one",))]


def test_json_lines_have_prompts_turns_and_categories(tmp_path: Path) -> None:
    file = written(
        tmp_path,
        '\ufeff{"prompt": "a\\\\n", "category": "x"}\n'
        '\n{"question_id": 81, "category": "writing", "turns": ["b", "c"], "reference": null}\n'
        '{"turns": ["d"]}',
    )
    assert read_prompts(file) == [
        Prompt(("a\\n",), "x"),
        Prompt(("b", "c"), "writing"),
        Prompt(("d",)),
    ]


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        (b"\xff\xfe", "not UTF-8"),
        ('{"prompt": "a"}\n{"prompt": ', "line 2"),
        ('{"prompt": "a"}\n\n[1]', "line 3 .* object"),
        ('{"turns": "a"}', "list of strings"),
        ('{"turns": ["a", 1]}', "list of strings"),
        ('{"prompt": null}', "list of strings"),
        ('{"prompt": "a", "category": 3}', "category"),
        ('{"prompt": ' + "[" * 100_000, "line 1"),
    ],
)
def test_what_is_wrong_is_named(tmp_path: Path, text: str | bytes, complaint: str) -> None:
    with pytest.raises(PromptError, match=complaint):
        read_prompts(written(tmp_path, text))


@pytest.mark.parametrize("name", ["translation.jsonl", "python.jsonl", "code_edits.jsonl"])
def test_the_shipped_files_can_be_read_and_have_categories(name: str) -> None:
    prompts = read_prompts(SHIPPED / name)
    assert len(prompts) >= 24
    assert len({prompt.turns for prompt in prompts}) == len(prompts)
    by_category = [prompt.category for prompt in prompts]
    assert None not in by_category
    assert all(by_category.count(category) >= 4 for category in by_category)


# Documents become token ids whatever their size; what is no document is named.


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    return load_tokenizer(byte_level(tmp_path_factory.mktemp("bytes")), kind="decoder-only")


def write(place: Path, content: str | bytes) -> Path:
    place.write_bytes(content if isinstance(content, bytes) else content.encode())
    return place


def test_a_long_document_is_read_in_pieces_and_comes_out_whole(
    tmp_path: Path, tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    text = "def read(path):\n    return '🙂 é'\n" * 40 + "a" * 300 + "\nend, without a line's end"
    file = write(tmp_path / "long.py", text)
    monkeypatch.setattr(documents, "PIECE", re.compile(r"(?s).{1,61}[^\n]{0,61}\n?"))
    (ids,) = documents.tokens([file], tokenizer)
    assert tokenizer.decode(ids.tolist()) == text
    assert not tokenizer.special_ids & set(ids.tolist())


def test_documents_that_are_too_large_are_refused_before_they_are_read(
    tmp_path: Path, tokenizer: Tokenizer
) -> None:
    file = tmp_path / "huge.txt"
    with file.open("wb") as stream:
        stream.truncate(documents.LARGEST_DOCUMENTS)
    with pytest.raises(DocumentError, match="have 256 MiB, and at most 256"):
        documents.tokens([file, write(tmp_path / "more.txt", "x")], tokenizer)
