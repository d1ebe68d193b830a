"""What only a real connection shows: who leaves, who is slow, and what no client ever sends."""

from __future__ import annotations

import random
import socket
import struct
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from typing import Any

import huggingface_hub
import pytest

pytest.importorskip("uvicorn", reason="the extra server is not installed")


from mlx_specdec.engine.pair import Pair
from mlx_specdec.serve.engine import Engine
from mlx_specdec.serve.settings import Limits

from ..support.serving import Place, answer_of, listening, post, wait_until

TEXT = "def read_lines"


@pytest.fixture(scope="module")
def place(engine: Engine) -> Iterator[Place]:
    with listening(engine, Limits(body_seconds=0.5, body_bytes=10_000)) as place:
        yield place


def settings(seed: int) -> dict[str, Any]:
    """What one request asks for; some are greedy, some short, some do not speculate."""
    dice = random.Random(seed)
    return {
        "prompt": [dice.randrange(3, 300) for _ in range(dice.choice([1, 4, 15, 40]))],
        "max_tokens": dice.choice([3, 12, 30]),
        "temperature": dice.choice([0.0, 0.7, 1.0]),
        "seed": seed,
        **dice.choice([{}, {"top_k": 20}, {"top_p": 0.9}, {"frequency_penalty": 0.7}]),
        **dice.choice([{}, {"speculative": False}, {"speculative": {"max": 1}}]),
    }


def test_a_text_depends_on_prompt_settings_and_seed_alone(
    place: Place, alone: Callable[..., str]
) -> None:
    """Of forty requests over eight clients, a third of which leave while they are answered."""
    asked = {seed: settings(seed) for seed in range(40)}
    wanted = {}
    for seed, body in asked.items():
        own = {name: value for name, value in body.items() if name != "speculative"}
        wanted[seed] = alone(own.pop("prompt"), **own)
    got: dict[int, Any] = {}

    def client(first: int) -> None:
        for seed in range(first, 40, 8):
            if seed % 3 == 0:
                with place.connect() as connection:
                    connection.sendall(post({**asked[seed], "stream": seed % 2 == 0}))
                    time.sleep(0.002 * (seed % 7))
                    if seed % 2 == 0:
                        connection.recv(10)
            else:
                got[seed] = place.ask(**asked[seed])

    clients = [threading.Thread(target=client, args=[first]) for first in range(8)]
    for each in clients:
        each.start()
    for each in clients:
        each.join()
    assert {status for status, _ in got.values()} == {200}
    texts = {seed: told["choices"][0]["text"] for seed, (_, told) in got.items()}
    assert texts == {seed: wanted[seed] for seed in asked if seed % 3}
    wait_until(lambda: place.engine.requests == (0, 0))


@pytest.mark.parametrize("stream", [True, False])
def test_who_leaves_is_dropped(place: Place, stream: bool) -> None:
    with place.connect() as connection:
        body = {"prompt": TEXT, "max_tokens": 4000, "stream": stream, "n": 6}
        connection.sendall(post(body))
        if stream:
            assert connection.recv(1000).startswith(b"HTTP/1.1 200")
        wait_until(lambda: place.engine.requests == (4, 2))
    wait_until(lambda: place.engine.requests == (0, 0))
    assert place.ask(prompt=TEXT)[0] == 200


