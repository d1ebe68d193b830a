"""How long one request keeps every other thread of a server from running.

    python scripts/measure_interpreter_hold.py [--repeats 3] [--kinds spiece.model,...]

Serves a small model once for each kind of tokenizer and sends it texts and JSON of 1 MB and 16 MB.
A thread in the server wakes every 2 ms: the longest time for which it could not, counted in CPU
time of the process, so that other work on the machine adds nothing, is how long the request held
the interpreter. Prints a line for each body: the status and the least hold of the repeats, in
milliseconds. The exit code is 1 where one was above 100 ms. Needs 4 GB of memory.
"""

from __future__ import annotations

import argparse
import http.client
import json
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parent.parent
LLAMA, T5 = ROOT / "weights" / "py-llama", ROOT / "weights" / "t5-enfr"
PORT, PATIENCE, MOST_MS = 8098, 60.0, 100.0
TICK = 0.002
TEMPLATE = (
    "{{ bos_token }}{% if tools %}[AVAILABLE_TOOLS]{{ tools | tojson }}{% endif %}"
    "{% for m in messages %}[INST]{{ m.content }}[/INST]{% endfor %}{# [TOOL_CALLS] #}"
)
TOOL = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}


def copied(source: Path, target: Path, **settings: object) -> Path:
    """The model without its tokenizer.json, with other settings of its tokenizer."""
    shutil.copytree(source, target, ignore=shutil.ignore_patterns("tokenizer.json"))
    file = target / "tokenizer_config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), **settings}))
    return target


def sentence_piece(target: Path, **ids: int) -> None:
    """A sentencepiece model trained on the documentation."""
    import sentencepiece

    lines = [line for file in (ROOT / "docs").glob("*.md") for line in file.open() if line.strip()]
    with target.open("wb") as file:
        sentencepiece.SentencePieceTrainer.train(
            sentence_iterator=iter(lines), model_writer=file, vocab_size=2000, minloglevel=2, **ids
        )


def byte_level(place: Path) -> Path:
    made = copied(LLAMA, place, chat_template=TEMPLATE, tool_parser_type="mistral")
    shutil.copy(LLAMA / "tokenizer.json", made)
    return made


def spiece(place: Path) -> Path:
    made = copied(T5, place, extra_ids=100)
    sentence_piece(made / "spiece.model", pad_id=0, eos_id=1, unk_id=2, bos_id=-1)
    return made


def of_bytes(place: Path) -> Path:
    return copied(T5, place, tokenizer_class="ByT5Tokenizer", extra_ids=125)


def llama_2(place: Path) -> Path:
    made = copied(LLAMA, place, tokenizer_class="LlamaTokenizer", bos_token="<s>", eos_token="</s>")
    sentence_piece(made / "tokenizer.model")
    return made


def gpt_2(place: Path) -> Path:
    made = copied(LLAMA, place, tokenizer_class="GPT2Tokenizer", unk_token="<|end|>")
    tokenizer = json.loads((LLAMA / "tokenizer.json").read_text())
    added = {each["content"]: each["id"] for each in tokenizer["added_tokens"]}
    (made / "vocab.json").write_text(json.dumps({**tokenizer["model"]["vocab"], **added}))
    pairs = [
        each if isinstance(each, str) else " ".join(each) for each in tokenizer["model"]["merges"]
    ]
    (made / "merges.txt").write_text("\n".join(["#version: 0.2", *pairs]))
    return made


KINDS: dict[str, Callable[[Path], Path]] = {
    "byte-level BPE": byte_level,
    "unigram": lambda place: T5,
    "spiece.model": spiece,
    "bytes": of_bytes,
    "tokenizer.model": llama_2,
    "vocab.json": gpt_2,
}
WORDS = "def f(x): return the quick brown fox, "
UNITS = {"spaces": " ", "brackets": "[", "word": "a", "emoji": "🙂", "digits": "7", "prose": WORDS}


