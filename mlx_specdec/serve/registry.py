"""The models that a server knows: their names, their states, and which of them are in memory.

The registry stands between the routes and the engines. Every loaded model has its own engine, and
models with requests are never unloaded."""

import logging
import math
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal

from .. import system
from ..core.options import Options
from ..engine.memory import RESERVE
from ..engine.pair import Pair, alphabet_of
from ..engine.prompt_cache_files import Store
from ..engine.turns import Turns
from ..errors import OptionError
from ..models.wired_memory import wire
from ..system import show_size
from ..text.markers import markers_of
from .answers import token_pieces
from .engine import STOPPING, Engine, Worker
from .metrics import Metrics
from .problems import Problem, busy, failed
from .requests import Facts, LoadedModel
from .settings import ServiceSettings

State = Literal["unloaded", "loading", "loaded", "unloading"]
UNNAMED = ("", "default_model", "dummy", "tgi")
"""Names that clients of mlx_lm.server and of Hugging Face's servers send if no model is named."""
LATEST = ":latest"
"""The tag that clients of ollama add to names."""
LOADING_SPEED = 1_000_000_000
"""Bytes of weights per second that are expected to be loaded, for the header Retry-After."""
MOST_RETRY_SECONDS = 60
log = logging.getLogger(__name__)


@dataclass(eq=False)
class ServedModel:
    """A model that may be loaded. The service changes `leases` and `waiting`, and only the registry
    changes the other fields.

    Attributes:
        name, aliases: The names by which requests select it. Answers contain `name`.
        load: Returns the models and the default options. It is called in the engine's thread.
        settings: How its requests are read.
        store: The files of its prompt cache, or None for no prompt cache.
        stays: Whether it is never unloaded, because other machines share it.
        nbytes: Size of the weights: of the files before the first load, or 0 if it is not known.
        engine: The engine, unless the model is unloaded.
        keep: Seconds without a request after which the model is unloaded.
        used: Time of the newest request.
        idle_since: Time at which it was loaded, or at which it last had a request.
        wanted_since: Time of the oldest request that wants the model to be loaded, or 0.
        resting: Whether it takes no new requests, because another model needs memory.
        leases: Requests that are being read and are not submitted yet.
        waiting: Requests that wait until the model is loaded.
        problem: The error of the last load, for the requests that waited for it.
        facts: Facts that are known after the first load.
        metrics: The counters of its requests.
    """

    name: str
    load: Callable[[], tuple[Pair, Options]]
    aliases: tuple[str, ...] = ()
    settings: ServiceSettings = field(default_factory=ServiceSettings)
    store: Store | None = None
    nbytes: int = 0
    stays: bool = False
    engine: Engine | None = None
    state: State = "unloaded"
    keep: float = math.inf
    used: float = 0.0
    idle_since: float = 0.0
    wanted_since: float = 0.0
    resting: bool = False
    leases: int = 0
    waiting: int = 0
    problem: Problem | None = None
    facts: Facts | None = None
    metrics: Metrics = field(default_factory=Metrics)

    @property
    def requests(self) -> tuple[int, int]:
        """The number of running requests and the number of waiting requests."""
        running, waiting = (0, 0) if self.engine is None else self.engine.requests
        return running, waiting + self.waiting

    @property
    def loaded_bytes(self) -> int:
        """Size of the weights in memory."""
        return 0 if self.engine is None else self.engine.weight_bytes

    @property
    def busy(self) -> bool:
        """Whether it has requests, or is about to get some."""
        return bool(self.leases) or (self.engine is not None and any(self.engine.requests))

    @property
    def request_bytes(self) -> int:
        """The budget for all its requests in bytes, or 0 if it has no requests now."""
        return self.engine.nbytes[2] if self.engine is not None and self.busy else 0


