"""Collection of training data: texts, prefixes, and files of hidden states."""

import json
from pathlib import Path

import mlx.core as mx
import numpy as np
import pytest

from mlx_specdec.engine.loading import load
from mlx_specdec.engine.request import encode
from mlx_specdec.errors import PromptError
from mlx_specdec.options import Options
from mlx_specdec.training.collect import SampleFiles, TrainingSample, _pieces, read_samples
from mlx_specdec.training.config import DataConfig

from ..support.models import make_t5


@pytest.mark.parametrize("self_distill", [True, False])
def test_prompts_begin_with_the_prefix_that_the_target_wants(
    self_distill: bool, tmp_path: Path
) -> None:
    directory = make_t5(tmp_path)
    config = json.loads((directory / "config.json").read_text())
    config["task_specific_params"] = {"translation": {"prefix": "translate: "}}
    (directory / "config.json").write_text(json.dumps(config))
    pair = load(directory)
    samples = [
        TrainingSample("some words", "a text"),
        TrainingSample("translate: other words", "a text"),
    ]
    pieces = list(_pieces(pair, samples, DataConfig(length=64, self_distill=self_distill)))
    wanted = [tuple(encode(pair, sample.prompt, Options())) for sample in samples]
    assert [prompt for prompt, _ in pieces] == wanted


# Data files


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


# Files of hidden states


WIDTH = 3


def states(count: int, first: int = 0) -> mx.array:
    numbers = mx.arange(first, first + count * WIDTH)
    return numbers.reshape(count, WIDTH).astype(mx.float32)


def filled(directory: Path) -> SampleFiles:
    rows = SampleFiles(directory, WIDTH, mx.float32)
    rows.append([10, 11, 12], states(3))
    rows.append([], None)
    rows.append([20, 21], states(2, 100))
    return rows


@pytest.mark.parametrize("file", ["states.bin", "tokens.bin", "lengths.bin"])
def test_a_sample_half_written_is_cut_off(file: str, tmp_path: Path) -> None:
    filled(tmp_path)
    with (tmp_path / file).open("ab") as stream:
        stream.write(b"abc")
    again = SampleFiles(tmp_path, WIDTH, mx.float32)
    again.append([30], states(1, 200))
    assert again.lengths.tolist() == [3, 0, 2, 1]
    assert again.states(np.array([5])).tolist() == [[200, 201, 202]]
