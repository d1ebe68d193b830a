"""Sends a server what no client sends, and looks whether it stays as it was.

    python scripts/attack_server.py [--requests 10000] [--bytes 1000000] [--responses]
        [-- FLAGS OF serve]

Starts `mlx-specdec serve` on this machine. Every request has one thing wrong and has to get a 4xx;
random bytes may also be met with a closed connection. With --responses every request is a body for
/v1/responses, of one or of some wrong parts. In between and at the end, the same
completion has to have the same text. Prints a line of JSON; the exit code is 1 where something went
wrong.
"""

from __future__ import annotations

import argparse
import json
import random
import socket
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from served import Served, serving

PORT = 8097
CLIENTS = 4
COMPARED_EVERY = 1000
GOOD = {"prompt": "def read_lines", "max_tokens": 16, "temperature": 0.7, "seed": 3}
CHAT = {"messages": [{"role": "user", "content": "x"}], "max_tokens": 1}
DEEP = "[" * 2000 + "]" * 2000
NESTED: Any = {}
for _ in range(100):
    NESTED = {"type": "array", "items": NESTED}
NO_WHOLE = [-1, 1.5, "x", [], {}, True, 10**30]
NO_NUMBER = ["x", [], {}, True, 1e300, -1e300]
NO_TRUTH = [0, 1, "true", [], {}]
BAD_FIELDS: dict[str, list[Any]] = {
    "prompt": [None, "", "  ", 5, {}, [], [[]], [-1], [10**9], [1.5], [[1], 2], "x" * 60_000],
    "max_tokens": NO_WHOLE[1:-1],
    "n": [0, 17, *NO_WHOLE],
    "seed": [1.5, "x", [], {}, 10**30],
    "temperature": [-1, *NO_NUMBER],
    "top_p": [0, 2, *NO_NUMBER],
    "top_k": NO_WHOLE[1:-1],
    "min_p": [1, -1, *NO_NUMBER],
    "repetition_penalty": [0, -1, *NO_NUMBER],
    "presence_penalty": NO_NUMBER,
    "frequency_penalty": NO_NUMBER,
    "stop": ["", 5, {}, [5], ["a"] * 17, "x" * 2000],
    "logit_bias": [5, [], {"x": 1}, {"-1": 1}, {"9999999999": 1}, {"5": "x"}, {"5": 1e300}],
    "logprobs": [-1, 21, True, "x", {}],
    "stream": NO_TRUTH,
    "stream_options": [5, [], {"include_usage": 5}],
    "echo": NO_TRUTH,
    "speculative": [5, "x", [], {"max": -1}, {"max": 10**9}, {"mode": "x"}],
    "prediction": [5, {"type": "x"}, {"type": "content", "content": 5}],
    "response_format": [5, {}, {"type": "x"}, {"type": "json_schema"}],
    "structured_outputs": [5, {}, {"json": 5}, {"json": NESTED}, {"regex": "("}, {"x": 1}],
    "regex": [5, "(", "a{99999}{99999}", "[", "x" * 70_000],
    "grammar": [5, "", "start: x", "start: /(/", "\n" * 600, "x" * 70_000],
    "model": [5, "other", "../../etc/passwd", "x" * 10_000],
    "tools": [5, [{"type": "function"}]],
    "ignore_eos": NO_TRUTH,
    "min_tokens": [3],
    "audio": [{}],
    "suffix": ["x"],
}
BAD_MESSAGES: list[Any] = [
    None,
    [],
    5,
    [5],
    [{}],
    [{"role": "king", "content": "x"}],
    [{"role": "user", "content": 5}],
    [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "file:///etc"}}]}],
    [{"role": "assistant", "tool_calls": 5}],
    [{"role": "assistant", "tool_calls": [{"function": {"name": "x", "arguments": 5}}]}],
]
BAD_BODIES = [
    b"",
    b"{",
    b"null",
    b"[]",
    b'"x"',
    b'{"prompt": NaN}',
    b'{"prompt": "\xff\xfe"}',
    b'{"prompt": "\\ud800"}',
    b'{"prompt": ' + DEEP.encode() + b"}",
    b'{"a":' * 5000 + b"1" + b"}" * 5000,
    b'{"prompt": ' + b"1" * 10_000 + b"}",
    b"\x00" * 1000,
]
WRONG_ITEMS: list[Any] = [
    None,
    5,
    [],
    {},
    {"type": 5},
    {"type": "message"},
    {"role": "king", "content": "x"},
    {"role": "user"},
    {"role": "user", "content": 5},
    {"role": "user", "content": [5]},
    {"role": "user", "content": [{"type": "input_text"}]},
    {"role": "user", "content": [{"type": "input_text", "text": ["x"]}]},
    {"type": "function_call", "call_id": "1", "name": 5, "arguments": "{}"},
    {"type": "function_call", "call_id": "1", "arguments": "{}"},
    {"type": "function_call", "call_id": "1", "name": "a", "arguments": 5},
    {"type": "function_call_output", "call_id": "1", "output": 5},
    {"type": "function_call_output", "call_id": "1", "output": [5]},
    {"type": "function_call_output"},
    {"type": "custom_tool_call", "call_id": "1", "name": "a", "input": {}},
    {"type": "reasoning", "summary": 5, "encrypted_content": 5},
]
WRONG_TOOLS: list[Any] = [
    5,
    [5],
    [{}],
    [{"type": 5}],
    [{"type": "function"}],
    [{"type": "function", "name": "a b"}],
    [{"type": "function", "name": "a", "parameters": 5}],
    [{"type": "custom", "name": 5}],
    [{"type": "namespace", "name": "a", "tools": 5}],
]
BAD_RESPONSES: dict[str, list[Any]] = {
    **{name: BAD_FIELDS[name] for name in ("temperature", "top_p", "stream", "model")},
    "instructions": [5, [], {}, True],
    "max_output_tokens": NO_WHOLE[1:-1],
    "tools": WRONG_TOOLS,
    "tool_choice": [5, "x", [], {"type": "function"}, "required"],
    "text": [5, [], {"format": 5}, {"format": {"type": "x"}}, {"format": {"type": "json_schema"}}],
    "reasoning": [5, [], {"effort": 5}],
    "include": [5, "x", [5]],
    "previous_response_id": [5, "x", "resp_x", [], {}],
    "parallel_tool_calls": NO_TRUTH,
    "store": NO_TRUTH,
    "background": [True, 5],
    "conversation": ["x", {}],
    "prompt": [{"id": "x"}],
    "top_logprobs": [1, "x"],
}
PATHS = ["/../etc/passwd", "/v1", "/v1/models/other", "/%00", "/v1/completions/x", "/" + "a" * 5000]
RESPONSES = "/v1/responses"
POSTS = ["/v1/completions", "/v1/chat/completions", "/v1/messages", "/generate", "/tokenize"]
POSTS += [RESPONSES, f"{RESPONSES}/input_tokens"]
Hostile = tuple[str, str, bytes]


