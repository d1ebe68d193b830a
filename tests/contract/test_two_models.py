"""Two models in one server, under mixed load, with the prompt cache of an earlier server."""

import json
import random
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from .support import Server, checkpoint, moved, served

TEMPLATE = "{% for m in messages %}<{{ m.role }}>{{ m.content }}\n{% endfor %}<assistant>"
FAMILIES = {"one": "llama", "two": "qwen3"}
WORDS = ("lorem", "fox", "jumps", "river", "stone", "light", "green", "house", "wind", "ten")
Body = dict[str, Any]


def requests(count: int) -> list[tuple[str, Body]]:
    """Return paths and bodies of four APIs. Many prompts begin alike."""
    chance = random.Random(7)
    beginnings = [" ".join(chance.choices(WORDS, k=70)) for _ in range(4)]
    found: list[tuple[str, Body]] = []
    for number in range(count):
        text = chance.choice(beginnings)[: chance.randrange(40, 380)]
        text += " ".join(chance.choices(WORDS, k=chance.randrange(1, 20)))
        body: Body = {"model": chance.choice([*FAMILIES]), "stream": False}
        most, sampling = (
            chance.randrange(4, 24),
            {
                "temperature": chance.choice([0, 1]),
                "seed": chance.randrange(100),
            },
        )
        path = ("/v1/chat/completions", "/v1/completions", "/v1/messages", "/api/chat")[number % 4]
        if path == "/v1/completions":
            body["prompt"] = text
        else:
            body["messages"] = [{"role": "user", "content": text}]
        if path == "/api/chat":
            body["options"] = {**sampling, "num_predict": most}
        else:
            body |= {**sampling, "max_tokens": most}
        found.append((path, body))
    return found


def completion(server: Server, request: tuple[str, Body]) -> tuple[str, str]:
    """Return the text and the finish reason of an answer."""
    path, body = request
    answer = server.ok(path, **body)
    if path == "/api/chat":
        return answer["message"]["content"], answer["done_reason"]
    if path == "/v1/messages":
        return "".join(block["text"] for block in answer["content"]), answer["stop_reason"]
    [choice] = answer["choices"]
    is_chat = path == "/v1/chat/completions"
    return choice["message"]["content"] if is_chat else choice["text"], choice["finish_reason"]


def hits(server: Server) -> float:
    """Return the number of prompt tokens that were found in the caches."""
    [*numbers] = [
        float(line.split()[-1])
        for line in server.get("/metrics").body.decode().splitlines()
        if line.startswith("vllm:prefix_cache_hits_total{")
    ]
    return sum(numbers)


@pytest.fixture(scope="module")
def flags(tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[object]]:
    directory = tmp_path_factory.mktemp("models")
    lines = []
    for name, family in FAMILIES.items():
        target = checkpoint(directory / name, family, template=TEMPLATE)
        draft = moved(target, directory / f"{name}-draft", 0.02)
        paths = f"model = {json.dumps(str(target))}\ndraft-model = {json.dumps(str(draft))}"
        lines.append(f"[{name}]\n{paths}\nnum-draft = 3\n")
    preset = directory / "models.toml"
    preset.write_text("".join(lines))
    yield ["--models-preset", preset, "--no-cost-cache"]


def test_a_restarted_server_answers_mixed_requests_like_each_of_them_alone(
    flags: list[object], tmp_path: Path
) -> None:
    """The first server is killed. The caches of the second one are small, so that both models read
    the first one's files again and again."""
    cache = ("--prompt-cache-dir", tmp_path, "--prompt-cache-bytes", "400KB")
    sent = requests(40)
    with served(*flags, *cache) as server:
        alone = [completion(server, request) for request in sent]
        server.process.kill()
    assert all([*directory.glob("*.safetensors")] for directory in tmp_path.iterdir())
    with served(*flags, *cache) as server, ThreadPoolExecutor(8) as threads:
        together = list(threads.map(lambda request: completion(server, request), sent))
        assert hits(server) > 0
        assert server.close() == 0
    assert together == alone
    assert not any("Traceback" in line for line in server.log), server.log
