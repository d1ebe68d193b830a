"""Prompt files: both formats are read, and whatever is wrong with one is named with its line."""

from __future__ import annotations

from pathlib import Path

import pytest

from mlx_specdec.errors import PromptError
from mlx_specdec.text.prompts import Prompt, read_prompts

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
        ("", "no prompts"),
        (" \n\n", "no prompts"),
        (b"\xff\xfe", "not UTF-8"),
        ('{"prompt": "a"}\n{"prompt": ', "line 2"),
        ('{"prompt": "a"}\nplain', "line 2 .* not JSON"),
        ('{"prompt": "a", "prompt": "b"}', 'line 1 .* "prompt" twice'),
        ('{"prompt": "a"}\n\n[1]', "line 3 .* object"),
        ('{"text": "a"}', "either"),
        ('{"prompt": "a", "turns": ["a"]}', "either"),
        ('{"turns": "a"}', "list of strings"),
        ('{"turns": []}', "list of strings"),
        ('{"turns": ["a", 1]}', "no string"),
        ('{"prompt": " "}', "empty"),
        ('{"prompt": null}', "empty or no string"),
        ('{"prompt": "a", "category": 3}', "category"),
        ('{"prompt": ' + "[" * 100_000, "line 1"),
    ],
)
def test_what_is_wrong_is_named(tmp_path: Path, text: str | bytes, complaint: str) -> None:
    with pytest.raises(PromptError, match=complaint):
        read_prompts(written(tmp_path, text))


def test_a_file_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(PromptError, match=r"nowhere\.txt"):
        read_prompts(tmp_path / "nowhere.txt")
    with pytest.raises(PromptError, match="cannot read"):
        read_prompts(tmp_path)


@pytest.mark.parametrize("name", ["/dev/zero", "/dev/null"])
def test_a_device_is_not_read(name: str) -> None:
    with pytest.raises(PromptError, match=f"{name} is a device, maybe endless"):
        read_prompts(Path(name))


@pytest.mark.parametrize("name", ["translation.jsonl", "python.jsonl", "code_edits.jsonl"])
def test_the_shipped_files_can_be_read_and_have_categories(name: str) -> None:
    prompts = read_prompts(SHIPPED / name)
    assert len(prompts) >= 24
    assert len({prompt.turns for prompt in prompts}) == len(prompts)
    by_category = [prompt.category for prompt in prompts]
    assert None not in by_category
    assert all(by_category.count(category) >= 4 for category in by_category)
