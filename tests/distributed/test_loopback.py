"""Ranks on one machine write the text that one process writes, whatever drafts and decides."""

import concurrent.futures
import json
import signal
import socket
import time
import urllib.request
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from mlx_specdec import Options, generate, load

from ..support import loopback, mtp, speculators, tiny
from ..support.loopback import Ranks, result_of

pytestmark = pytest.mark.slow
LENGTH = 8
WITH_MTP = "qwen3_5"
"""A family that drafts for itself."""
EVERY_RULE: list[dict[str, Any]] = [
    {"temperature": 0.0},
    {"temperature": 1.0},
    {"temperature": 1.0, "rule": "token", "num_draft": 3},
    {"temperature": 1.0, "rule": "block", "num_draft": 3},
    {"temperature": 0.7, "rule": "typical", "num_draft": 3},
    {"temperature": 0.0, "delta": 0.5, "num_draft": 3},
    {"temperature": 0.9, "top_p": 0.9, "top_k": 20, "repetition_penalty": 1.1},
]
PROPOSERS: list[dict[str, Any]] = [
    {"proposer": "none"},
    {"proposer": "ngram", "ngram_min": 1},
    {"proposer": "draft", "num_draft": 4},
    {"proposer": "auto", "num_draft": "auto"},
    {"proposer": "draft", "num_draft": 3, "stop": "t7"},
]
BATCHES: list[dict[str, Any]] = [
    {"prompts": [" ".join(loopback.PROMPT.split()[at:]) for at in (0, 2, 5)], "temperature": t}
    for t in (0.0, 1.0)
]


@dataclass(frozen=True)
class Setting:
    """A target that ranks share, and the cases to run. changes: changes of its configuration.
    disturbed: the arguments of `disturb` by rank, which also apply to all later settings."""

    name: str
    mode: str
    cases: list[dict[str, Any]]
    changes: dict[str, int] = field(default_factory=dict)
    disturbed: dict[str, dict[str, float]] = field(default_factory=dict)


WITHOUT_A_DRAFT: list[dict[str, Any]] = [
    {"temperature": temperature, **drafting}
    for temperature in (0.0, 1.0)
    for drafting in (
        {"proposer": "none"},
        {"proposer": "mtp", "num_draft": 1},
        {"proposer": "ngram", "ngram_min": 1, "num_draft": 3},
    )
]
SOME = [PROPOSERS[2] | EVERY_RULE[1], BATCHES[1]]
FAMILIES = [
    Setting("qwen2", "tensor", SOME),
    Setting("qwen2", "pipeline", SOME),
    Setting("qwen3_moe", "tensor", SOME),
    Setting("qwen3_moe", "pipeline", SOME),
    Setting("gpt_oss", "tensor", SOME),
    Setting("deepseek_v3", "tensor", SOME),
    Setting("deepseek_v3", "pipeline", SOME),
    # Recurrent layers: a rewind repeats them on every rank.
    Setting(WITH_MTP, "tensor", WITHOUT_A_DRAFT),
]
DISTURBED = {"1": {"noise": 1e-6, "sleep": 0.02}, "0": {"noise": 0.0, "sleep": 0.005}}


def compared(directory: Path, count: int, settings: list[Setting]) -> list[dict[str, Any]]:
    """Return the ranks' results of all cases, whose texts must be those of one process."""
    requests, wanted = [], []
    expected: dict[str, list[list[str]]] = {}
    for setting in settings:
        changes = {"num_hidden_layers": 4, "intermediate_size": 64} | setting.changes
        target = directory / f"{setting.name}-target"
        draft = None if setting.name == WITH_MTP else directory / f"{setting.name}-draft"
        if draft is None:
            mtp.write(setting.name, target, vocabulary=tiny.VOCABULARY)
            loopback.add_words(target)
        elif not target.exists():
            loopback.write(setting.name, target, **changes)
            loopback.write(setting.name, draft, noise=0.1, **changes)
        cases = [{"max_tokens": LENGTH, "seed": 3} | case for case in setting.cases]
        requests.append(
            {
                "target": str(target),
                "draft": None if draft is None else str(draft),
                "mode": setting.mode,
                "cases": cases,
                "disturbed": setting.disturbed,
            }
        )
        pair = load(target, draft)
        for case in cases:
            key = f"{setting.name} {json.dumps(case)}"
            if key not in expected:
                expected[key] = result_of(pair, loopback.PROMPT, case)["texts"]
            wanted.append((setting, case, expected[key]))
    out, file = directory / "told.json", directory / "spec.json"
    file.write_text(json.dumps({"prompt": loopback.PROMPT, "settings": requests, "out": str(out)}))
    ended = loopback.run(directory, count, "-m", "tests.distributed.cases", str(file))
    assert [process.code for process in ended] == [0] * count, [process.err for process in ended]
    written: list[dict[str, Any]] = json.loads(out.read_text())
    for (setting, case, texts), report in zip(wanted, written, strict=True):
        assert report["texts"] == texts, (setting, case)
        assert any(texts), (setting, case)
    return written


