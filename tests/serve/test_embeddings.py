"""/v1/embeddings: means of hidden states, compared with direct passes."""

import base64
import struct
import threading
from collections.abc import Generator, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from starlette.testclient import TestClient

from mlx_specdec.engine import embeddings as computing
from mlx_specdec.engine.loading import load
from mlx_specdec.engine.pair import Pair
from mlx_specdec.serve import embeddings
from mlx_specdec.serve.engine import Engine
from mlx_specdec.serve.settings import Limits
from mlx_specdec.serve.tasks import EngineTask, Stopped, TaskQueue

from ..support.serving import COMPLETIONS, TEXT, client_of, ok, running, wait_until

PATH = "/v1/embeddings"
TEXTS = [TEXT, "é", "for line in open(path):\n    print(line)\n" * 3, TEXT]


def vectors(client: TestClient, texts: object, **more: Any) -> list[list[float]]:
    data = ok(client, PATH, input=texts, **more)["data"]
    assert [(entry["object"], entry["index"]) for entry in data] == [
        ("embedding", at) for at in range(len(data))
    ]
    return [entry["embedding"] for entry in data]


def normalized(states: mx.array, ids: Sequence[int], special: frozenset[int]) -> np.ndarray:
    """The mean over the tokens of a text, by numpy."""
    rows = np.array(states.astype(mx.float32))[
        [at for at, id in enumerate(ids) if id not in special]
    ]
    mean = rows.mean(axis=0)
    return mean / np.linalg.norm(mean)


def test_a_decoders_embedding_is_the_mean_of_its_last_states(
    client: TestClient, pair: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    special = pair.tokenizer.special_ids
    for chunk in (512, 4):
        monkeypatch.setattr(computing, "CHUNK", chunk)
        for text in TEXTS:
            ids = pair.tokenizer.encode(text)
            assert special.intersection(ids), "a special token that does not count"
            # The complete text in one pass of mlx-lm's own modules.
            network: Any = pair.target.network
            states = network.model(mx.array([ids]))[0]
            [vector] = vectors(client, text)
            assert np.linalg.norm(vector) == pytest.approx(1, abs=1e-5)
            assert np.allclose(vector, normalized(states, ids, special), atol=1e-5)
            assert vectors(client, ids) == [vector]


@pytest.fixture(scope="module")
def translator(t5: tuple[Path, Path]) -> Iterator[tuple[TestClient, Pair]]:
    with running(t5) as engine:
        yield client_of(engine), load(*t5)


def test_a_t5_embeds_with_its_encoder(translator: tuple[TestClient, Pair]) -> None:
    client, pair = translator
    for text in TEXTS:
        ids = pair.tokenizer.encode(text)
        network: Any = pair.target.network
        states = network.encode(mx.array([ids]))[0]
        [vector] = vectors(client, text)
        expected = normalized(states, ids, pair.tokenizer.special_ids)
        assert np.allclose(vector, expected, atol=1e-5)


@pytest.mark.parametrize("family", ["llama", "t5"])
def test_an_embedding_does_not_depend_on_its_batch(
    client: TestClient, translator: tuple[TestClient, Pair], family: str
) -> None:
    asked = client if family == "llama" else translator[0]
    alone = [vectors(asked, text)[0] for text in TEXTS]
    assert vectors(asked, TEXTS) == alone and alone[0] == alone[-1] != alone[1]
    # Completions and other embeddings are computed at the same time.
    with ThreadPoolExecutor(6) as pool:
        texts = [pool.submit(ok, asked, COMPLETIONS, prompt=text, max_tokens=20) for text in TEXTS]
        lists = [pool.submit(vectors, asked, TEXTS[::-1]) for _ in range(2)]
        assert [future.result() for future in lists] == [alone[::-1]] * 2
        assert all(future.result()["choices"] for future in texts)


def test_what_an_answer_has(client: TestClient, pair: Pair) -> None:
    answer = ok(client, PATH, input=[TEXT, "é"], user="somebody", model="any")
    count = len(pair.tokenizer.encode(TEXT)) + len(pair.tokenizer.encode("é"))
    assert answer["usage"] == {"prompt_tokens": count, "total_tokens": count}
    assert (answer["object"], answer["model"]) == ("list", "tiny")
    width = pair.target.width
    [plain] = vectors(client, TEXT, dimensions=width, encoding_format="float")
    [packed] = vectors(client, TEXT, encoding_format="base64")
    assert list(struct.unpack(f"<{width}f", base64.b64decode(packed))) == plain  # type: ignore[arg-type]
    ids = [pair.tokenizer.encode(text) for text in TEXTS]
    assert vectors(client, ids) == vectors(client, TEXTS)
    # Only special tokens: they count.
    special = min(pair.tokenizer.special_ids)
    assert np.linalg.norm(vectors(client, [special])[0]) == pytest.approx(1, abs=1e-5)


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({}, "input"),
        ({"input": ""}, "input"),
        ({"input": []}, "input"),
        ({"input": ["a", 1]}, "input"),
        ({"input": [1 << 30]}, "input"),
        ({"input": ["a"] * 4}, "input"),
        ({"input": [5] * 5000}, "input"),
        ({"input": "a", "dimensions": 8}, "dimensions"),
        ({"input": "a", "encoding_format": "int8"}, "encoding_format"),
    ],
    ids=lambda part: str(part)[:40],
)
def test_what_cannot_be_embedded_is_refused_by_name(
    engine: Engine, body: dict[str, Any], param: str
) -> None:
    answer = client_of(engine, Limits(inputs=3)).post(PATH, json=body)
    assert answer.status_code == 400 and answer.json()["error"]["param"] == param