def hostile(dice: random.Random) -> Hostile:
    """A request with one thing wrong: method, path and body."""
    kind = dice.randrange(6)
    if kind == 0:
        return "POST", dice.choice(POSTS), dice.choice(BAD_BODIES)
    if kind == 1:
        return dice.choice(["GET", "POST", "DELETE"]), dice.choice(PATHS), b"{}"
    if kind == 2:
        return dice.choice(["PUT", "DELETE", "PATCH", "GET"]), "/v1/completions", b"{}"
    if kind == 3:
        return (
            "POST",
            "/v1/chat/completions",
            _json({**CHAT, "messages": dice.choice(BAD_MESSAGES)}),
        )
    if kind == 4:
        whole = _json(GOOD)
        return "POST", "/v1/completions", whole[: dice.randrange(1, len(whole))]
    name = dice.choice(list(BAD_FIELDS))
    return "POST", "/v1/completions", _json({**GOOD, name: dice.choice(BAD_FIELDS[name])})


def odd_response(dice: random.Random) -> Hostile:
    """A body for /v1/responses with wrong parts."""
    if dice.random() < 0.05:
        return "POST", RESPONSES, dice.choice(BAD_BODIES)
    body: dict[str, Any] = {"input": "x", "max_output_tokens": 1, "store": False}
    for _ in range(dice.randint(1, 3)):
        if dice.random() < 0.4:
            good = {"role": "user", "content": "x"}
            body["input"] = dice.sample([good, dice.choice(WRONG_ITEMS), good], 3)
        else:
            name = dice.choice(list(BAD_RESPONSES))
            body[name] = dice.choice(BAD_RESPONSES[name])
    if dice.random() < 0.1:
        whole = _json(body)
        return "POST", RESPONSES, whole[: dice.randrange(1, len(whole))]
    return "POST", RESPONSES, _json(body)