def test_two_ranks_write_the_text_of_one_under_every_rule_and_proposer(tmp_path: Path) -> None:
    """So do other families, and slow ranks that round differently. All run in the same processes,
    because a start takes seconds. A round takes one sum more than its pass."""
    cases = [*EVERY_RULE, *PROPOSERS, *BATCHES]
    some = [*EVERY_RULE[1:4], *PROPOSERS[2:4]]
    settings = [
        Setting("llama", "tensor", cases),
        *FAMILIES,
        Setting("llama", "tensor", some, disturbed=DISTURBED),
    ]
    written = compared(tmp_path, 2, settings)
    assert any(report.get("accepted") for report in written)
    layers = 4
    for case in ({"proposer": "none"}, {"proposer": "draft", "num_draft": 4}):
        report = written[cases.index(case)]
        # And one for the prompt's chunk with its two sums a layer, and one to wait for it.
        assert report["sums"] == (report["passes"] + 1) * (2 * layers + 1) + 1


# The batch, the server and drafters of every kind on a target that ranks share.


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
    names = ["--distributed", "tensor", "--model", target, "--draft-model", draft]
    return ["-m", "mlx_specdec", command, *names, "--no-cost-cache", *more]


def test_a_batch_writes_one_file_with_the_texts_of_one_process(
    models: tuple[Path, Path], tmp_path: Path
) -> None:
    prompts_file, output = tmp_path / "prompts.txt", tmp_path / "texts.jsonl"
    prompts_file.write_text("\n".join(PROMPTS) + "\n")
    more = ["-m", "12", "--temperature", "1", "--seed", "4", "--batch-size", "3", "--quiet"]
    ended = loopback.run(
        tmp_path, 2, *shared("batch", models, *more, "-o", str(output), str(prompts_file))
    )
    assert [process.code for process in ended] == [0, 0], ended
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
            report: str = json.load(answer)["choices"][0]["text"]
        return report

    command = shared("serve", models, "--port", str(port), "--log-level", "error")
    with Ranks(tmp_path, [command] * 2) as ranks:
        for _ in range(2400):
            try:
                urllib.request.urlopen(f"{address}/health", timeout=5).close()
                break
            except OSError:
                time.sleep(0.05)
        leaves(port)
        with concurrent.futures.ThreadPoolExecutor(len(PROMPTS)) as clients:
            texts = list(clients.map(ask, PROMPTS))
        time.sleep(0.1)  # nothing to do
        assert ask(PROMPTS[0]) == texts[0]
        ranks.signal(0, signal.SIGINT)
        ended = ranks.ends()
    assert [process.code for process in ended] == [0, 0], ended
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
    words = [*more, loopback.PROMPT]
    ended = loopback.run(tmp_path, 2, *shared("generate", (target, eagle), *words), status=file)
    assert [process.code for process in ended] == [0, 0], ended
    assert ended[1].out == ended[1].err == "" and file.read_text() == "0\n"
    report = json.loads(ended[0].out)
    assert report["proposer"] == "eagle3" and report["stats"]["drafted"] > 0
    options = Options(regular=True, max_tokens=16, temperature=1.0, seed=4, cost_cache=False)
    assert [report["text"]] == expected(target, options, [loopback.PROMPT])
