"""The models that a server knows: their names, and which of them are in memory.

The registry stands between the routes and the engines. Every loaded model has its own engine, and
models with requests are never unloaded. Only the event loop calls the registry."""

import logging
import math
import time
from collections import Counter
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Literal

from ..core.options import Options
from ..engine.memory import RESERVE, default_budget
from ..engine.pair import Pair, alphabet_of
from ..engine.prompt_cache import Store
from ..engine.turns import Turns
from ..errors import OptionError
from ..models.wired_memory import wire
from ..system import show_size
from ..text.markers import markers_of
from ..text.vocabulary import token_bytes
from .engine import STOPPING, Engine
from .problems import Problem, busy, failed
from .requests import Facts, LoadedModel, ServiceSettings
from .stored import StoredResponses

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
    """A model that may be loaded. The service changes `leases`, `waiting` and `keep`, and only the
    registry changes the other fields.

    Attributes:
        name, aliases: The names by which requests select it. Answers contain `name`.
        load: Returns the models and the default options. It is called in the engine's thread.
        settings: How its requests are read.
        store: The files of its prompt cache.
        stays: Whether it is never unloaded, because other machines share it.
        nbytes: Size of the weights: of the files before the first load, or 0 if it is not known.
        engine: The engine, unless the model is unloaded.
        keep: Seconds without a request after which the model is unloaded.
        used: The last time at which the model had a request, or at which it was loaded.
        leases: Requests that are being read and are not submitted yet.
        waiting: Requests that wait until the model is loaded.
        problem: The error of the last load, for the requests that waited for it.
        facts: What is known of the model since its first load.
        counters: The counters of its metrics.
    """

    name: str
    load: Callable[[], tuple[Pair, Options]]
    aliases: tuple[str, ...] = ()
    settings: ServiceSettings = field(default_factory=ServiceSettings)
    store: Store = field(default=Store(0))
    nbytes: int = 0
    stays: bool = False
    engine: Engine | None = None
    keep: float = math.inf
    used: float = 0.0
    leases: int = 0
    waiting: int = 0
    problem: Problem | None = None
    facts: Facts = field(default_factory=Facts)
    counters: Counter[str] = field(default_factory=Counter)

    @property
    def state(self) -> Literal["unloaded", "loading", "loaded", "unloading"]:
        """The state of the model, in llama.cpp's words."""
        if self.engine is None:
            return "unloaded"
        if self.engine.closed:
            return "unloading"
        return "loaded" if self.engine.ready.is_set() else "loading"

    @property
    def numbers(self) -> dict[str, float]:
        """The numbers of the metrics of the model, by name, without some that are 0."""
        loaded = self.state == "loaded"
        running, waiting = (0, 0) if self.engine is None else self.engine.requests
        return {
            **self.counters,
            **({} if self.engine is None else self.engine.gauges),
            "mlx_specdec:model_loaded": int(loaded),
            "mlx_specdec:model_bytes": self.nbytes if loaded else 0,
            "mlx_specdec:model_requests_running": running,
            "mlx_specdec:model_requests_waiting": waiting + self.waiting,
        }

    @property
    def busy(self) -> bool:
        """Whether it has requests, or is about to get some."""
        return bool(self.leases) or (self.engine is not None and any(self.engine.requests))


