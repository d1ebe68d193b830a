"""Several models: which one answers, when each is loaded and unloaded, and what requests see."""

import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import mlx.core as mx
import pytest
from starlette.requests import Request as HttpRequest
from starlette.testclient import TestClient

from mlx_specdec.engine.generate import generate
from mlx_specdec.engine.loading import load
from mlx_specdec.engine.prompt_cache_files import Store
from mlx_specdec.engine.scheduler import Scheduler
from mlx_specdec.errors import OptionError, SourceError
from mlx_specdec.options import Options
from mlx_specdec.serve import registry as registry_module
from mlx_specdec.serve.llama_cpp import metrics
from mlx_specdec.serve.problems import Problem
from mlx_specdec.serve.registry import PATIENCE_SECONDS, Registry, ServedModel
from mlx_specdec.serve.requests import Facts
from mlx_specdec.serve.service import Service

from ..support.serving import (
    COMPLETIONS,
    OPTIONS,
    TEXT,
    App,
    Place,
    client_for,
    ok,
    served,
    wait_until,
)

FOR_OTHER = {"model": "other", "prompt": TEXT, "max_tokens": 2}
FACTS = Facts(100, ("completion",), True, "llama", "float32")


class PretendedEngine:
    """An engine without a thread. The test decides when it is ready and what it decodes."""

    def __init__(self, load: object, **settings: Any) -> None:
        self.ready, self.ended, self.problem = threading.Event(), False, None
        self.requests, self.weight_bytes = (0, 0), 0
        self.nbytes = (0, 0, settings["memory_budget"] or 0)
        self.pair = self.options = self.budget = None

    def start(self, then: object, worker: object) -> None:
        self.worker = worker or SimpleNamespace()

    def limit(self, nbytes: int) -> None:
        assert self.requests == (0, 0), "a request that was accepted might not fit any more"
        self.nbytes = (0, 0, nbytes)

    def unload(self) -> None:
        assert self.requests == (0, 0), "a model with requests is unloaded"
        self.ended = True

    def join(self, seconds: float) -> bool:
        return self.ended


class Several:
    """A registry of pretended models, each of 100 bytes, and a clock."""

    def __init__(
        self, monkeypatch: pytest.MonkeyPatch, names: str, budget: int = 10_000, **settings: Any
    ) -> None:
        monkeypatch.setattr(registry_module, "Engine", PretendedEngine)
        self.now = 1000.0
        models = [ServedModel(name, lambda: None, nbytes=100, facts=FACTS) for name in names]
        self.registry = Registry(models, memory_budget=budget, clock=lambda: self.now, **settings)

    def __getitem__(self, name: str) -> ServedModel:
        return self.registry.named(name)

    def ask(self, name: str) -> bool:
        """Whether a request to a model could begin."""
        self.now += 1
        return self.registry.prepare(self[name])

    def loaded(self, name: str, nbytes: int = 100) -> None:
        self[name].engine.weight_bytes = nbytes
        self[name].engine.ready.set()
        self.registry.refresh()

    def use(self, *names: str) -> None:
        """Let requests load models."""
        for name in names:
            if not self.ask(name):
                self.loaded(name)
                assert self.ask(name)

    @property
    def states(self) -> dict[str, str]:
        return {model.name: model.state for model in self.registry.models}

    def run(self, name: str, requests: int) -> None:
        self[name].engine.requests = (requests, 0)
        self.registry.refresh()


