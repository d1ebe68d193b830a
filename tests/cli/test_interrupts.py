"""Ctrl-C while a command is inside a call that Python cannot interrupt."""

from __future__ import annotations

import signal
import subprocess
import sys

import pytest

HANGING = 120
"""Seconds that no test waits: the call takes an hour."""
BLOCKED = """
import ctypes, signal, sys
from mlx_specdec.cli import interrupts
signal.signal(signal.SIGINT, signal.default_int_handler)
interrupts.watch()
# As inside MLX, the main thread does not notice signals.
signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGINT])
call = ctypes.CDLL(None).sleep
"""


def start(program: str, before: str = BLOCKED) -> subprocess.Popen[str]:
    """Run a program up to the line that it writes before it calls."""
    words = [sys.executable, "-c", before + program]
    process = subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert process.stdout is not None and process.stdout.readline() == "calling\n"
    return process


def end(process: subprocess.Popen[str]) -> tuple[int, str]:
    """The exit code, and what was written to standard error."""
    try:
        _, err = process.communicate(timeout=HANGING)
    finally:
        process.kill()
    return process.returncode, err


def test_a_call_that_takes_an_hour_is_left() -> None:
    process = start("print('calling', flush=True); call(3600)")
    process.send_signal(signal.SIGINT)
    assert end(process) == (130, "")


def test_every_command_begins_so() -> None:
    words = """
import ctypes, signal
from mlx_specdec.cli import app, start
def main():
    signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGINT])
    print('calling', flush=True)
    ctypes.CDLL(None).sleep(3600)
app.main = main
signal.signal(signal.SIGINT, signal.default_int_handler)
start.main()
"""
    process = start(words, before="")
    process.send_signal(signal.SIGINT)
    assert end(process) == (130, "")


def test_winding_down_has_a_limit_too() -> None:
    program = """
signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGINT])
try:
    print('calling', flush=True)
    while True: pass
except KeyboardInterrupt:
    print('winding down', file=sys.stderr, flush=True)
    call(3600)
"""
    process = start(program)
    process.send_signal(signal.SIGINT)
    assert end(process) == (130, "winding down\n")


@pytest.mark.parametrize(
    "handler", ["lambda *_: None", "signal.SIG_IGN"], ids=["its own", "ignored"]
)
def test_commands_with_a_handler_of_their_own_are_left_alone(handler: str) -> None:
    process = start(
        f"signal.signal(signal.SIGINT, {handler}); print('calling', flush=True); call(3)"
    )
    process.send_signal(signal.SIGINT)
    assert end(process) == (0, "")


def test_a_command_that_goes_on_is_left_alone() -> None:
    program = """
signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGINT])
try:
    print('calling', flush=True)
    while True: pass
except KeyboardInterrupt:
    interrupts.go_on()
call(3)
"""
    process = start(program)
    process.send_signal(signal.SIGINT)
    assert end(process) == (0, "")


def test_a_chat_ends_at_the_second_interrupt_of_one_call() -> None:
    process = start(
        "interrupts.end_at_the_second('wait'); print('calling', flush=True); call(3600)"
    )
    process.send_signal(signal.SIGINT)
    assert process.stderr is not None and process.stderr.readline() == "wait\n"
    process.send_signal(signal.SIGINT)
    assert end(process) == (130, "")
