"""Log-probabilities of a given completion: a regular expression allows no other one."""

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np

from mlx_specdec import Options, Request, stream_many

from .support import numbered


def copied(source: Path, directory: Path, *, eos: int | None = None, **changes: Any) -> Path:
    """Copy a checkpoint, and give it a tokenizer of numbers.

    Args:
        eos: The only token that ends a text; None keeps those of the checkpoint.
        changes: Changes of config.json.
    """
    shutil.copytree(source, directory, dirs_exist_ok=True)
    config = json.loads((directory / "config.json").read_text()) | changes
    (directory / "config.json").write_text(json.dumps(config))
    text = config.get("decoder", config)
    if size := text.get("decoder_vocab_size") or text.get("vocab_size"):
        numbered(directory, size)
    if eos is not None:
        file = directory / "generation_config.json"
        settings = json.loads(file.read_text()) if file.exists() else {}
        file.write_text(json.dumps(settings | {"eos_token_id": eos}))
    return directory


def unused(tokens: list[int], size: int) -> int:
    """Return an id that is not among these tokens, for `eos`."""
    return next(id for id in reversed(range(size)) if id not in tokens)


def log_p(pair: Any, prompt: list[int], tokens: list[int], **how: Any) -> np.ndarray:
    """Return the target's log-probabilities before each of these tokens and after the last one,
    (tokens + 1, vocabulary). They are computed plainly, or in passes of `num_draft` + 1 tokens."""
    only = "".join(f"w{token:03}" for token in tokens)
    how |= {"max_tokens": len(tokens) + 1, "regex": only, "regular": "num_draft" not in how}
    request = Request(prompt, Options(**how), tuple(tokens), top_logprobs=pair.vocabulary)
    rows = np.full((len(tokens) + 1, pair.vocabulary), -np.inf)
    seen = 0
    for step in stream_many(pair, [request]):
        assert step.error is None, step.error
        for entry in step.logprobs:
            ids, values = zip(*entry.top, strict=True)
            rows[seen, list(ids)], seen = values, seen + 1
    assert seen == len(rows)
    return rows