def texts(size: int) -> Iterator[tuple[str, str, bytes]]:
    """Prompts of so many bytes: a name, a path and a body."""
    for name, unit in UNITS.items():
        text = unit * (size // len(unit.encode())) + "x"
        body = json.dumps({"prompt": text, "max_tokens": 1}, ensure_ascii=False)
        yield name, "/v1/completions", body.encode()


def structures(size: int) -> Iterator[tuple[str, str, bytes]]:
    """What is large in other fields, or is much JSON for its size."""
    user: dict[str, Any] = {"role": "user", "content": "x"}
    chat: dict[str, Any] = {"messages": [user], "max_tokens": 1}
    long = "ab" * (size // 2)
    bodies: dict[str, dict[str, Any]] = {
        "one message": {**chat, "messages": [{**user, "content": " " * size}]},
        "many messages": {**chat, "messages": [user] * (size // 36)},
        "many prompts": {"prompt": ["x"] * (size // 5)},
        "token ids": {"prompt": [7] * (size // 3)},
        "stop": {**chat, "stop": ["ab"] * (size // 6)},
        "tool": {**chat, "tools": [{**TOOL, "function": {"name": "f", "description": long}}]},
        "regex": {**chat, "regex": long},
        "schema": {**chat, "response_format": {"type": "json_object", "schema": {"enum": [long]}}},
        "template": {**chat, "chat_template_kwargs": {"chat_template": "{{a}}" * (size // 5)}},
        "prediction": {**chat, "prediction": {"type": "content", "content": long}},
    }
    for name, body in bodies.items():
        path = "/v1/chat/completions" if "messages" in body else "/v1/completions"
        yield name, path, json.dumps(body).encode()
    for name, unit in {"lists": b"[],", "escapes": b'"\\\\",', "quotes": b'"",'}.items():
        yield name, "/v1/completions", b'{"x":[' + unit * (size // len(unit)) + b"1]}"
    yield "nested", "/v1/completions", b'{"x":' + b"[" * size


def written() -> Iterator[tuple[str, str, bytes]]:
    """A call as a model may write it: a word as long as the answer."""
    body = {
        "messages": [{"role": "user", "content": "x"}],
        "max_tokens": 1500,
        "tools": [TOOL],
        "regex": r"\[TOOL_CALLS\][a-z]{5000}",
    }
    for stream in (False, True):
        content = json.dumps({**body, "stream": stream}).encode()
        yield f"call, stream={stream}", "/v1/chat/completions", content


def watch() -> None:
    """In the server: answer each line of standard input with the longest hold since the last."""
    longest = 0.0

    def tick() -> None:
        nonlocal longest
        while True:
            wall, cpu = time.perf_counter(), time.process_time()
            time.sleep(TICK)
            gap = min(time.perf_counter() - wall - TICK, time.process_time() - cpu)
            longest = max(longest, gap)

    def report() -> None:
        nonlocal longest
        for _ in sys.stdin:
            held, longest = longest, 0.0
            print(held, flush=True)

    for work in (tick, report):
        threading.Thread(target=work, daemon=True).start()


class Server:
    """A server of `model` that reports how long it was held."""

    def __init__(self, model: Path) -> None:
        command = [sys.executable, __file__, "--serve", str(model)]
        self._process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL
        )
        end = time.monotonic() + 120
        while self.ask("/v1/completions", b'{"prompt":"x","max_tokens":1}') != "200":
            if time.monotonic() > end or self._process.poll() is not None:
                sys.exit(f"{model} cannot be served")
            time.sleep(0.2)
        self.held()

    def ask(self, path: str, body: bytes) -> str:
        """The status; "-" for none, and for one that took too long."""
        connection = http.client.HTTPConnection("127.0.0.1", PORT, timeout=PATIENCE)
        try:
            connection.request("POST", path, body, {"Content-Type": "application/json"})
            answer = connection.getresponse()
            answer.read()
            return str(answer.status)
        except OSError:
            return "-"
        finally:
            connection.close()

    def held(self) -> float:
        """Milliseconds of the longest hold since the last call; infinite where it goes on."""
        assert self._process.stdin is not None and self._process.stdout is not None
        self._process.stdin.write(b"\n")
        self._process.stdin.flush()
        timer = threading.Timer(PATIENCE, self._process.kill)
        timer.start()
        line = self._process.stdout.readline()
        timer.cancel()
        return 1000 * float(line) if line else float("inf")

    def end(self) -> None:
        """Stop it."""
        self._process.kill()
        self._process.wait()


def measured(model: Path, bodies: list[tuple[str, str, bytes]], repeats: int) -> Iterator[Any]:
    """Name, bytes, status and hold of each body."""
    server = Server(model)
    for name, path, body in bodies:
        holds, status = [], ""
        while len(holds) < repeats and (not holds or holds[-1] > MOST_MS):
            status = server.ask(path, body)
            holds.append(server.held())
            if holds[-1] == float("inf"):
                server.end()
                server = Server(model)
                break
        yield name, len(body), status, min(holds)
    server.end()


def main() -> None:
    """The command."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--repeats", type=int, default=3, help="of a body that held too long")
    parser.add_argument("--kinds", default=",".join(KINDS))
    parser.add_argument("--sizes", default="1000000,16000000", help="bytes of a body, about")
    parser.add_argument("--serve", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.serve:
        from mlx_specdec.cli.start import main as run

        watch()
        flags = ["--port", str(PORT), "--regular-decode", "--log-level", "error"]
        sys.argv = ["mlx-specdec", "serve", "--model", args.serve, *flags]
        return run()
    too_long = False
    with tempfile.TemporaryDirectory() as place:
        for kind in args.kinds.split(","):
            model = KINDS[kind](Path(place, kind.replace(" ", "-")))
            bodies = [each for size in map(int, args.sizes.split(",")) for each in texts(size - 64)]
            if kind == next(iter(KINDS)):
                sizes = map(int, args.sizes.split(","))
                bodies += [each for size in sizes for each in structures(size - 200)]
                bodies += written()
            for name, size, status, hold in measured(model, bodies, args.repeats):
                too_long = too_long or hold > MOST_MS
                print(f"{kind:16} {name:18} {size / 1e6:6.2f} MB {status:>5} {hold:10.1f} ms")
                sys.stdout.flush()
    sys.exit(1 if too_long else 0)


if __name__ == "__main__":
    main()