def test_a_text_that_needs_more_than_the_budget_is_refused(llama: tuple[Path, Path]) -> None:
    with running(llama, memory_budget=1 << 16) as engine:
        answer = client_of(engine).post(PATH, json={"input": [5] * 400})
        assert answer.status_code == 400 and "memory" in answer.json()["error"]["message"]


def counting(steps: list[str], name: str, most: int) -> Generator[None, None, str]:
    for _ in range(most):
        steps.append(name)
        yield
    if name == "wrong":
        raise ValueError(name)
    return name


def test_tasks_run_one_after_the_other() -> None:
    queue, steps = TaskQueue(), list[str]()
    named = [("first", 2, 5), ("left", 9, 7), ("wrong", 1, 6), ("last", 1, 8)]
    tasks = [
        EngineTask(counting(steps, name, most), nbytes, dict, 0) for name, most, nbytes in named
    ]
    first, left, wrong, last = [queue.add(task) for task in tasks]
    assert queue.nbytes == 5
    left.cancel()
    while len(queue) > 1:
        queue.step()
    assert steps == ["first", "first", "wrong"] and first.result() == "first"
    assert isinstance(wrong.exception(), ValueError) and queue.nbytes == 8
    queue.end()
    assert isinstance(last.exception(), Stopped) and not len(queue)


def test_a_task_holds_its_memory_while_it_runs(llama: tuple[Path, Path]) -> None:
    """A request waits until the task has ended, because both do not fit into the budget."""
    with running(llama, memory_budget=1 << 22) as engine:
        client, may_end, taken = client_of(engine), threading.Event(), [0]

        def steps() -> Generator[None, None, int]:
            while not may_end.is_set():
                taken[0] += 1
                yield
            return 7

        future = engine.run(EngineTask(steps(), 1 << 22, dict, 0))
        with ThreadPoolExecutor(1) as pool:
            waiting = pool.submit(ok, client, COMPLETIONS, prompt=TEXT, max_tokens=3)
            # The task counts as well.
            wait_until(lambda: engine.requests == (1, 1))
            before = taken[0]
            wait_until(lambda: taken[0] > before + 20)
            assert engine.requests == (1, 1) and not future.done()
            gauges = client.get("/metrics").text
            assert 'model_requests_running{model_name="tiny"} 1.0' in gauges
            may_end.set()
            assert future.result(60) == 7 and waiting.result(60)["choices"]


def test_the_end_of_the_server_does_not_wait_for_a_step(
    llama: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    began, may_end = threading.Event(), threading.Event()

    def stays(*_: object) -> Generator[None, None, list[Any]]:
        began.set()
        may_end.wait(20)
        yield
        return []

    monkeypatch.setattr(embeddings, "embed", stays)
    with running(llama) as engine, ThreadPoolExecutor(1) as pool:
        answer = pool.submit(client_of(engine).post, PATH, json={"input": TEXT})
        assert began.wait(60)
        engine.close()
        assert answer.result(60).status_code == 503 and not may_end.is_set()
        assert not engine.join(0)
        may_end.set()


def test_the_end_of_the_server_ends_tasks(llama: tuple[Path, Path]) -> None:
    def endless() -> Generator[None, None, None]:
        while True:
            yield

    with running(llama) as engine:
        future = engine.run(EngineTask(endless(), 0, dict, 0))
    assert isinstance(future.exception(60), Stopped)
    with pytest.raises(RuntimeError):
        engine.run(EngineTask(endless(), 0, dict, 0))
