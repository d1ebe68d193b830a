"""The limits of a server and how it answers. Imports nothing."""

from dataclasses import dataclass

BODY_BYTES = 16 << 20
"""Largest size of a body."""
CONNECTIONS = 1024
"""Connections that are accepted, and completions of an engine that have not ended. Further
connections are closed."""


@dataclass(frozen=True)
class ServiceSettings:
    """How requests are read and answered, and how much one of them may take, so that no request can
    stop the others.

    Attributes:
        context: Tokens of a prompt and its completion together, or None for the model's context.
        seconds: Time for a request, from its beginning to its answer.
        drawn_seeds: Draw a random seed for a request without one, instead of the server's default.
        tool_call_parser: Name of the format of tool calls, or "" for the format that the chat
            template shows.
        thinking_budget: Tokens of the thoughts of an answer whose request sets no budget, or None
            for no limit.
    """

    context: int | None = None
    seconds: float = 600.0
    drawn_seeds: bool = True
    tool_call_parser: str = ""
    thinking_budget: int | None = None