@dataclass
class Registry:
    """The models of a server. A single model is loaded by `begin`; of several, each is loaded for
    its first request, and the least recently used ones are unloaded if memory is short.

    Attributes:
        models: The models. The first one answers requests that name none.
        batch_size, waiting: Arguments of every Engine.
        memory_budget: Bytes for all requests, and for the weights of several models. None is the
            default.
        idle_seconds: Seconds without a request after which a model is unloaded.
        waits: Whether requests wait while their model is not loaded, instead of an error.
        strict: Whether a request for an unknown name is refused although there is one model only.
        clock: Returns the time in seconds.
    Raises:
        OptionError: If two models have the same name.
    """

    models: Sequence[ServedModel]
    batch_size: int = 16
    waiting: int = 64
    memory_budget: int | None = None
    idle_seconds: float = math.inf
    waits: bool = True
    strict: bool = False
    clock: Callable[[], float] = time.monotonic

    def __post_init__(self) -> None:
        self._lock = threading.RLock()
        self._loading = threading.Lock()
        self._closed = False
        self._begun: Engine | None = None
        self._loaded = False
        self._workers: list[Worker] = []
        self._turns = Turns()
        self._by_name: dict[str, ServedModel] = {}
        # The queue would never have enough places for a request with more choices.
        most = self.batch_size + self.waiting
        for model in self.models:
            limits = model.settings.limits
            limits = replace(limits, choices=min(limits.choices, most))
            model.settings = replace(model.settings, limits=limits)
            if model.engine is not None:
                model.state = "loading"
            for name in dict.fromkeys((model.name, *model.aliases)):
                if name in self._by_name:
                    raise OptionError(f"two models are named {name:.80}: give each its own name")
                self._by_name[name] = model
        # Several models share this number of bytes. A single model's engine gets `memory_budget`.
        self._shared = self._shared_bytes() if len(self.models) > 1 else None

    def _shared_bytes(self) -> int:
        if self.memory_budget is not None:
            return self.memory_budget
        cached = sum(model.store.memory_bytes for model in self.models if model.store is not None)
        rest = int((1 - RESERVE) * system.usable_memory())
        return rest - min(cached, rest // 2)

    @property
    def _least(self) -> int:
        """The least memory, in bytes, that each loaded model keeps for its requests."""
        return int(RESERVE * (self._shared or 0))

    @property
    def first(self) -> ServedModel:
        """The model for requests that name none."""
        return self.models[0]

    @property
    def names(self) -> str:
        """The names of all models, for messages."""
        return ", ".join(model.name for model in self.models)

    @property
    def engines(self) -> list[Engine]:
        """The engines of all models that are in memory."""
        return [model.engine for model in self.models if model.engine is not None]

    @property
    def begins(self) -> bool:
        """Whether the single model has not been loaded yet."""
        return len(self.models) == 1 and not self._loaded

    def find(self, named: object) -> ServedModel:
        """Return the model for the name in a request, or the first one if there is no name.
        Raises Problem if no model answers to the name."""
        if named is None or named in UNNAMED:
            return self.first
        # One model answers requests for every name.
        loose = len(self.models) == 1 and not self.strict
        return self.first if loose else self.named(str(named))

    def named(self, name: str) -> ServedModel:
        """Return the model with this name. Raises Problem if there is none."""
        found = self._by_name.get(name) or self._by_name.get(name.removesuffix(LATEST))
        if found is None:
            text = f"the model {name:.80} is not served here: ask for {self.names:.1000}"
            raise Problem(404, text, param="model", code="model_not_found")
        return found

    def begin(self, then: Callable[[], None]) -> None:
        """Load the model if there is only one. then: Called when it is loaded, or after an error,
        which the caller reports. If there are several models, it is called at once."""
        if len(self.models) == 1:
            with self._lock:
                self._begun = self._start(self.first, then)
        else:
            then()

    def prepare(self, model: ServedModel) -> bool:
        """Return whether a model takes requests now, and begin to load it if it is unloaded. If it
        takes requests, it does so until another method is called. Raises Problem if the model
        cannot be loaded."""
        with self._lock:
            if self._closed:
                raise busy(STOPPING)
            if model.state == "unloaded" and model.problem is None:
                self._check_fits(model)
                model.used = self.clock()
                model.wanted_since = model.wanted_since or model.used
            self.refresh()
            if model.problem is not None:
                problem = model.problem
                if model.waiting <= 1:
                    model.problem = None  # the next request tries again
                raise problem
            if model.state != "loaded" or model.resting:
                return False
            if not model.busy:
                self._share()
            model.used = model.idle_since = self.clock()
            return True

    def loaded(
        self, model: ServedModel, tenant: str = "", load_seconds: float = 0.0
    ) -> LoadedModel:
        """Return a model for a tenant's requests. Raises Problem if it is not loaded. load_seconds:
        Seconds for which the request has waited for the model."""
        engine = model.engine
        if engine is None or not engine.ready.is_set() or model.state == "unloading":
            raise self.not_loaded(model)

        def keep(seconds: float) -> None:
            model.keep = seconds

        of_engine = (engine.pair, engine.options, model.settings, model.name, engine.budget)
        return LoadedModel(*of_engine, tenant, keep, load_seconds)

    def not_loaded(self, model: ServedModel) -> Problem:
        """Return the error for a request to a model that takes none yet."""
        seconds = min(1 + model.nbytes // LOADING_SPEED, MOST_RETRY_SECONDS)
        text = f"the model {model.name:.80} is loading: try again in {seconds} s"
        if model.state == "unloaded" and not model.wanted_since:
            text = f"the model {model.name:.80} is not in memory: a completion loads it"
        elif not self.waits:
            text += ", or start the server without --no-wait"
        return busy(text, code="loading", seconds=seconds)

    def refresh(self) -> None:
        """Note which models have been loaded or unloaded, and unload those that are idle for too
        long. If there is room, load the model that has been wanted for the longest time. The server
        calls this ten times a second."""
        with self._lock:
            for model in self.models:
                model.resting = False
            for model in self.models:
                if model.state != "unloaded":
                    self._settle(model)
                if model.state == "loaded":
                    self._check_idle(model)
            wanted = (model for model in self.models if model.wanted_since)
            first = min(wanted, key=lambda model: model.wanted_since, default=None)
            if first is not None and not self._closed and self._make_room(first):
                self._start(first)

    def unload(self, model: ServedModel) -> None:
        """Unload a model as soon as it has no requests."""
        with self._lock:
            if model.state in ("loading", "loaded"):
                model.keep = 0.0
            self.refresh()

    def close(self) -> None:
        """Accept no more requests, and end pending requests with an error at once."""
        with self._lock:
            self._closed = True
            for engine in self.engines:
                engine.close()
            for worker in self._workers:
                worker.do(None)
                worker.join(1)

    def pending(self) -> list[str]:
        """Describe the requests and the models that the server's end has to wait for."""
        parts = []
        for model in self.models:
            if model.engine is None:
                continue
            if count := sum(model.engine.requests):
                parts.append(f"{count} of {model.name}")
            elif model.state != "loaded":
                parts.append(f"{model.name}, which is {model.state}")
        return parts

    def _start(self, model: ServedModel, then: Callable[[], None] = lambda: None) -> Engine:
        def load() -> tuple[Pair, Options]:
            with self._loading:  # the messages about progress are for one model at a time
                log.info("loading %s", model.name)
                pair, options = model.load()
            model.facts = LoadedModel(pair, options, model.settings, model.name).facts
            return pair, options

        model.engine = engine = Engine(
            load,
            batch_size=self.batch_size,
            waiting=self.waiting,
            store=model.store,
            memory_budget=self.memory_budget if self._shared is None else self._least,
            metrics=model.metrics,
            turns=self._turns,
        )
        model.state, model.wanted_since = "loading", 0.0
        model.keep = self.idle_seconds
        engine.start(then, self._workers.pop() if self._workers else None)
        return engine

    def _settle(self, model: ServedModel) -> None:
        """Bring the state of a model up to date with its engine."""
        engine = model.engine
        assert engine is not None, "only an unloaded model has no engine"
        if engine.problem is not None and engine is not self._begun and engine.join(0):
            error = engine.problem
            log.error("%s has ended: %r", model.name, error)
            # The error may contain paths of this machine.
            model.problem = failed(f"{model.name} cannot be used: the server's log says why")
            model.engine, model.state = None, "unloaded"
        elif model.state == "loading" and engine.ready.is_set():
            # A checkpoint may take more memory than its files have bytes.
            model.nbytes, model.idle_since = engine.weight_bytes, self.clock()
            if self._make_room(model):
                model.state, model.facts = "loaded", model.facts or self.loaded(model).facts
                self._loaded = True
                log.info("loaded %s, %s", model.name, show_size(model.nbytes))
            elif self._alone_too_large(model) or any(
                one.state == "loading" for one in self.models if one is not model
            ):
                log.info("there is no room for %s, %s", model.name, show_size(model.nbytes))
                self._unload(model)
        elif model.state == "unloading" and engine.join(0):
            log.info("unloaded %s", model.name)
            for cache in (markers_of, token_pieces, alphabet_of):
                cache.cache_clear()  # they refer to tokenizers
            assert engine.worker is not None
            self._workers.append(engine.worker)
            model.engine, model.state = None, "unloaded"
            if self.engines:
                wire()

    def _check_idle(self, model: ServedModel) -> None:
        """Unload a loaded model if it is due."""
        if model.busy:
            model.idle_since = self.clock()
        elif self.clock() - model.idle_since >= model.keep and self._may_leave(model):
            self._unload(model)

    def _may_leave(self, model: ServedModel) -> bool:
        """Return whether a loaded model is neither awaited nor needed by other machines."""
        return not (model.stays or model.waiting)

    def _unload(self, model: ServedModel) -> None:
        assert model.engine is not None
        model.state = "unloading"
        model.engine.unload()

    def _alone_too_large(self, model: ServedModel) -> bool:
        return self._shared is not None and model.nbytes + self._least > self._shared

    def _check_fits(self, model: ServedModel) -> None:
        """Raise Problem if a model does not fit into the memory budget even alone."""
        if self._alone_too_large(model):
            raise failed(
                f"{model.name} takes {show_size(model.nbytes)}, and all models with their requests "
                f"may take {show_size(self._shared or 0)}: raise --memory-budget"
            )

    def _make_room(self, model: ServedModel) -> bool:
        """Return whether there is room for a model. If not, unload as many of the others as
        necessary: idle ones first, and the least recently used ones first. A busy one takes no new
        requests until the next `refresh`."""
        if self._shared is None:
            return True
        in_memory = [one for one in self.models if one.engine is not None and one is not model]
        staying = [one for one in in_memory if one.state != "unloading"]
        for victim in sorted(staying, key=lambda one: (one.busy, one.used)):
            if self._taken([*staying, model]) <= self._shared:
                break
            if victim.state == "loaded" and self._may_leave(victim):
                staying.remove(victim)
                victim.resting = True
                if not victim.busy:
                    self._unload(victim)
        for one in staying:
            # If the present budgets leave too little room, a busy model takes no new requests. Its
            # budget can be reduced when its requests have ended.
            one.resting |= one.busy and self._taken([*staying, model], now=True) > self._shared
        return self._taken([*in_memory, model], now=True) <= self._shared

    def _taken(self, models: Iterable[ServedModel], *, now: bool = False) -> int:
        """Return the bytes of these models with the least budget for their requests. now: Count the
        present budget of models that have requests."""
        least = self._least
        return sum(
            model.nbytes + (max(least, model.request_bytes) if now else least) for model in models
        )

    def _share(self) -> None:
        """Divide the memory without weights and without the budgets of busy models among the other
        loaded models."""
        if self._shared is None:
            return
        held = [model for model in self.models if model.engine is not None]
        idle = [model for model in held if model.state == "loaded" and not model.busy]
        fixed = [model for model in held if model not in idle]
        weights = sum(model.nbytes for model in idle)
        rest = self._shared - weights - self._taken(fixed, now=True)
        for model in idle:
            assert model.engine is not None
            model.engine.limit(max(self._least, rest // len(idle)))
