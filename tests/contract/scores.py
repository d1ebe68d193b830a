"""The log-probabilities that a model on the disk gives any tokens, through the public face."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from tokenizers import Tokenizer, decoders, models

from mlx_specdec import Options, Request, load, stream_many


def letters(directory: Path, size: int, end: int = 1) -> Path:
    """Write a tokenizer each of whose tokens is one letter, and one of them ends a text."""
    directory.mkdir(parents=True, exist_ok=True)
    tokenizer = Tokenizer(models.BPE({letter(token): token for token in range(size)}, []))
    tokenizer.decoder = decoders.Fuse()
    tokenizer.save(str(directory / "tokenizer.json"))
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": letter(end)}
    (directory / "tokenizer_config.json").write_text(json.dumps(settings), encoding="utf-8")
    return directory


def letter(token: int) -> str:
    """Return the text of a token."""
    return chr(0x4E00 + token)


def scores(pair: Any, tokens: Sequence[int], source: Sequence[int] | None, size: int) -> np.ndarray:
    """Return log p, shape (length, size), of the token after each of `tokens`.

    Args:
        pair: A model with `letters`.
        source: What an encoder-decoder model reads, and then `tokens` begins with the token with
            which its decoder begins; None for a decoder-only model.
    """
    if source is None:
        options = Options(max_tokens=1, regular=True)
        request = Request(list(tokens), options, top_logprobs=size, scores_prompt=True)
    else:
        # A regular expression makes the model write the tokens. Log-probabilities are those without
        # it, also of the last token, which is a free choice.
        pattern = "".join(map(letter, tokens[1:])) + "."
        options = Options(max_tokens=len(tokens), regular=True, regex=pattern)
        request = Request(list(source), options, top_logprobs=size)
    rows = []
    for step in stream_many(pair, [request], batch_size=1):
        assert step.error is None, step.error
        for position in (*step.prompt_logprobs, *step.logprobs):
            row = np.full(size, np.nan)
            for token, logprob in position.top:
                row[token] = logprob
            rows.append(row)
    return np.array(rows)


def distance(directory: Path, file: Path) -> float:
    """Return the largest difference of log-probabilities from a reference in a file."""
    with np.load(file) as arrays:
        expected = {name: arrays[name] for name in arrays}
    source = expected["source"].tolist() if "source" in expected else None
    tokens, log_p = expected["tokens"].tolist(), expected["log_p"]
    found = scores(load(directory, dtype="float32"), tokens, source, log_p.shape[1])
    assert found.shape == log_p.shape
    return float(np.abs(found - log_p).max())
