"""The way in: which Python runs, what Ctrl-C does before anything is imported, prompts by pipe."""

import io
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from mlx_specdec.cli import generate as prompt
from mlx_specdec.cli import render
from mlx_specdec.cli.generate import read_prompt
from mlx_specdec.interfaces.records import Step

from ..support.commands import Run, Terminal

ROOT = Path(__file__).parents[2]
MODULES = ("__init__", "__main__", "version")
HOSTILE = "\x1b[31mred\x07\x9b5n\r\n\ttab \u202f!"


def shell(line: str, *, cwd: Path = ROOT, **environment: str) -> subprocess.CompletedProcess[str]:
    """Run a line in which $P is this Python."""
    given = {**os.environ, "P": sys.executable, **environment}
    return subprocess.run(
        ["bash", "-c", line], env=given, cwd=cwd, capture_output=True, text=True, timeout=120
    )


@pytest.fixture
def clone(tmp_path: Path) -> Path:
    """The part of a clone that a Python without dependencies reads."""
    for name in ("main.py", "convert.py", *(f"mlx_specdec/{n}.py" for n in MODULES)):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        shutil.copy(ROOT / name, tmp_path / name)
    (tmp_path / "mlx_specdec" / "cli").mkdir()
    for name in ("__init__.py", "start.py"):
        shutil.copy(ROOT / "mlx_specdec" / "cli" / name, tmp_path / "mlx_specdec" / "cli" / name)
    return tmp_path


@pytest.mark.parametrize("program", ["main.py", "convert.py", "-m mlx_specdec"])
def test_a_python_without_the_dependencies_says_what_to_run(clone: Path, program: str) -> None:
    done = shell(f"$P -S {program} x", cwd=clone, PYTHONPATH="")
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith("error: ") and done.stderr.count("\n") == 1
    assert "no typer" in done.stderr and "./scripts/setup.sh" in done.stderr


@pytest.mark.parametrize("program", ["main.py", "convert.py", "-m mlx_specdec"])
def test_the_environment_beside_the_program_is_used(clone: Path, program: str) -> None:
    python = clone / ".venv" / "bin" / "python"
    python.parent.mkdir(parents=True)
    python.write_text('#!/bin/sh\nprintf "%s|" "$@"\n')
    python.chmod(0o755)
    done = shell(f"$P -S {program} 'a b' -m 3", cwd=clone, PYTHONPATH="")
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout == f"-S|{program.replace(' ', '|')}|a b|-m|3|"


def test_ctrl_c_during_the_first_imports_is_quiet(tmp_path: Path) -> None:
    (tmp_path / "typer.py").write_text(
        "import os, signal, time\nos.kill(os.getpid(), signal.SIGINT)\ntime.sleep(60)\n"
    )
    done = shell("$P main.py x", PYTHONPATH=str(tmp_path))
    assert (done.returncode, done.stdout, done.stderr) == (130, "", "")


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("$P main.py - <&-", "standard input is empty"),
        ("$P main.py $'\\xff'", "not UTF-8"),
        ("printf '\\xff' | $P main.py", "not UTF-8"),
        ("printf '\\xff' | LC_ALL=C $P main.py -", "not UTF-8"),
        ("$P main.py --model /nowhere <&-", "no prompt"),
        ("$P main.py --model /nowhere < <(true)", "standard input is empty"),
        ("echo | $P main.py --model /nowhere", "standard input is empty"),
    ],
)
def test_prompts_that_are_none_are_reported_in_a_line(line: str, said: str) -> None:
    done = shell(line)
    assert (done.returncode, done.stdout) == (2, "")
    assert said in done.stderr and done.stderr.count("\n") == 1, done.stderr


def test_a_pipe_and_a_file_are_prompts(run: Run, t5: Path) -> None:
    wanted = run("generate", "Les pates a midi", "--model", t5, "--quiet", "-m", 9).out
    settings = f"$P main.py --model {t5} --quiet -m 9"
    for line in (f"echo 'Les pates a midi' | {settings}", f"{settings} <<< 'Les pates a midi'"):
        assert shell(line).stdout == wanted


