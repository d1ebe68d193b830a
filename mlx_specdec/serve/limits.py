"""What one request may take, so that none can stop the others. Imports nothing."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Limits:
    """The limits of a server.

    body_bytes: of one body. large_bytes: of all bodies that are being read, beyond 64 KiB each.
    waiting: requests. seconds: for an answer. body_seconds: for sending a body. choices, stops,
    biases, tools: entries of these fields in one request. stop_length: characters of a stop string.
    schema_bytes: of a schema or a grammar. schema_depth: nested brackets of a schema. context:
    tokens of a prompt and its answer together, if less than the model's context.
    """

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
