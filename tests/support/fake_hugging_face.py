"""Fakes of torch and transformers, which record their calls and stream chosen tokens."""

from collections.abc import Mapping
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import numpy as np

from benchmarks.compare import HuggingFace


class FakeModel:
    """A model of transformers with the given tensors."""

    def __init__(self, shapes: Mapping[str, tuple[int, ...]]) -> None:
        self.config = SimpleNamespace(model_type="t5", num_layers=0, tie_word_embeddings=True)
        self.lm_head = SimpleNamespace(weight=None)
        self.generation_config: Any = None
        self.calls: list[dict[str, Any]] = []
        self.says: list[list[int]] = [[5], [6, 7], [1]]
        self.decoder_only = True
        self._shapes = shapes

    def state_dict(self) -> dict[str, np.ndarray]:
        return {name: np.zeros(shape) for name, shape in self._shapes.items()}

    def named_parameters(self) -> list[tuple[str, np.ndarray]]:
        return [*self.state_dict().items()]

    def load_state_dict(self, tensors: dict[str, np.ndarray], strict: bool, assign: bool) -> None:
        """Do nothing."""

    def tie_weights(self) -> None:
        self.lm_head.weight = "tied"

    def eval(self) -> "FakeModel":
        return self

    def generate(self, tokens: np.ndarray, streamer: Any = None, **settings: Any) -> np.ndarray:
        self.calls.append({"tokens": tokens, **settings})
        if streamer is not None:
            for step in [[0], *self.says]:
                streamer.put(np.array(step))
            streamer.end()
        output = [token for step in self.says for token in step]
        before = tokens if self.decoder_only else np.zeros((len(tokens), 1), int)
        return np.concatenate([before, [output] * len(tokens)], axis=1)


class FakeHuggingFace:
    """models: handed out in turn. threads: all numbers set."""

    def __init__(self, *models: FakeModel) -> None:
        self.threads: list[int] = []
        self.seeds: list[int] = []
        self._models = iter(models)
        torch = SimpleNamespace(
            __version__="2.fake",
            float32="float32",
            tensor=np.array,
            ones_like=np.ones_like,
            from_numpy=lambda array: array,
            inference_mode=nullcontext,
            set_num_threads=self.threads.append,
            manual_seed=self.seeds.append,
            nn=SimpleNamespace(Parameter=lambda array, requires_grad: array),
        )
        transformers = SimpleNamespace(
            __version__="5.fake",
            AutoConfig=SimpleNamespace(for_model=dict),
            AutoModelForSeq2SeqLM=self._auto(),
            AutoModelForCausalLM=self._auto(),
            GenerationConfig=SimpleNamespace,
        )
        self.installed = HuggingFace(torch, transformers, threads=2)

    def _auto(self) -> SimpleNamespace:
        def from_config(config: Any, dtype: str, trust_remote_code: bool) -> FakeModel:
            assert dtype == "float32" and trust_remote_code is False
            return next(self._models)

        return SimpleNamespace(from_config=from_config)
