"""Files of texts: their formats, their order, and what is refused."""

from pathlib import Path

import pytest

from mlx_specdec.errors import PromptError
from mlx_specdec.training.collect import TrainingSample, read_samples


def read(tmp_path: Path, text: str | bytes, seed: int = 0) -> list[TrainingSample]:
    file = tmp_path / "data"
    file.write_bytes(text if isinstance(text, bytes) else text.encode())
    return read_samples(file, seed)


def test_plain_files_hold_one_text_a_line(tmp_path: Path) -> None:
    found = read(tmp_path, "one\n\n  \ntwo\\nlines\r\n")
    assert sorted(found, key=lambda sample: sample.prompt) == [
        TrainingSample("one"),
        TrainingSample("two\nlines"),
    ]


def test_json_lines_may_have_targets(tmp_path: Path) -> None:
    lines = [
        '{"prompt": "a", "target": "b", "other": 1}',
        '{"text": "c"}',
        '{"turns": ["d", "e"]}',
    ]
    found = read(tmp_path, "\n".join(lines))
    assert sorted(found, key=lambda sample: sample.prompt) == [
        TrainingSample("a", "b"),
        TrainingSample("c"),
        TrainingSample("d"),
    ]


def test_the_order_is_shuffled_and_decided_by_the_seed(tmp_path: Path) -> None:
    text = "\n".join(str(number) for number in range(50))
    first = read(tmp_path, text)
    assert first == read(tmp_path, text)
    assert first != read(tmp_path, text, seed=1)
    assert [sample.prompt for sample in first] != text.split("\n")


@pytest.mark.parametrize(
    ("text", "match"),
    [
        ("", "nothing to train on"),
        (" \n\n", "nothing to train on"),
        (b"\xff\xfe\x00", "is not UTF-8"),
        ('{"prompt": "a"}\nb', "line 2 of .* is not JSON"),
        ('{"prompt": "a"}\n[1]', "line 2 of .* must be an object"),
        ('{"prompt": 3}', 'line 1 of .* needs "prompt"'),
        ('{"prompt": "  "}', 'line 1 of .* needs "prompt"'),
        ('{"turns": []}', 'line 1 of .* needs "prompt"'),
        ('{"prompt": "a", "target": 1}', '"target" must be one'),
    ],
)
def test_what_cannot_be_learned_from_is_refused(
    text: str | bytes, match: str, tmp_path: Path
) -> None:
    with pytest.raises(PromptError, match=match):
        read(tmp_path, text)
