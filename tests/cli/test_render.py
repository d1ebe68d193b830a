"""What is said while something takes long, and output to closed streams and to terminals."""

import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest

from mlx_specdec.cli import loading, render
from mlx_specdec.engine import loading as engine_loading

from ..support.commands import Run
from ..support.shipped import python_path


def wait_until(holds: Callable[[], bool]) -> None:
    end = time.monotonic() + 30
    while not holds():
        assert time.monotonic() < end
        time.sleep(0.001)


@pytest.fixture
def lines(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Lines on standard error. The time after which silence is broken is over at once."""
    told: list[str] = []
    monkeypatch.setattr(render, "tell", told.append)
    monkeypatch.setattr(render, "A_LINE_AFTER", 0.0)
    return told


def test_a_long_silence_is_broken_by_one_line(
    lines: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    with render.slowly("loading weights"):
        wait_until(lambda: bool(lines))
    assert lines == ["loading weights"]
    monkeypatch.setattr(render, "A_LINE_AFTER", 3600.0)
    with render.slowly("loading more"):
        pass
    assert lines == ["loading weights"]


def test_a_bar_that_is_shown_gets_a_label_instead(
    lines: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    labels: list[str] = []
    monkeypatch.setattr(render._Signs, "bar", staticmethod(labels.append))
    with render.slowly("comparing"):
        wait_until(lambda: bool(labels))
    assert labels == ["comparing"] and not lines


def test_both_models_are_named_while_they_load_without_a_terminal(
    lines: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    class Loaded:
        notes = ("a note",)

    def load(*names: Any, **settings: Any) -> Loaded:
        wait_until(lambda: bool(lines))
        return Loaded()

    monkeypatch.setattr(engine_loading, "load", load)
    loading.load_pair("target.gguf", "draft.gguf")
    assert lines == ["loading target.gguf and draft.gguf", "a note"]


def test_a_conversion_says_what_follows_the_full_bar(t5: Path, tmp_path: Path) -> None:
    from mlx_specdec.conversion.convert import convert

    entered: list[str] = []

    def working(doing: str) -> nullcontext[None]:
        entered.append(doing)
        return nullcontext()

    convert(str(t5), tmp_path / "converted", working=working)
    assert [doing.split()[0] for doing in entered] == ["comparing", "computing"]


FIXTURES = Path(__file__).parents[1] / "fixtures"
SOURCE = FIXTURES / "t5" / "umt5-tied"
ESCAPE = "\x1b]0;mine\x07\x1b[31m"


def shell(line: str, **environment: str) -> subprocess.CompletedProcess[bytes]:
    """Run a line in which $M is the program."""
    program = f"{sys.executable} -m mlx_specdec"
    settings = {**os.environ, "M": program, "PYTHONPATH": python_path(), **environment}
    return subprocess.run(["bash", "-c", line], env=settings, capture_output=True, check=False)


@pytest.mark.slow
@pytest.mark.parametrize(
    "line",
    [
        "$M inspect $S >&-",
        "$M inspect $S --json <&- >&- 2>&-",
        "$M inspect $S | head -c 1 >$O.txt; exit ${PIPESTATUS[0]}",
        "$M inspect $S --json | true; exit ${PIPESTATUS[0]}",
        "$M convert --model $S --mlx-path $O 2>&-",
        "$M convert --model $S --mlx-path $O 2>&1 | true; exit ${PIPESTATUS[0]}",
    ],
)
def test_closed_streams_are_no_errors(tmp_path: Path, line: str) -> None:
    done = shell(line, S=str(SOURCE), O=str(tmp_path / "out"))
    assert done.returncode == 0 and b"Traceback" not in done.stderr + done.stdout, done.stderr
    if "convert --model" in line:
        assert (tmp_path / "out" / "model.safetensors").is_file()


@pytest.mark.slow
@pytest.mark.skipif(sys.platform == "darwin", reason="all names of files are UTF-8 on macOS")
def test_paths_that_are_no_text_in_any_encoding(tmp_path: Path) -> None:
    source = os.fsencode(tmp_path) + b"/a\xff\xfe"
    shutil.copytree(os.fsencode(FIXTURES / "t5-families" / "t5"), source)
    for encoding in ("utf-8", "ascii"):
        given = {"S": os.fsdecode(source), "PYTHONIOENCODING": encoding}
        shown = shell("$M inspect $S", **given)
        assert shown.returncode == 0 and b"Traceback" not in shown.stderr, shown.stderr
    shown = shell("$M inspect $S --json", **given)
    assert json.loads(shown.stdout)["path"].encode("utf-8", "surrogateescape") == source
    out = tmp_path / "out"
    done = shell("$M convert --model $S --mlx-path $O", O=str(out), **given)
    assert done.returncode == 0, done.stderr
    output = json.loads((out / "provenance.json").read_text(encoding="utf-8"))
    assert output["source"]["name"].encode("utf-8", "surrogateescape") == b"a\xff\xfe"
    wrong = shell("$M inspect $S/none", S=os.fsdecode(source))
    assert wrong.returncode == 2 and wrong.stderr.count(b"\n") == 1


def test_names_of_directories_give_the_terminal_no_orders(run: Run, tmp_path: Path) -> None:
    source = tmp_path / f"model{ESCAPE}\u202e"
    shutil.copytree(SOURCE, source)
    done = run("convert", "--model", source, "--mlx-path", tmp_path / f"out{ESCAPE}")
    assert done.code == 0 and done.err.count("\n") > 2
    assert all(line.isprintable() for line in done.err.splitlines())
    (source / "model.safetensors").write_bytes(b"1234")
    for command in (("inspect",), ("convert", "--mlx-path", tmp_path / "b", "--model")):
        done = run(*command, source)
        assert done.code == 2 and done.err.count("\n") == 1
        assert done.err.strip().isprintable() and "model\\x1b]0;mine" in done.err


def test_what_a_configuration_says_gives_the_terminal_no_orders(run: Run, tmp_path: Path) -> None:
    source = Path(shutil.copytree(SOURCE, tmp_path / "source"))
    config = json.loads((source / "config.json").read_text())
    for key, value in (
        ("feed_forward_proj", ESCAPE),
        ("architectures", [ESCAPE]),
        ("quantization", {"bits": ESCAPE, "group_size": 64}),
        ("model_type", ESCAPE),
        ("model_file", ESCAPE),
    ):
        changed = {**config, key: value}
        if key == "model_file":
            changed["model_type"] = "llama"
        (source / "config.json").write_text(json.dumps(changed))
        shown = run("inspect", source)
        assert shown.code == 0 and "\x1b" not in shown.out and "\x07" not in shown.out
        done = run("convert", "--model", source, "--mlx-path", tmp_path / "out", "--overwrite")
        assert all(line.isprintable() for line in done.err.splitlines()), done.err
