"""Several models: which one answers, when each is loaded and unloaded, and what requests see."""

import gc
import threading
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest

from mlx_specdec.engine.loading import load
from mlx_specdec.engine.prompt_cache import Store
from mlx_specdec.errors import OptionError
from mlx_specdec.serve import registry as registry_module
from mlx_specdec.serve.problems import Problem
from mlx_specdec.serve.registry import Registry, ServedModel
from mlx_specdec.serve.requests import Facts, ServiceSettings

from ..support.serving import (
    COMPLETIONS,
    OPTIONS,
    TEXT,
    client_for,
    ok,
    wait_until,
)

FOR_OTHER = {"model": "other", "prompt": TEXT, "max_tokens": 2}
HASTY = ServiceSettings(seconds=0.2)
FACTS = Facts(100, ("completion",), True, "llama", "float32")


class PretendedEngine:
    """An engine without a thread. The test decides when it is ready and what it decodes."""

    def __init__(self, load: object, size: int, store: object, *more: Any) -> None:
        self.ready, self.ended, self.problem = threading.Event(), False, None
        self.closed, self.requests = False, (0, 0)
        self.memory_budget = more[0] or 0
        self.pair = self.options = self.budget = None

    def limit(self, nbytes: int) -> None:
        assert self.requests == (0, 0), "a request that was accepted might not fit any more"
        self.memory_budget = nbytes

    def close(self) -> None:
        assert self.requests == (0, 0), "a model with requests is unloaded"
        self.closed = self.ended = True


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
        self[name].nbytes = nbytes
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
    assert several["a"].engine.memory_budget == 1500
    several.run("a", 1)
    # A request of the first one may need all, so the second one waits for its end.
    assert not several.ask("b") and not several.ask("a")
    assert several.states == {"a": "loaded", "b": "unloaded"}
    several.run("a", 0)
    assert several.states == {"a": "loaded", "b": "loading"}
    several.loaded("b")
    assert several.ask("a") and several.ask("b")
    assert [several[name].engine.memory_budget for name in "ab"] == [700, 700]
    several.run("a", 1)
    assert several.ask("b")
    assert [several[name].engine.memory_budget for name in "ab"] == [700, 700]


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
    # There is too little room for both now, so the least recently used one leaves.
    assert several.states == {"a": "unloading", "b": "loaded"}
    several.registry.refresh()
    assert several.states == {"a": "unloaded", "b": "loaded"}
    assert several.ask("b")
    several["b"].nbytes = 400
    several.registry.unload(several["b"])
    several.registry.refresh()
    with pytest.raises(Problem, match="raise --memory-budget") as refused:
        several.ask("b")
    assert refused.value.status == 500 and refused.value.headers["x-should-retry"] == "false"


def test_a_model_that_is_larger_than_its_files_waits_for_room(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    several = Several(monkeypatch, "ab", budget=320)
    several.use("a", "b")
    several.registry.unload(several["b"])
    several.run("a", 1)
    several["b"].waiting = 1
    several.ask("b")
    several.loaded("b", 250)
    # The other one has a request, and leaves after it.
    assert not several.ask("b")
    several.run("a", 0)
    assert several.ask("b")


def test_models_are_loaded_one_after_the_other_and_others_answer_meanwhile(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    several = Several(monkeypatch, "abc", budget=1000)
    several.use("a")
    several.ask("b")
    several.ask("c")
    assert several.states == {"a": "loaded", "b": "loading", "c": "unloaded"}
    assert several.ask("a")
    several.loaded("b")
    assert several.states == {"a": "loaded", "b": "loaded", "c": "loading"}


def test_a_model_that_several_machines_share_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    several = Several(monkeypatch, "a")
    several["a"].stays = True
    several.use("a")
    several.registry.unload(several["a"])
    assert several.states["a"] == "loaded"


def test_a_single_model_that_cannot_be_loaded_ends_the_server(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    several = Several(monkeypatch, "a")
    several.registry.refresh()
    assert several.registry.begins and not several.ask("a")
    engine, problem = several["a"].engine, OptionError("there is no file")
    engine.problem, engine.closed, engine.ended = problem, True, True
    with pytest.raises(Problem, match="shutting down"):
        for _ in range(2):
            several.ask("a")
    assert several.registry.fatal is problem


def test_the_time_for_a_request_includes_the_load_of_its_model() -> None:
    may_load = threading.Event()
    model = ServedModel("slow", lambda: may_load.wait(60), settings=HASTY)
    registry = Registry([model])
    answer = client_for(registry).post(COMPLETIONS, json={"prompt": TEXT})
    assert answer.status_code == 503 and answer.json()["error"]["code"] == "timeout"
    assert (model.waiting, model.leases, model.state) == (0, 0, "loading")
    registry.close()
    may_load.set()


def registry_of(directories: dict[str, tuple[Path, Path | None]], **settings: Any) -> Registry:
    def model(name: str, paths: tuple[Path, Path | None]) -> ServedModel:
        return ServedModel(
            name, lambda: (load(*paths), OPTIONS), (f"my/{name}",), store=Store(1 << 20)
        )

    return Registry([model(*each) for each in directories.items()], batch_size=4, **settings)


def ended(registry: Registry) -> None:
    engines = registry.engines
    registry.close()
    assert all(engine.join(60) for engine in engines)


def test_unloading_gives_the_memory_back(llama: tuple[Path, Path]) -> None:
    registry = registry_of({"one": llama})
    client = client_for(registry)
    gc.unfreeze()
    gc.collect()  # models of earlier tests
    gc.freeze()
    before = mx.get_active_memory()
    assert ok(client, COMPLETIONS, prompt=TEXT, max_tokens=8)
    assert mx.get_active_memory() - before >= registry.first.numbers["mlx_specdec:model_bytes"] > 0
    registry.unload(registry.first)
    wait_until(lambda: registry.refresh() or registry.first.state == "unloaded")
    assert registry.first.numbers["mlx_specdec:model_bytes"] == 0
    assert mx.get_active_memory() - before < registry.first.nbytes / 10
    assert client.get("/health").status_code == 200
    # MLX would keep a thread for each thread of an engine.
    threads = {thread for thread in threading.enumerate() if thread.name.startswith("engine")}
    assert ok(client, COMPLETIONS, prompt=TEXT, max_tokens=8)
    assert threads >= {one for one in threading.enumerate() if one.name.startswith("engine")}
    ended(registry)