def test_an_argument_leaves_the_pipe_alone(run: Run, t5: Path) -> None:
    wanted = run("generate", "Les pates", "--model", t5, "--quiet", "-m", 9).out
    done = shell(f"echo other | ($P main.py 'Les pates' --model {t5} --quiet -m 9; cat)")
    assert done.stdout == wanted + "other\n"


def test_a_silent_pipe_that_stays_open_holds_nobody_up(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(prompt, "PIPE_SECONDS", 0.01)
    out, into = os.pipe()
    with open(out, encoding="utf-8") as silent, open(into, "w", encoding="utf-8") as writer:
        monkeypatch.setattr(sys, "stdin", silent)
        assert read_prompt(None, None, None) is None
        assert "- waits for it" in capsys.readouterr().err
        writer.write("late")
        writer.close()
        assert read_prompt(None, None, None) == "late"


def shown(stream: io.StringIO, **settings: bool) -> str:
    printer = render.TextPrinter(stream, **settings)
    printer.show(Step(tokens=(1, 2), accepted=1, text=2 * HOSTILE, accepted_chars=len(HOSTILE)))
    printer.finish()
    return stream.getvalue()


def test_text_gives_the_terminal_no_orders(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.delenv("NO_COLOR", raising=False)
    output = shown(Terminal())
    assert output == 2 * "\\x1b[31mred\\x07\\x9b5n\\r\n\ttab \u202f!" + "\n"
    marked = shown(Terminal(), show_drafts=True)
    assert marked.replace(render.GREEN_UNDERLINED, "").replace(render.PLAIN, "") == output


# Ctrl-C while a command is inside a call that Python cannot interrupt.


HANGING = 300
"""Seconds that no test waits: the call would not end."""
BLOCKED = """
import ctypes, signal, sys
from mlx_specdec.cli import app, interrupts, start

def call():
    # As inside MLX, the main thread does not notice signals. Who reads the first line knows that it
    # is in the call, which ends when somebody reads the rest.
    signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGINT])
    text = b"calling\\n" + bytes(1 << 20)
    ctypes.CDLL(None).write(1, text, len(text))

signal.signal(signal.SIGINT, signal.default_int_handler)
app.main = lambda: COMMAND
start.main()
"""
LOOP = """
def command():
    try:
        print("looping", flush=True)
        while True: pass
    except KeyboardInterrupt:
        WHAT
"""


def start(command: str, before: str = "", line: str = "calling\n") -> subprocess.Popen[str]:
    """Run a command up to a line that it writes."""
    words = [sys.executable, "-c", before + BLOCKED.replace("COMMAND", command)]
    process = subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert process.stdout is not None and process.stdout.readline() == line
    return process


def end(process: subprocess.Popen[str]) -> tuple[int, str]:
    """The exit code, and what was written to standard error."""
    try:
        process.wait(HANGING)
    finally:
        process.kill()
    _, err = process.communicate()
    return process.returncode, err


def check_left_alone(process: subprocess.Popen[str]) -> None:
    """It ends well when its call does, long after it could have been ended."""
    process.send_signal(signal.SIGINT)
    time.sleep(2.5)
    out, err = process.communicate(timeout=HANGING)
    assert (process.returncode, err) == (0, "") and out


def test_a_call_that_does_not_end_is_left() -> None:
    process = start("call()")
    process.send_signal(signal.SIGINT)
    assert end(process) == (130, "")


def test_what_is_to_be_said_at_the_end_is_said() -> None:
    process = start("interrupts.at_end(lambda: 'bye') or call()")
    process.send_signal(signal.SIGINT)
    assert end(process) == (130, "bye\n")


@pytest.mark.parametrize(
    "handler", ["lambda *_: None", "signal.SIG_IGN"], ids=["its own", "ignored"]
)
def test_commands_with_a_handler_of_their_own_are_left_alone(handler: str) -> None:
    check_left_alone(start(f"signal.signal(signal.SIGINT, {handler}) and call()"))


def test_a_command_that_goes_on_is_left_alone() -> None:
    loop = LOOP.replace("WHAT", "interrupts.go_on(); call()")
    check_left_alone(start("command()", loop, "looping\n"))


def test_a_chat_ends_at_the_second_interrupt_of_one_call() -> None:
    process = start("interrupts.end_at_the_second('wait') or call()")
    process.send_signal(signal.SIGINT)
    assert process.stderr is not None and process.stderr.readline() == "wait\n"
    process.send_signal(signal.SIGINT)
    assert end(process) == (130, "")


def test_nothing_is_said_about_an_interrupt_once_a_chat_reads_again() -> None:
    loop = """
def command():
    interrupts.end_at_the_second("wait")
    try:
        print("looping", flush=True)
        while True: pass
    except KeyboardInterrupt:
        pass  # a library has swallowed it, or the answer has just ended
    chat._read()
"""
    main = "start.main()\n"
    harness = BLOCKED.replace("import app,", "import app, chat,").replace("COMMAND", "command()")
    words = [sys.executable, "-c", harness.replace(main, "") + loop + main]
    pipe = subprocess.PIPE
    process = subprocess.Popen(words, stdin=pipe, stdout=pipe, stderr=pipe, text=True)
    assert process.stdout is not None and process.stdout.readline() == "looping\n"
    process.send_signal(signal.SIGINT)
    time.sleep(2.5)
    _, err = process.communicate(timeout=HANGING)
    assert (process.returncode, err) == (0, "")


def test_interrupts_in_quick_succession_that_a_chat_deals_with_do_not_end_it() -> None:
    """Each is judged by its own time, and not by when the one before it was."""
    command = """
def command():
    for _ in range(3):
        try:
            print("looping", flush=True)
            while True: pass
        except KeyboardInterrupt:
            interrupts.go_on()
    interrupts.end_at_the_second("wait")
    call()
"""
    process = start("command()", command, "looping\n")
    assert process.stdout is not None
    for _ in range(2):
        process.send_signal(signal.SIGINT)
        assert process.stdout.readline() == "looping\n"
    process.send_signal(signal.SIGINT)
    time.sleep(5.5)
    out, err = process.communicate(timeout=HANGING)
    assert (process.returncode, err) == (0, "") and out


# The progress bar on a terminal.


@pytest.mark.parametrize("in_bytes", [True, False])
def test_a_bar_in_bytes_says_how_many_and_how_long(
    monkeypatch: pytest.MonkeyPatch, in_bytes: bool
) -> None:
    terminal = Terminal()
    monkeypatch.setattr(sys, "stderr", terminal)
    monkeypatch.setenv("COLUMNS", "120")
    monkeypatch.setenv("TERM", "xterm")
    with render.progress("converting", in_bytes=in_bytes) as report:
        report(1_500_000_000, 6_000_000_000)
    shown = terminal.getvalue()
    assert "converting" in shown and ":--" in shown
    assert ("1.5/6.0 GB" in shown) is in_bytes


@pytest.mark.parametrize(
    ("in_bytes", "lines"),
    [
        (True, ["converting: 1.0 GB of 9.0 GB", "checking: 6.0 GB of 9.0 GB"]),
        (False, ["converting: 1000000000 of 9000000000", "checking: 6000000000 of 9000000000"]),
    ],
)
def test_without_a_terminal_there_is_a_line_after_two_seconds_and_one_a_minute(
    in_bytes: bool, lines: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    stream, clock = io.StringIO(), iter([0.0, 3.0, 3.0, 60.0, 62.0, 64.0, 64.0])
    monkeypatch.setattr(sys, "stderr", stream)
    with render.progress("converting", in_bytes=in_bytes, clock=clock.__next__) as report:
        for done in (1, 2, 3):
            report(done * 10**9, 9 * 10**9)
        report(6 * 10**9, 9 * 10**9, "checking")
        report(9 * 10**9, 9 * 10**9)
    assert stream.getvalue().splitlines() == lines
