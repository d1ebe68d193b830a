"""The batch, the server and drafters of every kind on a target that ranks share."""

from __future__ import annotations

import concurrent.futures
import json
import signal
import socket
import time
import urllib.request
from pathlib import Path

import pytest

from mlx_specdec import Options, generate, load

from ..support import loopback, speculators, tiny
from ..support.loopback import Ranks

pytestmark = pytest.mark.slow
PROMPTS = ["t5 t9 t12", "t7 t33 t21 t8", "t40", "t3 t3 t3 t9 t11", "t60 t2 t18"]


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    made = tmp_path_factory.mktemp("models")
    target = loopback.write("llama", made / "target", eos_token_id=999)
    return target, loopback.write("llama", made / "draft", noise=0.1, eos_token_id=999)


def expected(target: Path, options: Options, prompts: list[str] = PROMPTS) -> list[str]:
    """The texts that one process writes, without drafts."""
    pair = load(target)
    return [generate(pair, prompt, options).text for prompt in prompts]


def shared(command: str, models: tuple[Path, Path], *more: str) -> list[str]:
    target, draft = map(str, models)
    names = ["--distributed", "tensor", "--model", target, "--draft-model", draft, "--no-cache"]
    return ["-m", "mlx_specdec", command, *names, *more]


def test_a_batch_writes_one_file_with_the_texts_of_one_process(
    models: tuple[Path, Path], tmp_path: Path
) -> None:
    given, output = tmp_path / "prompts.txt", tmp_path / "texts.jsonl"
    given.write_text("\n".join(PROMPTS) + "\n")
    more = ["-m", "12", "--temperature", "1", "--seed", "4", "--batch-size", "3", "--quiet"]
    ended = loopback.run(
        tmp_path, 2, *shared("batch", models, *more, "-o", str(output), str(given))
    )
    assert [each.code for each in ended] == [0, 0], ended
    texts = [json.loads(line)["text"] for line in output.read_text().splitlines()]
    options = Options(regular=True, max_tokens=12, temperature=1.0, seed=4, cost_cache=False)
    assert texts == expected(models[0], options)


def test_clients_at_once_get_their_texts_and_one_that_leaves_stops_nobody(
    models: tuple[Path, Path], tmp_path: Path
) -> None:
    pytest.importorskip("uvicorn", reason="the extra server is not installed")
    [port] = loopback.free_ports(1)
    address = f"http://127.0.0.1:{port}"

    def ask(prompt: str) -> str:
        body = {"prompt": prompt, "max_tokens": 12, "temperature": 1, "seed": 4}
        request = urllib.request.Request(
            f"{address}/v1/completions",
            json.dumps(body).encode(),
            {"Content-Type": "application/json"},
        )
        with urllib.request.urlopen(request, timeout=120) as answer:
            told: str = json.load(answer)["choices"][0]["text"]
        return told

    command = shared("serve", models, "--port", str(port), "--log-level", "error")
    with Ranks(tmp_path, [command] * 2) as ranks:
        for _ in range(600):
            try:
                urllib.request.urlopen(f"{address}/health", timeout=5).close()
                break
            except OSError:
                time.sleep(0.2)
        leaves(port)
        with concurrent.futures.ThreadPoolExecutor(len(PROMPTS)) as clients:
            texts = list(clients.map(ask, PROMPTS))
        time.sleep(0.3)  # nothing to do
        assert ask(PROMPTS[0]) == texts[0]
        ranks.signal(0, signal.SIGINT)
        ended = ranks.ends()
    assert [each.code for each in ended] == [0, 0], ended
    options = Options(regular=True, max_tokens=12, temperature=1.0, seed=4, cost_cache=False)
    assert texts == expected(models[0], options)


def leaves(port: int) -> None:
    """A client that asks for a long text and does not wait for it."""
    body = json.dumps({"prompt": "t1", "max_tokens": 2000, "stream": True})
    with socket.create_connection(("127.0.0.1", port)) as connection:
        head = f"POST /v1/completions HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Length: {len(body)}"
        connection.sendall(f"{head}\r\n\r\n{body}".encode())
        connection.recv(100)


def test_a_drafter_on_hidden_states_drafts_on_rank_0_alone(tmp_path: Path) -> None:
    """And a text that ends well ends all with 0."""
    target = loopback.write("llama", tmp_path / "target", num_hidden_layers=4, eos_token_id=999)
    eagle = speculators.eagle3(tmp_path / "eagle", vocabulary=tiny.VOCABULARY)
    more = ["--num-draft", "3", "-m", "16", "--temperature", "1", "--seed", "4", "--json"]
    file = tmp_path / "status"
    words = [*more, "--status-file", str(file), loopback.PROMPT]
    ended = loopback.run(tmp_path, 2, *shared("generate", (target, eagle), *words))
    assert [each.code for each in ended] == [0, 0], ended
    assert ended[1].out == ended[1].err == "" and file.read_text() == "0\n"
    told = json.loads(ended[0].out)
    assert told["proposer"] == "eagle3" and told["stats"]["drafted"] > 0
    options = Options(regular=True, max_tokens=16, temperature=1.0, seed=4, cost_cache=False)
    assert [told["text"]] == expected(target, options, [loopback.PROMPT])


def test_what_lives_on_another_rank_is_refused_by_name(tmp_path: Path) -> None:
    target = loopback.write("qwen2", tmp_path / "target", num_hidden_layers=4)
    eagle = speculators.eagle3(tmp_path / "eagle", vocabulary=tiny.VOCABULARY)
    command = shared("generate", (target, eagle), loopback.PROMPT)
    command[command.index("tensor")] = "pipeline"
    ended = loopback.run(tmp_path, 2, *command)
    assert [each.code for each in ended] == [2, 2], ended
    assert "in a pipeline" in ended[0].err and ended[1].err == ""