@dataclass
class Registry:
    """The models of a server. A single model is loaded at once; of several, each is loaded for its
    first request, and the least recently used ones are unloaded if memory is short.

    Attributes:
        models: The models. The first one answers requests that name none.
        batch_size: Argument of every Engine.
        memory_budget: Bytes for all requests, and for the weights of several models. None is the
            default.
        idle_seconds: Seconds without a request after which a model is unloaded.
        waits: Whether requests wait while their model is not loaded, instead of an error.
        strict: Whether a request for an unknown name is refused although there is one model only.
        clock: Returns the time in seconds.
        begins: Whether the single model has not been loaded yet.
        created: Time of the server's start, in seconds since 1970.
        responses: The responses that clients can fetch or continue.
        closed: Whether the server is shutting down.
        fatal: The error that has ended the only model of the server, or None.
    Raises:
        OptionError: If two models have the same name.
    """

    models: Sequence[ServedModel]
    batch_size: int = 16
    memory_budget: int | None = None
    idle_seconds: float = math.inf
    waits: bool = True
    strict: bool = False
    clock: Callable[[], float] = time.monotonic
    fatal: BaseException | None = None

    def __post_init__(self) -> None:
        self.created, self.responses = int(time.time()), StoredResponses()
        self.closed = False
        # The models that take no new requests, because another one needs memory.
        self._resting: list[ServedModel] = []
        self.begins = len(self.models) == 1
        # Engines that follow each other share a thread, because MLX keeps a thread for each thread
        # that has computed something.
        self._threads = ThreadPoolExecutor(len(self.models), "engine")
        self._turns = Turns()
        self._by_name: dict[str, ServedModel] = {}
        # The models to load, in this order.
        self._wanted = [model for model in self.models if self.begins and model.engine is None]
        for model in self.models:
            for name in (model.name, *model.aliases):
                if self._by_name.setdefault(name, model) is not model:
                    raise OptionError(f"two models are named {name:.80}: give each its own name")
        # Several models share a number of bytes. A single model's engine gets `memory_budget`.
        self._shared: float = math.inf
        # Each of several loaded models keeps at least this number of bytes for its requests.
        self._least = 0
        if len(self.models) > 1:
            default = default_budget(0, sum(model.store.memory_bytes for model in self.models))
            self._shared = default if self.memory_budget is None else self.memory_budget
            self._least = int(RESERVE * self._shared)

    @property
    def first(self) -> ServedModel:
        """The model for requests that name none."""
        return self.models[0]

    @property
    def names(self) -> str:
        """The names of all models, for messages."""
        return ", ".join(model.name for model in self.models)

    @property
    def _held(self) -> list[ServedModel]:
        """The models that are in memory, or come into it or leave it."""
        return [model for model in self.models if model.engine is not None]

    @property
    def engines(self) -> list[Engine]:
        """The engines of all models that are in memory."""
        return [model.engine for model in self.models if model.engine is not None]

    def find(self, named: object) -> ServedModel:
        """Return the model for the name in a request, or the first one if there is no name.
        Raises Problem if no model answers to the name."""
        # A single model answers requests for every name, unless it is strict.
        loose = len(self.models) == 1 and not self.strict
        return self.first if loose or named in (None, *UNNAMED) else self.named(str(named))

    def named(self, name: str) -> ServedModel:
        """Return the model with this name. Raises Problem if there is none."""
        found = self._by_name.get(name) or self._by_name.get(name.removesuffix(LATEST))
        if found is None:
            text = f"the model {name:.80} is not served here: ask for {self.names:.1000}"
            raise Problem(404, text, param="model", code="model_not_found")
        return found

    def prepare(self, model: ServedModel) -> bool:
        """Return whether a model takes requests now, and begin to load it if it is unloaded. If it
        takes requests, it does so until another method is called. Raises Problem if the model
        cannot be loaded."""
        if self.closed:
            raise busy(STOPPING)
        if model.engine is None and model.problem is None:
            self._check_fits(model)
            if model not in self._wanted:
                self._wanted.append(model)
        self.refresh()
        if (problem := model.problem) is not None:
            if model.waiting <= 1:
                model.problem = None  # the next request tries again
            raise problem
        if model.state != "loaded" or model in self._resting:
            return False
        leaves = self._resting or any(one.state == "unloading" for one in self._held)
        if leaves and self._taken(self._held) > self._shared:
            return False  # a model has turned out to be larger than its files
        if not model.busy:
            self._share()
        model.used = self.clock()
        return True

    def loaded(self, model: ServedModel) -> LoadedModel:
        """Return a model that prepares requests. Raises Problem if it is not loaded."""
        if (engine := model.engine) is None or model.state != "loaded":
            raise self.not_loaded(model)
        of_engine = engine.pair, engine.options, model.settings, model.name, engine.budget
        return LoadedModel(*of_engine, responses=self.responses)

    def not_loaded(self, model: ServedModel) -> Problem:
        """Return the error for a request to a model that takes none yet."""
        seconds = min(1 + model.nbytes // LOADING_SPEED, MOST_RETRY_SECONDS)
        text = f"the model {model.name:.80} is loading: try again in {seconds} s"
        if model.engine is None and model not in self._wanted:
            text = f"the model {model.name:.80} is not in memory: a completion loads it"
        elif not self.waits:
            text += ", or start the server without --no-wait"
        return busy(text, code="loading", seconds=seconds)

    def refresh(self) -> None:
        """Unload models that are idle for too long, forget those that have ended, and load the
        model that has been wanted for the longest time. The server calls this ten times a
        second."""
        now = self.clock()
        self.begins = self.begins and self.first.state != "loaded"
        for model in self.models:
            if (engine := model.engine) is None:
                continue
            if engine.ended:
                self._forget(model, engine)
            elif model.stays or model.busy or model.waiting:
                model.used = now
            elif model.state == "loaded" and now - model.used >= model.keep:
                engine.close()
        if not self.closed:
            self._load_next()

    def unload(self, model: ServedModel) -> None:
        """Unload a model as soon as it has no requests."""
        model.keep = 0.0
        self.refresh()

    def close(self) -> None:
        """Accept no more requests, and end pending requests with an error at once."""
        self.closed = True
        for engine in self.engines:
            engine.close()
        self._threads.shutdown(wait=False)

    def _start(self, model: ServedModel) -> None:
        def load() -> tuple[Pair, Options]:
            log.info("loading %s", model.name)
            pair, options = model.load()
            # A checkpoint may take more memory than its files have bytes.
            model.nbytes = pair.target.nbytes + pair.draft_bytes
            self._check_fits(model)
            model.facts = LoadedModel(pair, options, model.settings, model.name).facts
            model.used = self.clock()
            log.info("loaded %s, %s", model.name, show_size(model.nbytes))
            return pair, options

        model.keep = self.idle_seconds
        of_model = model.store, self._least or self.memory_budget, model.counters
        model.engine = Engine(load, self.batch_size, *of_model, self._turns, self._threads)

    def _forget(self, model: ServedModel, engine: Engine) -> None:
        """Note that the engine of a model has ended."""
        model.engine = None
        for cache in (markers_of, token_bytes, alphabet_of):
            cache.cache_clear()  # they refer to tokenizers
        if self.engines:
            wire()
        if engine.problem is None:
            log.info("unloaded %s", model.name)
        elif self.begins or model.stays:
            self.fatal, self.closed = engine.problem, True
        else:
            log.error("%s has ended: %r", model.name, engine.problem)
            # The error may contain paths of this machine.
            model.problem = failed(f"{model.name} cannot be used: the server's log says why")

    def _check_fits(self, model: ServedModel) -> None:
        """Raise Problem if a model does not fit into the memory budget even alone."""
        if self._taken([model]) > self._shared:
            raise failed(
                f"{model.name} takes {show_size(model.nbytes)}, and all models with their requests "
                f"may take {show_size(int(self._shared))}: raise --memory-budget"
            )

    def _taken(self, models: Sequence[ServedModel]) -> int:
        """Return the bytes of models with their budgets. A model without requests counts with the
        least budget, because its budget can be reduced."""
        engines = [model.engine if model.busy else None for model in models]
        budgets = ((engine and engine.memory_budget) or self._least for engine in engines)
        return sum(model.nbytes for model in models) + sum(budgets)

    def _load_next(self) -> None:
        """Load the next model if there is room for it. If not, unload as many of the others as
        necessary: idle ones first, and the least recently used ones first. A busy one takes no new
        requests until the next call."""
        wanted = self._wanted[:1]
        held = self._held
        self._resting = []
        if any(model.state == "loading" for model in held):
            return
        needed = [*wanted, *(model for model in held if model.state == "loaded")]
        for model in sorted(needed[len(wanted) :], key=lambda model: (model.busy, model.used)):
            if self._taken(needed) > self._shared and not (model.stays or model.waiting):
                needed.remove(model)
                self._resting.append(model)
                if model.engine is not None and not model.busy:
                    model.engine.close()
        if wanted and self._taken([*wanted, *held]) <= self._shared:
            self._start(self._wanted.pop(0))

    def _share(self) -> None:
        """Divide the memory that is left among the models without requests."""
        if len(self.models) == 1:
            return
        held = self._held
        idle = [model for model in held if not model.busy]
        rest = max(0, int(self._shared) - self._taken(held))
        for model in idle:
            if model.state == "loaded" and model.engine is not None:
                model.engine.limit(self._least + rest // len(idle))
