"""What one request may take, so that none can stop the others. Imports nothing."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Limits:
    """Most bytes of a body, and of what is large of all bodies that are being read; requests
    waiting, seconds of an answer and of sending a body, choices of a request, stop strings and
    their characters, entries of logit_bias, bytes of a schema or a grammar and brackets of a schema
    in each other, and tools. context: most tokens of a prompt and its answer together, where the
    model takes more."""

    body_bytes: int = 16 << 20
    large_bytes: int = 256 << 20
    waiting: int = 64
    seconds: float = 600.0
    body_seconds: float = 30.0
    choices: int = 16
    stops: int = 16
    stop_length: int = 1024
    biases: int = 1024
    schema_bytes: int = 64 << 10
    schema_depth: int = 64
    tools: int = 128
    context: int | None = None