@pytest.mark.parametrize(
    ("sent", "status"),
    [
        (b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 50\r\n\r\n{", 408),
        (b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 99999\r\n\r\n", 408),
        (b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: -5\r\n\r\n", 400),
        (b"GET / HTTP/1.1\r\nHost: x\r\nX-Long: " + b"a" * 200_000 + b"\r\n\r\n", 400),
        (b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + b"\r\n\r\n", 400),
        (b"GET /\xff\xfe HTTP/1.1\r\nHost: x\r\n\r\n", 400),
        (b"GET / HTTP/1.1\r\nHost: x\r\n" + b"X-Many: a\r\n" * 20_000 + b"\r\n", 400),
        (b"GET / HTTP/1.1\r\nHost: x\r\nX-Odd\xff: a\r\n\r\n", 400),
        (b"POST /generate HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: odd\r\n\r\n", 400),
        (b"POST /generate HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\nZZ\r\n", 400),
        (
            b"POST /generate HTTP/1.1\r\nHost: x\r\nContent-Length: 2\r\nContent-Length: 9\r\n\r\n",
            400,
        ),
        (b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 3\r\n\r\n\xff\xfe{", 400),
        (post({"prompt": "x" * 20_000}), 413),
        (post({}, path="/v1/completions%0d%0aX-Bad:%201"), 404),
    ],
    ids=lambda sent: repr(sent[:40]) if isinstance(sent, bytes) else str(sent),
)
def test_what_no_client_sends_is_refused(place: Place, sent: bytes, status: int) -> None:
    with place.connect() as connection:
        connection.settimeout(10)
        with suppress(ConnectionError):
            connection.sendall(sent)
        assert f"HTTP/1.1 {status}".encode() in connection.recv(65536)
    assert place.ask(prompt=TEXT, max_tokens=2)[0] == 200


@pytest.mark.parametrize("stream", [True, False])
def test_who_leaves_at_any_stage_leaves_nothing_behind(place: Place, stream: bool) -> None:
    whole = post({"prompt": TEXT, "max_tokens": 3000, "stream": stream, "n": 2})
    head = whole.index(b"\r\n\r\n")
    for stage in (0, 1, 10, head, head + 4, head + 10, len(whole) - 1, len(whole)):
        for reset in (True, False):
            with place.connect() as connection:
                connection.sendall(whole[:stage])
                if stage == len(whole) and stream:
                    connection.recv(100)
                if reset:
                    # Closes with a reset, as one who crashes does.
                    linger = struct.pack("ii", 1, 0)
                    connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, linger)
    wait_until(lambda: place.engine.requests == (0, 0))
    assert place.ask(prompt=TEXT, max_tokens=2)[0] == 200


def test_what_comes_byte_by_byte_is_read_or_given_up(place: Place) -> None:
    whole = post({"prompt": TEXT, "max_tokens": 2})
    with place.connect() as connection:
        body = whole.index(b"{")
        for at in range(body):
            connection.sendall(whole[at : at + 1])
        connection.sendall(whole[body:])
        assert answer_of(connection)[0] == 200
    with place.connect() as connection:
        connection.sendall(whole[:-30])
        # More of it comes all the time, and never all.
        for at in range(30, 10, -1):
            time.sleep(0.04)
            with suppress(ConnectionError):
                connection.sendall(whole[-at : -at + 1])
        assert answer_of(connection)[0] == 408


def test_requests_may_be_sent_before_the_first_answer(place: Place) -> None:
    with place.connect() as connection:
        body = {"prompt": TEXT, "max_tokens": 3, "stream": False}
        connection.sendall(post(body, close=False) + post(body))
        data = b""
        while chunk := connection.recv(65536):
            data += chunk
    assert data.count(b"HTTP/1.1 200") == 2
    wait_until(lambda: place.engine.requests == (0, 0))


def test_ten_thousand_random_bytes_do_no_harm(place: Place, pair: Pair) -> None:
    dice = random.Random(4)
    for turn in range(20):
        content = dice.randbytes(500)
        head = f"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: {len(content)}\r\n"
        sent = (head.encode() + b"Connection: close\r\n\r\n" + content) if turn % 2 else content
        with place.connect() as connection:
            connection.sendall(sent + b"\r\n\r\n")
            connection.shutdown(socket.SHUT_WR)
            answer = connection.recv(1000)
        assert answer == b"" or answer.startswith((b"HTTP/1.1 4",)), answer
    assert place.ask(prompt=TEXT, max_tokens=2)[0] == 200


def test_hugging_faces_own_client_reads_what_it_expects(
    place: Place, pair: Pair, alone: Callable[..., str], monkeypatch: pytest.MonkeyPatch
) -> None:
    # It would not even ask this machine.
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", False)
    client = huggingface_hub.InferenceClient(f"http://127.0.0.1:{place.port}", token="none")
    text = alone(pair.tokenizer.encode(TEXT), max_tokens=10)
    assert client.text_generation(TEXT, max_new_tokens=10) == text
    streamed = client.text_generation(TEXT, max_new_tokens=10, stream=True)
    assert "".join(streamed) == text
    details = client.text_generation(TEXT, max_new_tokens=10, details=True)
    assert (details.generated_text, details.details.generated_tokens) == (text, 10)
    prompt = pair.tokenizer.encode("USER: Who?\nASSISTANT:")
    told = client.chat_completion([{"role": "user", "content": "Who?"}], max_tokens=10)
    assert told.choices[0].message.content == alone(prompt, max_tokens=10)
    with pytest.raises(huggingface_hub.errors.ValidationError, match="top_p"):
        client.text_generation(TEXT, top_p=5.0)
