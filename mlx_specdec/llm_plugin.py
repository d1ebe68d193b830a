"""A plugin for Simon Willison's command `llm`, which then finds the models on this machine's disk:
`llm -m mlx-specdec/NAME "prompt"`. Entry point `llm` of the package; needs the extra `llm`."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import llm
from pydantic import Field

from .checkpoints.stored_models import SHIPPED, typed_names
from .engine.known_pairs import AUTO, draft_for
from .errors import SpecdecError

CACHE_BYTES = 2 * 10**9
"""Bytes of the prefix cache. With it, `llm chat` prefills only the newest message."""

_loaded: dict[tuple[str, str | None], tuple[Any, Any]] = {}
"""The newest pair and its prefix cache, by the names of target and draft."""


def _pair(name: str, draft_model: str | None) -> tuple[Any, Any]:
    """Return a pair with a prefix cache, loaded unless it is the newest one."""
    if (name, draft_model) not in _loaded:
        from .engine.loading import load
        from .engine.prompt_cache import PromptCache

        _loaded.clear()
        draft = draft_for(name) if draft_model == AUTO else draft_model
        _loaded[name, draft_model] = load(name, draft), PromptCache(CACHE_BYTES)
    return _loaded[name, draft_model]


class SpecdecModel(llm.Model):
    """A model of the disk. `llm` creates an object of this class for each name."""

    can_stream = True
    supports_schema = True

    class Options(llm.Options):
        """The settings that `llm -o NAME VALUE` sets. None takes the model's own default."""

        max_tokens: int = Field(1000, description="The largest number of tokens to generate.")
        temperature: float | None = Field(None, description="The temperature; 0 is greedy.")
        top_p: float | None = Field(None, description="The total probability to keep.")
        top_k: int | None = Field(None, description="The number of likeliest tokens to keep.")
        min_p: float | None = Field(None, description="The least share of the top probability.")
        seed: int = Field(0, description="The seed that decides the text.")
        num_draft: int | None = Field(None, description="Draft tokens in a round; none is auto.")
        draft_model: str | None = Field(
            None, description="A draft model or drafter, auto for the table's, or mtp."
        )

    def __init__(self, name: str) -> None:
        self.model_id = f"mlx-specdec/{name.removeprefix(SHIPPED)}"
        self.name = name

    def __str__(self) -> str:
        return f"MLX: {self.model_id}"

    def execute(
        self, prompt: Any, stream: bool, response: Any, conversation: Any = None
    ) -> Iterator[str]:
        """Yield the pieces of a completion. Called by llm. Raises llm.ModelError."""
        from .core.options import Options
        from .engine.generate import stream_generate

        settings = {key: value for key, value in prompt.options if value is not None}
        draft_model = settings.pop("draft_model", None)
        messages = [
            {"role": one.role, "content": "".join(getattr(part, "text", "") for part in one.parts)}
            for one in prompt.messages
        ]
        if prompt.schema is not None:
            settings["json_schema"] = prompt.schema
        try:
            pair, cache = _pair(self.name, draft_model)
            options = Options(**{**pair.sampling, **settings})
            text = messages[0]["content"] if len(messages) == 1 else messages
            run = stream_generate(pair, text, options, cache=cache)
            for step in run:
                yield step.text
        except SpecdecError as problem:
            raise llm.ModelError(str(problem)) from problem
        result = run.result()
        figures = {"finish_reason": result.finish_reason, **result.stats.as_dict()}
        response.response_json = figures
        response.set_usage(input=result.labels.prompt_tokens, output=len(result.tokens))


@llm.hookimpl  # type: ignore[untyped-decorator]
def register_models(register: Callable[..., None]) -> None:
    """Register every model on the disk. Called by llm."""
    for name in typed_names():
        register(SpecdecModel(name))
