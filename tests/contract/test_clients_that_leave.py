"""Clients that leave at any time, while others are answered as if they were alone."""

import random
import re
import socket
import struct
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from .several import PROMPT, Several
from .support import post, wait_until

COMPLETIONS = "/v1/completions"
LONG = {"model": "tiny", "prompt": PROMPT, "max_tokens": 3000, "ignore_eos": True}


def settings(seed: int) -> dict[str, Any]:
    """Return the fields of a request; some are greedy, some short, some exact, and some
    do not speculate."""
    dice = random.Random(seed)
    return {
        "prompt": [dice.randrange(3, 300) for _ in range(dice.choice([1, 4, 15, 40]))],
        "max_tokens": dice.choice([3, 12, 30]),
        "temperature": dice.choice([0.0, 0.7, 1.0]),
        "seed": seed,
        **dice.choice([{}, {"top_k": 20}, {"top_p": 0.9}, {"frequency_penalty": 0.7}]),
        **dice.choice([{}, {"speculative": False}, {"speculative": {"max": 1}}]),
        **dice.choice([{}, {"exact": True}]),
    }


def test_a_text_depends_on_prompt_settings_and_seed_alone(several: Several) -> None:
    """Of forty requests over eight clients, a third of which leave while they are answered."""
    bodies = {seed: settings(seed) for seed in range(40)}

    def ask(seed: int) -> str | None:
        body = {"model": "tiny", **bodies[seed], "stream": seed % 2 == 0}
        if seed % 3:
            return str(
                several.server.ok(COMPLETIONS, **{**body, "stream": False})["choices"][0]["text"]
            )
        with several.server.connect(post(COMPLETIONS, body)) as connection:
            if seed % 2 == 0:
                connection.recv(10)
        return None

    with ThreadPoolExecutor(8) as pool:
        texts = dict(enumerate(pool.map(ask, bodies)))
    for seed, body in bodies.items():
        if seed % 3:
            options = {name: value for name, value in body.items() if name != "speculative"}
            assert texts[seed] == several.alone(options.pop("prompt"), **options), seed
    wait_until(lambda: several.server.requests("tiny") == (0, 0))


@pytest.mark.parametrize("stream", [True, False])
def test_a_client_that_leaves_at_any_stage_leaves_nothing_behind(
    several: Several, stream: bool
) -> None:
    server = several.server
    complete = post(COMPLETIONS, {**LONG, "stream": stream, "n": 6})
    head = complete.index(b"\r\n\r\n")
    for stage in (0, 10, head + 4, len(complete) - 1, len(complete)):
        for reset in (True, False):
            with server.connect(complete[:stage]) as connection:
                if stage == len(complete):
                    wait_until(lambda: server.requests("tiny") == (4, 2))
                    if stream:
                        assert connection.recv(100).startswith(b"HTTP/1.1 200")
                if reset:
                    # Closes with a reset, as a process that crashes does.
                    linger = struct.pack("ii", 1, 0)
                    connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, linger)
            wait_until(lambda: server.requests("tiny") == (0, 0))
    assert server.ok(COMPLETIONS, model="tiny", prompt=PROMPT, max_tokens=2)["choices"]


@pytest.mark.parametrize("leaves", [True, False])
def test_the_log_counts_the_drafts_of_finished_and_of_stopped_answers(
    several: Several, leaves: bool
) -> None:
    server = several.server
    body = {**LONG, "max_tokens": 3000 if leaves else 30, "stream": True}
    with server.connect(post(COMPLETIONS, body)) as connection:
        data = b""
        while data.count(b"data: ") < 100 and b"[DONE]" not in data:
            data += connection.recv(1000)
        while not leaves and b"[DONE]" not in data:
            data += connection.recv(1000)
    request = re.findall(rb"x-request-id: (\w+)", data)[0].decode()
    server.waits_for(f"request={request}")
    [line] = [line for line in server.log if f"request={request}" in line]
    [logged] = re.findall(r"draft_n=(\d+) draft_n_accepted=(\d+)", line)
    assert int(logged[0]) >= int(logged[1]) > 0
    if not leaves:
        figures = re.findall(rb'"draft_n": (\d+), "draft_n_accepted": (\d+)', data)
        assert [figure.decode() for figure in figures[-1]] == list(logged)


def test_a_long_prompt_is_prefilled_between_rounds_of_others(several: Several) -> None:
    server, body = several.server, {"model": "chunks", "ignore_eos": True}
    short = {**body, "prompt": PROMPT, "max_tokens": 3000, "stream": True}
    long = {**body, "prompt": [7] * 800, "max_tokens": 1}
    with server.connect(post(COMPLETIONS, short)) as stream, ThreadPoolExecutor(1) as pool:
        assert stream.recv(1000)
        answer, between = pool.submit(server.ok, COMPLETIONS, **long), 0
        while not answer.done():
            between += stream.recv(100_000).count(b"data: ")
    assert between > 20
