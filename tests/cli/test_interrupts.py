"""What Ctrl-C does while a command is inside a call that Python cannot interrupt."""

import signal
import subprocess
import sys
import time

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
app.main = lambda _: COMMAND
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


def test_a_call_that_does_not_end_is_left() -> None:
    process = start("call()")
    process.send_signal(signal.SIGINT)
    assert end(process) == (130, "")


def test_what_is_to_be_said_at_the_end_is_said() -> None:
    process = start("interrupts.at_end(lambda: 'bye') or call()")
    process.send_signal(signal.SIGINT)
    assert end(process) == (130, "bye\n")


def test_a_chat_ends_at_the_second_interrupt_of_one_call() -> None:
    process = start("interrupts.end_at_the_second('wait') or call()")
    process.send_signal(signal.SIGINT)
    assert process.stderr is not None and process.stderr.readline() == "wait\n"
    process.send_signal(signal.SIGINT)
    assert end(process) == (130, "")


def handled(handler: str) -> subprocess.Popen[str]:
    """A command with a handler of its own."""
    process = start(f"signal.signal(signal.SIGINT, {handler}) and call()")
    process.send_signal(signal.SIGINT)
    return process


def going_on() -> subprocess.Popen[str]:
    loop = LOOP.replace("WHAT", "interrupts.go_on(); call()")
    process = start("command()", loop, "looping\n")
    process.send_signal(signal.SIGINT)
    return process


def reading_again() -> subprocess.Popen[str]:
    """A chat that reads again says nothing about an interrupt."""
    loop = """
def command():
    interrupts.end_at_the_second("wait")
    try:
        print("looping", flush=True)
        while True: pass
    except KeyboardInterrupt:
        pass  # a library has swallowed it, or the answer has just ended
    generate._read()
"""
    main = "start.main()\n"
    harness = BLOCKED.replace("app,", "app, generate,").replace("COMMAND", "command()")
    words = [sys.executable, "-c", harness.replace(main, "") + loop + main]
    pipe = subprocess.PIPE
    process = subprocess.Popen(words, stdin=pipe, stdout=pipe, stderr=pipe, text=True)
    assert process.stdout is not None and process.stdout.readline() == "looping\n"
    process.send_signal(signal.SIGINT)
    return process


def in_quick_succession() -> subprocess.Popen[str]:
    """Each interrupt is judged by its own time, and not by when the one before it was."""
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
    return process


def test_commands_that_deal_with_interrupts_are_left_alone() -> None:
    """They end well when their calls do, long after they could have been ended."""
    others = (going_on, reading_again, in_quick_succession)
    processes = [*map(handled, ("lambda *_: None", "signal.SIG_IGN")), *(run() for run in others)]
    time.sleep(5.5)
    for process in processes:
        _, err = process.communicate(timeout=HANGING)
        assert (process.returncode, err) == (0, ""), process.args