def test_the_least_recently_used_model_leaves_if_the_budget_is_exceeded(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    # A sixteenth of the budget is kept for the requests of each model.
    several = Several(monkeypatch, "abc", budget=260)
    several.use("a", "b", "a")
    assert not several.ask("c")
    assert several.states == {"a": "loaded", "b": "unloading", "c": "unloaded"}
    several.registry.refresh()
    assert several.states == {"a": "loaded", "b": "unloaded", "c": "loading"}
    several.loaded("c")
    assert several.ask("c") and several.ask("a")


def test_a_model_with_requests_finishes_them_and_takes_no_more_before_it_leaves(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    several = Several(monkeypatch, "ab", budget=200)
    several.use("a")
    several.run("a", 2)
    assert several.ask("a")
    for _ in range(3):
        assert not several.ask("b")
        assert not several.ask("a")
        assert several.states == {"a": "loaded", "b": "unloaded"}
    several.run("a", 0)
    assert several.states["a"] == "unloading"
    several.registry.refresh()
    assert several.states == {"a": "unloaded", "b": "loading"}


def test_an_idle_model_leaves_before_a_busy_one(monkeypatch: pytest.MonkeyPatch) -> None:
    several = Several(monkeypatch, "abc", budget=260)
    several.use("a", "b")
    several.run("a", 1)
    several.run("b", 1)
    assert not several.ask("c") and not several.ask("a") and several.ask("b")
    several.run("b", 0)
    assert several.states == {"a": "loaded", "b": "unloading", "c": "unloaded"}
    assert several.ask("a")
    several.registry.refresh()
    assert several.states == {"a": "loaded", "b": "unloaded", "c": "loading"}


def test_a_request_that_is_being_read_keeps_its_model(monkeypatch: pytest.MonkeyPatch) -> None:
    several = Several(monkeypatch, "ab", budget=200)
    several.use("a")
    several["a"].leases = 1
    assert not several.ask("b")
    assert several.states["a"] == "loaded"
    several["a"].leases = 0
    several.registry.refresh()
    assert several.states["a"] == "unloading"


def test_models_that_fit_share_what_their_weights_leave(monkeypatch: pytest.MonkeyPatch) -> None:
    several = Several(monkeypatch, "ab", budget=1600)
    several.use("a")
    assert several["a"].engine.nbytes[2] == 1500
    several.run("a", 1)
    # A request of the first one may need all, so the second one waits for its end.
    assert not several.ask("b") and not several.ask("a")
    assert several.states == {"a": "loaded", "b": "unloaded"}
    several.run("a", 0)
    assert several.states == {"a": "loaded", "b": "loading"}
    several.loaded("b")
    assert several.ask("a") and several.ask("b")
    assert [several[name].engine.nbytes[2] for name in "ab"] == [700, 700]
    several.run("a", 1)
    assert several.ask("b")
    assert [several[name].engine.nbytes[2] for name in "ab"] == [700, 700]


def test_a_model_serves_its_waiting_requests_before_it_leaves(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    several = Several(monkeypatch, "ab", budget=200)
    for model in several.registry.models:
        model.waiting = 1
    assert not several.ask("a") and not several.ask("b")
    several.loaded("a")
    assert not several.ask("b") and several.states["a"] == "loaded"
    assert several.ask("a")
    several["a"].waiting = 0
    assert not several.ask("b") and several.states["a"] == "unloading"


def test_a_model_waits_some_time_for_the_client_that_was_told_to_come_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    several = Several(monkeypatch, "ab", budget=200)
    several.ask("a")
    several.loaded("a")
    assert not several.ask("b") and several.states["a"] == "loaded"
    several.now += PATIENCE_SECONDS
    assert not several.ask("b") and several.states["a"] == "unloading"


def test_nothing_is_loaded_for_a_client_that_does_not_come_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    several = Several(monkeypatch, "ab", budget=200)
    several.use("a")
    several.run("a", 1)
    several.ask("b")
    several.now += PATIENCE_SECONDS
    several.registry.refresh()
    several.run("a", 0)
    several.registry.refresh()
    several.registry.refresh()
    assert several.states["b"] == "unloaded"


def test_those_that_wait_for_room_are_loaded_in_their_order(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    several = Several(monkeypatch, "abc", budget=200)
    several.use("a")
    several.run("a", 1)
    for name in "bcbc":
        several.ask(name)
    several.run("a", 0)
    several.ask("c")
    assert several.states == {"a": "unloaded", "b": "loading", "c": "unloaded"}


def test_a_size_is_learned_when_a_model_is_loaded(monkeypatch: pytest.MonkeyPatch) -> None:
    several = Several(monkeypatch, "ab", budget=320)
    several.use("a", "b")
    several.registry.unload(several["b"])
    several.registry.refresh()
    assert several.states["b"] == "unloaded"
    several.ask("b")
    several.loaded("b", 250)
    # The other one had to leave, and is about to.
    assert several.states == {"a": "unloading", "b": "loading"}
    several.registry.refresh()
    several.registry.refresh()
    assert several.states == {"a": "unloaded", "b": "loaded"}
    assert several.ask("b") and several["b"].nbytes == 250
    several["b"].nbytes = 400
    several.registry.unload(several["b"])
    several.registry.refresh()
    with pytest.raises(Problem, match="raise --memory-budget") as refused:
        several.ask("b")
    assert refused.value.status == 500 and refused.value.headers["x-should-retry"] == "false"


def test_two_models_that_turn_out_too_large_together_do_not_wait_for_each_other(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    several = Several(monkeypatch, "ab", budget=300)
    several.ask("a")
    several.ask("b")
    assert set(several.states.values()) == {"loading"}
    several.loaded("a", 200)
    assert several.states == {"a": "unloading", "b": "loading"}
    several.loaded("b", 200)
    assert several.states["b"] == "loaded" and several.ask("b")


def test_an_idle_model_is_unloaded_and_loaded_again(monkeypatch: pytest.MonkeyPatch) -> None:
    several = Several(monkeypatch, "a", idle_seconds=600)
    several.use("a")
    several.run("a", 1)
    several.now += 1000
    several.run("a", 1)
    several.now += 599
    several.run("a", 0)
    assert several.states["a"] == "loaded"
    several.now += 1
    several.registry.refresh()
    assert several.states["a"] == "unloading"
    assert not several.ask("a")
    several.ask("a")
    assert several.states["a"] == "loading"


@pytest.mark.parametrize(("keep", "left_after"), [(0.0, 0), (5.0, 5), (float("inf"), None)])
def test_a_request_may_say_for_how_long_its_model_is_kept(
    monkeypatch: pytest.MonkeyPatch, keep: float, left_after: int | None
) -> None:
    several = Several(monkeypatch, "ab", idle_seconds=600)
    several.use("a")
    several["a"].engine.budget = SimpleNamespace()
    several.registry.parser(several["a"]).keep(keep)
    several.run("a", 1)
    several.run("a", 0)
    times = [0, 4, 5, 700]
    began = several.now
    for seconds in times:
        several.now = began + seconds
        several.registry.refresh()
        gone = left_after is not None and seconds >= left_after
        assert (several.states["a"] != "loaded") == gone
    # A later request does not change the time, unless it loads the model again.
    several.use("b", "a")
    assert several["a"].keep == (keep if left_after is None else 600)


def test_a_model_that_several_machines_share_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    several = Several(monkeypatch, "a")
    several["a"].stays = True
    several.use("a")
    several.registry.unload(several["a"])
    assert several.states["a"] == "loaded"


def test_two_models_of_one_name_are_refused() -> None:
    models = [ServedModel("a", lambda: None, aliases) for aliases in ((), ("b",))]
    with pytest.raises(OptionError, match="two models are named a"):
        Registry(models, memory_budget=1)


def test_what_the_end_waits_for_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    several = Several(monkeypatch, "abc")
    several.use("a", "b")
    several.ask("c")
    several.run("a", 2)
    assert several.registry.pending() == ["2 of a", "c, which is loading"]


@pytest.fixture(scope="module")
def directories(
    llama: tuple[Path, Path], templated: tuple[Path, None], t5: tuple[Path, Path]
) -> dict[str, tuple[Path, Path | None]]:
    return {"llama": llama, "templated": templated, "t5": t5}


@pytest.fixture(scope="module")
def alone(directories: dict[str, tuple[Path, Path | None]]) -> dict[str, tuple[str, int]]:
    """What each model writes by itself, plainly decoded, and the bytes of its weights."""
    options = Options(regular=True, max_tokens=12, cost_cache=False)
    found = {}
    for name, paths in directories.items():
        pair = load(*paths)
        text = generate(pair, pair.tokenizer.encode(TEXT), options).text
        found[name] = text, pair.target.nbytes + pair.draft_bytes
    return found


def registry_of(directories: dict[str, tuple[Path, Path | None]], **settings: Any) -> Registry:
    def model(name: str, paths: tuple[Path, Path | None]) -> ServedModel:
        return ServedModel(
            name, lambda: (load(*paths), OPTIONS), (f"my/{name}",), store=Store(1 << 20)
        )

    return Registry([model(*each) for each in directories.items()], batch_size=4, **settings)


def of_two(
    one: tuple[Path, Path], other: tuple[Path, None], **settings: Any
) -> tuple[Registry, ServedModel, TestClient]:
    """A registry of two models, the second of them, and a client."""
    registry = registry_of({"one": one, "other": other}, **settings)
    return registry, registry.named("other"), client_for(Service(registry))


def ended(registry: Registry) -> None:
    engines = registry.engines
    registry.close()
    assert all(engine.join(60) for engine in engines)


def test_a_request_selects_its_model_which_is_loaded_for_it(
    directories: dict[str, tuple[Path, Path | None]], alone: dict[str, tuple[str, int]]
) -> None:
    registry = registry_of(directories, waits=True)
    client = client_for(Service(registry))
    listed = client.get("/v1/models").json()["data"]
    assert [one["status"]["value"] for one in listed] == ["unloaded"] * 3
    for name in directories:
        for asked in (name, f"my/{name}", f"{name}:latest"):
            answer = ok(client, COMPLETIONS, model=asked, prompt=TEXT, max_tokens=12)
            assert (answer["model"], answer["choices"][0]["text"]) == (name, alone[name][0])
    assert ok(client, COMPLETIONS, prompt=TEXT, max_tokens=12)["model"] == "llama"
    for one in client.get("/v1/models").json()["data"]:
        engine = registry.named(one["id"]).engine
        assert one["status"]["value"] == "loaded" and one["meta"]["size"] == engine.weight_bytes
        assert one["context_length"] == one["meta"]["n_ctx_train"] > 0
    answer = client.post(COMPLETIONS, json={"model": "other", "prompt": TEXT})
    assert answer.status_code == 404 and "ask for llama, templated, t5" in answer.text
    assert client.get("/props?model=t5").json()["model_alias"] == "t5"
    gauges = client.get("/metrics").text
    for name in directories:
        label = f'{{model_name="{name}",engine="0"}}'
        answers = 4 if name == "llama" else 3
        assert f"vllm:e2e_request_latency_seconds_count{label} {answers}" in gauges
        assert f'mlx_specdec:model_loaded{{model_name="{name}"}} 1' in gauges
        size = registry.named(name).nbytes
        assert f'mlx_specdec:model_bytes{{model_name="{name}"}} {float(size)}' in gauges
        assert f'mlx_specdec:model_requests_running{{model_name="{name}"}} 0' in gauges
        assert f'mlx_specdec:model_requests_waiting{{model_name="{name}"}} 0' in gauges
    ended(registry)


def test_each_model_has_its_own_figures_under_vllms_names() -> None:
    """This server's own counters have no label for a model, and are sums over all models."""
    models = [
        ServedModel(name, lambda: None, waiting=n) for n, name in ((2, "first"), (1, "second"))
    ]
    first, second = (model.metrics for model in models)
    first.tokens(3, 0.2, first=True)
    first.tokens(2, 0.2, first=False)
    second.tokens(4, 0.2, first=True)
    second.count("rejected", 2)
    service = Service(Registry(models))
    lines = metrics(service, HttpRequest({"type": "http"})).body.decode().splitlines()
    one, other = (f'{{model_name="{name}",engine="0"}}' for name in ("first", "second"))
    for line in (
        f"vllm:generation_tokens_total{one} 5",
        f"vllm:generation_tokens_total{other} 4",
        f"vllm:spec_decode_num_drafts_total{other} 0",
        f"vllm:time_to_first_token_seconds_count{one} 1",
        f"vllm:inter_token_latency_seconds_count{other} 0",
        f"vllm:num_requests_waiting{other} 1.0",
        "mlx_specdec:requests_rejected_total 2",
    ):
        assert line in lines
    heads = [line for line in lines if line.startswith("# TYPE")]
    assert len(set(heads)) == len(heads)


def test_requests_are_told_to_come_again_while_their_model_is_loaded(
    llama: tuple[Path, Path], templated: tuple[Path, None], caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO", "mlx_specdec.serve.registry")
    goes_on = threading.Event()
    registry, other, client = of_two(llama, templated)
    quick = other.load
    other.load = lambda: goes_on.wait(60) and quick()
    other.nbytes = 5_000_000_000
    registry._shared = 1 << 40
    unloaded = client.get("/props?model=other")
    assert unloaded.status_code == 503 and "other is not in memory" in unloaded.text
    for _ in range(2):
        answer = client.post(COMPLETIONS, json=FOR_OTHER)
        assert answer.status_code == 503 and answer.json()["error"]["code"] == "loading"
        said = "the model other is loading: try again in 6 s, or start the server with --wait-for-m"
        assert answer.json()["error"]["message"].startswith(said)
        # A second for each gigabyte.
        assert answer.headers["retry-after"] == "6"
        assert client.get("/health").status_code == 200
    goes_on.set()
    wait_until(lambda: client.post(COMPLETIONS, json=FOR_OTHER).status_code == 200)
    said = [record.message for record in caplog.records if record.name.endswith("registry")]
    assert said[0] == "loading other" and said[1].startswith("loaded other, ")
    ended(registry)


def test_a_load_that_fails_is_reported_to_all_who_wait_and_tried_again(
    llama: tuple[Path, Path], templated: tuple[Path, None]
) -> None:
    begun, goes_on = threading.Event(), threading.Event()
    registry, other, client = of_two(llama, templated, waits=True)
    works = other.load

    def fails() -> None:
        begun.set()
        assert goes_on.wait(60)
        other.load = works
        raise SourceError("there is no such model: choose another one")

    other.load = fails
    with ThreadPoolExecutor(3) as pool:
        answers = [pool.submit(client.post, COMPLETIONS, json=FOR_OTHER) for _ in range(3)]
        assert begun.wait(60)
        wait_until(lambda: other.waiting == 3)
        goes_on.set()
        for answer in (one.result() for one in answers):
            assert answer.status_code == 500 and "the server's log says why" in answer.text
            assert answer.headers["x-should-retry"] == "false"
    assert client.post(COMPLETIONS, json=FOR_OTHER).status_code == 200
    ended(registry)


def test_unloading_gives_the_memory_back(llama: tuple[Path, Path]) -> None:
    registry = registry_of({"one": llama})
    client = client_for(Service(registry))
    before = mx.get_active_memory()
    registry.waits = True
    assert ok(client, COMPLETIONS, prompt=TEXT, max_tokens=8)
    assert mx.get_active_memory() - before >= registry.first.loaded_bytes > 0
    registry.unload(registry.first)
    wait_until(lambda: registry.refresh() or registry.first.state == "unloaded")
    assert registry.first.loaded_bytes == 0
    assert mx.get_active_memory() - before < registry.first.nbytes / 10
    assert client.get("/health").status_code == 200
    # MLX would keep a thread for each thread of an engine.
    threads = {thread for thread in threading.enumerate() if thread.name == "engine"}
    assert ok(client, COMPLETIONS, prompt=TEXT, max_tokens=8)
    assert threads == {thread for thread in threading.enumerate() if thread.name == "engine"}
    ended(registry)


def test_requests_over_three_models_with_memory_for_two_are_answered_as_alone(
    directories: dict[str, tuple[Path, Path | None]],
    alone: dict[str, tuple[str, int]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    # The requests of tiny models take more memory than their weights.
    monkeypatch.setattr(registry_module, "RESERVE", 0.25)
    total = sum(nbytes for _, nbytes in alone.values())
    registry = registry_of(directories, waits=True, memory_budget=2 * total)
    most, step = [], Scheduler.step

    def noting(self: Scheduler) -> Any:
        held = [engine for engine in registry.engines if engine.ready.is_set()]
        most.append(sum(engine.weight_bytes for engine in held))
        return step(self)

    monkeypatch.setattr(Scheduler, "step", noting)
    names = [name for name in directories for _ in range(4)]
    with served(App(Service(registry))) as (_, port):
        place = Place(port, None)

        def ask(name: str) -> str:
            status, answer = place.ask(model=name, prompt=TEXT, max_tokens=12)
            assert status == 200, answer
            return answer["choices"][0]["text"]

        with ThreadPoolExecutor(4) as pool:
            answers = list(pool.map(ask, names))
    assert answers == [alone[name][0] for name in names]
    assert max(most) < total
    ended(registry)
