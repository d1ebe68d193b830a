"""The fields of a chat's body that decide its prompt and the tools that the model may call."""

from dataclasses import dataclass
from typing import Any

from ..core.options import Options
from ..text.chat import Ending
from ..text.messages import Message, Tool
from .bodies import Body
from .problems import invalid

UNSEEN = ("cache_control", "defer_loading", "eager_input_streaming")
"""Keys of tools that are meant for the server and not for the model."""
THINKING_STATES = {"enabled": True, "disabled": False}
SWITCHES = ("enable_thinking", "thinking")
"""Template variables that turn reasoning on or off: the first one in templates of Qwen, GLM and
others, the second one in templates of DeepSeek, Granite and Kimi."""


def ending_of(body: Body, messages: list[Message]) -> Ending:
    """Return how the prompt ends, according to vLLM's fields for this. Raises Problem."""
    if not body.get("continue_final_message"):
        return "answer" if body.get("add_generation_prompt", True) else "closed"
    if messages[-1].get("tool_calls"):
        field = "continue_final_message"
        raise invalid(f"{field} cannot continue a message that calls tools", field)
    return "continue"


def template_settings(body: Body) -> dict[str, Any]:
    """Return a request's variables for the chat template. Clients turn reasoning on or off by
    different fields; chat_template_kwargs takes precedence."""
    thinks: bool | None = THINKING_STATES.get(body.get("thinking", {}).get("type"))
    settings: dict[str, Any] = {}
    effort = body.get("reasoning_effort", body.get("reasoning", {}).get("effort"))
    if effort == "none":
        thinks = False
    elif effort:
        settings["reasoning_effort"] = effort
    thinks = body.get("enable_thinking", thinks)
    if thinks is not None:
        settings |= dict.fromkeys(SWITCHES, thinks)
    return {**settings, **body.get("chat_template_kwargs", {})}


def thinking_budget(body: Body) -> int | None:
    """Return the largest number of tokens of thoughts that a request allows, or None. Fields of
    Anthropic's and of OpenRouter's API set it; of both, the smaller number holds."""
    budgets = (
        body.get("thinking", {}).get("budget_tokens"),
        body.get("reasoning", {}).get("max_tokens"),
    )
    return min((budget for budget in budgets if budget is not None), default=None)


def wants_no_thought(body: Body, options: Options) -> bool:
    """Return whether a request, or the options, turn reasoning off."""
    variables = {**options.chat_template_config, **template_settings(body)}
    return any(variables.get(name) is False for name in SWITCHES)


@dataclass(frozen=True)
class Tools:
    """The tools that the model may call.

    Attributes:
        listed: The tools, in the format of chat templates.
        must: If a call is demanded, the names of the tools that may be called, or else ().
        most_calls: Largest number of calls, or None for any number.
        schema: JSON schema of an answer without a call, or "" for a free answer.
    """

    listed: tuple[Tool, ...] = ()
    must: tuple[str, ...] = ()
    most_calls: int | None = None
    schema: str = ""


def tools_of(body: Body) -> Tools:
    """Return the tools of a chat. A later tool replaces a tool of the same name. Raises Problem."""
    listed = [tool["function"] for tool in body.get("tools", ())] or body.get("functions", ())
    choice = body.get("tool_choice", body.get("function_call", "auto"))
    functions = {
        function["name"]: {
            name: value
            for name, value in function.items()
            if value is not None and name not in UNSEEN
        }
        for function in listed
    }
    allowed = choice.get("allowed_tools") if isinstance(choice, dict) else None
    if allowed is not None:
        names = {tool["function"]["name"] for tool in allowed["tools"]}
        functions = {name: function for name, function in functions.items() if name in names}
        choice = allowed["mode"]
        if not functions:
            raise invalid("tool_choice allows none of the functions in tools", "tool_choice")
    tools = tuple({"type": "function", "function": function} for function in functions.values())
    most = None if body.get("parallel_tool_calls", True) else 1
    if choice == "none" or (choice == "auto" and not tools):
        # The model does not call a tool that is not in its prompt.
        return Tools()
    if isinstance(choice, str):
        return Tools(tools, tuple(functions) if choice == "required" else (), most)
    name = choice.get("function", choice)["name"]
    if name not in functions:
        message = f"tool_choice names {name:.80}, which is none of the functions"
        raise invalid(message, "tool_choice")
    return Tools(tools, (name,), 1)
