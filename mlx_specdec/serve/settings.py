"""The limits of a server and how it answers. Imports nothing."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Limits:
    """How much one request may take, so that none can stop the others.

    body_bytes: size of one body. large_bytes: size of all bodies that are being received and
    tokenized, beyond 64 KiB each. waiting: requests in the queue. seconds, body_seconds: for an
    answer, and for receiving a body. choices, stops, biases, tools: entries of these fields.
    stop_length: characters of a stop string. schema_bytes, schema_depth: size and nested brackets
    of a schema or a grammar. context: tokens of a prompt and its answer together, where that is
    less than the model's context."""

    body_bytes: int = 16 << 20
    large_bytes: int = 64 << 20
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


@dataclass(frozen=True)
class ServiceSettings:
    """How requests are read and answered.

    drawn_seeds: a request without a seed gets a random one instead of that of the options. metrics:
    answers include vLLM's figures of speculative decoding. keep_billing: billing lines and
    countdowns of Claude Code stay in system prompts. strict_model: requests that name another model
    are refused. aliases: other names of this model, which requests may use. tool_call_parser: the
    name of the format of tool calls; empty for what the chat template shows."""

    limits: Limits = Limits()
    drawn_seeds: bool = True
    metrics: bool = False
    keep_billing: bool = False
    strict_model: bool = False
    aliases: tuple[str, ...] = ()
    tool_call_parser: str = ""