def _json(body: object) -> bytes:
    return json.dumps(body).encode()


def send_responses(served: Served, count: int, seed: int) -> Counter[str]:
    """The same with bodies for /v1/responses alone."""
    return send_requests(served, count, seed, odd_response)


def send_requests(
    served: Served, count: int, seed: int, make: Callable[[random.Random], Hostile] = hostile
) -> Counter[str]:
    """Send `count` hostile requests over connections that stay open. Counts what they got."""
    dice, became, connection = random.Random(seed), Counter[str](), served.connect()
    for _ in range(count):
        method, path, body = make(dice)
        try:
            connection.request(method, path, body)
            answer = connection.getresponse()
            answer.read()
        except OSError as problem:
            became[type(problem).__name__] += 1
            connection.close()
            continue
        became[str(answer.status)] += 1
        if not 400 <= answer.status < 500:
            print(answer.status, method, path[:60], body[:300], file=sys.stderr)
    connection.close()
    return became


def send_bytes(served: Served, count: int, seed: int) -> Counter[str]:
    """What became of `count` random bytes, in pieces; every other one in the place of a body."""
    dice, became = random.Random(seed), Counter[str]()
    while count > 0:
        content = dice.randbytes(min(count, dice.randrange(1, 4000)))
        count -= len(content)
        first = f"POST {dice.choice(POSTS)} HTTP/1.1\r\nHost: localhost\r\n"
        head = f"{first}Content-Length: {len(content)}\r\n\r\n"
        sent = (head.encode() if dice.random() < 0.5 else b"") + content
        try:
            with socket.create_connection(("127.0.0.1", served.port), timeout=60) as connection:
                connection.sendall(sent)
                connection.shutdown(socket.SHUT_WR)
                answer = connection.recv(4096)
        except ConnectionError:
            answer = b""
        became[answer[9:12].decode("latin-1") or "closed"] += 1
    return became


def all_of(
    work: Callable[[Served, int, int], Counter[str]], served: Served, count: int, seed: int
) -> Counter[str]:
    """The same by several clients at once."""
    with ThreadPoolExecutor(CLIENTS) as clients:
        shares = [count // CLIENTS + (each < count % CLIENTS) for each in range(CLIENTS)]
        done = clients.map(lambda each: work(served, shares[each], seed + each), range(CLIENTS))
        return sum(done, Counter())


def rounds(total: int, size: int) -> Iterator[int]:
    """`total` in parts of at most `size`."""
    while total > 0:
        yield min(size, total)
        total -= size


def main() -> None:
    """The command."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--requests", type=int, default=10_000)
    parser.add_argument("--bytes", type=int, default=1_000_000)
    parser.add_argument("--responses", action="store_true", help="bodies of /v1/responses alone")
    parser.add_argument("--seed", type=int, default=0)
    args, flags = parser.parse_known_args()
    flags = [each for each in flags if each != "--"]
    named = "--model" in flags
    pair = [] if named else ["--model", "weights/py-llama", "--draft-model", "auto"]
    serve = [sys.executable, "-m", "mlx_specdec", "serve", "--strict-model", "--port", str(PORT)]
    command = [*serve, *pair, *flags]
    became: Counter[str] = Counter()
    send = send_responses if args.responses else send_requests
    with serving(command, PORT) as served:
        text = served.complete(GOOD)["choices"][0]["text"]
        # What is made once, for all kinds of requests.
        all_of(send, served, COMPARED_EVERY, args.seed + 10_000)
        resident, same = [served.resident_bytes()], True
        for turn, count in enumerate(rounds(args.requests, COMPARED_EVERY)):
            became += all_of(send, served, count, args.seed + CLIENTS * turn)
            same = same and served.complete(GOOD)["choices"][0]["text"] == text
            resident.append(served.resident_bytes())
        of_bytes = all_of(send_bytes, served, args.bytes, args.seed)
        same = same and served.complete(GOOD)["choices"][0]["text"] == text
        resident.append(served.resident_bytes())
    report = {
        "requests": dict(became),
        "random_bytes": dict(of_bytes),
        "same_text_throughout": same,
        "resident_mib": [round(each / 2**20) for each in resident],
    }
    print(json.dumps(report))
    wrong = [each for each in (*became, *of_bytes) if each != "closed" and each[:1] != "4"]
    sys.exit(1 if wrong or not same else 0)


if __name__ == "__main__":
    main()
