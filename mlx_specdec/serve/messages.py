"""What Anthropic's clients ask for: /v1/messages, as a chat completion would say it."""

from __future__ import annotations

import functools
import json
import logging
import re
from collections.abc import Mapping, Sequence
from typing import Any

from .asked import Asked, Asking
from .body import Body
from .chat import text_of
from .problems import CONTEXT, Problem

SAME = ("max_tokens", "temperature", "top_p", "top_k", "seed", "stop", "stream", "speculative")
"""Fields that are fields of a chat completion."""
BILLING = re.compile(r"x-anthropic-billing-header:(?: *[a-z_]+=[^;\s]*;)+\s*")
"""Claude Code's attribution, as it begins the first block of its system prompt:
`x-anthropic-billing-header: cc_version=2.1.101.e51; cc_entrypoint=cli; cch=a5145;`
(musistudio/claude-code-router issue 1220, vllm-project/vllm pull request 36829). `cch` changes from
request to request, so that the prompt cache finds nothing behind it. Where no line break follows,
the next text may stand directly behind the last semicolon."""
CHOICES: Mapping[object, str] = {"auto": "auto", "any": "required", "none": "none"}
log = logging.getLogger(__name__)
TYPES = {
    404: "not_found_error",
    413: "request_too_large",
    500: "api_error",
    503: "overloaded_error",
}


def ask(asking: Asking, body: Body) -> Asked:
    """What a body for /v1/messages asks for. Raises Problem."""
    body = asking.read("MessagesRequest", body)
    own = {name: body[name] for name in SAME if name in body}
    return asking.chat({**own, **_format(body), **_as_chat(asking, body)})


def count(asking: Asking, body: Body) -> int:
    """Tokens of a body for /v1/messages/count_tokens. Raises Problem."""
    chat = _as_chat(asking, asking.read("CountRequest", body))
    return len(asking.prompt(asking.read("ChatRequest", chat)))


def _as_chat(asking: Asking, body: Body) -> Body:
    """What belongs to the prompt, as fields of a chat completion. Raises Problem."""
    messages = _messages(body)
    if "system" in body:
        system = _system(body["system"], keep_billing=asking.keep_billing)
        messages = [{"role": "system", "content": system}, *messages]
    last = messages[-1]
    told = {"messages": messages, **_tools(body), "thinking": body.get("thinking")}
    # A last message of the assistant is the beginning of the answer.
    begun = last["role"] == "assistant" and last["content"] and not last.get("tool_calls")
    return {**told, "continue_final_message": bool(begun)}


def error(problem: Problem) -> dict[str, Any]:
    """A problem as Anthropic's clients read it."""
    told = problem.as_dict()["error"]
    kind = TYPES.get(problem.status, told["type"])
    too_long = problem.code == CONTEXT and problem.param in ("messages", "prompt")
    # Anthropic's API begins this error with these words, which clients may look for.
    message = f"prompt is too long: {problem.message}" if too_long else problem.message
    return {"type": "error", "error": {"type": kind, "message": message}}


def _format(body: Body) -> dict[str, Any]:
    """The schema of an answer: of output_config, or as it was called before. Efforts are hints."""
    given = body.get("output_config", {}).get("format") or body.get("output_format")
    return {} if given is None else {"response_format": given}


def _tools(body: Body) -> dict[str, Any]:
    told: dict[str, Any] = {
        "tools": [_tool(each) for each in body.get("tools", ()) if _is_own(each)]
    }
    choice = body.get("tool_choice", {})
    if not choice:
        return told
    if choice.get("disable_parallel_tool_use"):
        told["parallel_tool_calls"] = False
    if choice["type"] == "tool":
        function = {"name": choice.get("name")}
        return {**told, "tool_choice": {"type": "function", "function": function}}
    return {**told, "tool_choice": CHOICES[choice["type"]]}


def _is_own(tool: Body) -> bool:
    """Return False for the tools that Anthropic's servers run themselves."""
    own = tool.get("type", "custom") == "custom"
    if not own:
        log.info("the tool %.80s is left out: this server has none of its own", tool["type"])
    return own


def _tool(given: Body) -> Body:
    function = {
        "name": given["name"],
        "description": given.get("description"),
        "parameters": given.get("input_schema"),
    }
    return {"type": "function", "function": function}


def _system(given: str | Sequence[Mapping[str, Any]], *, keep_billing: bool) -> str:
    """Return the system prompt without the billing line of Claude Code."""
    texts = [given] if isinstance(given, str) else [each["text"] for each in given]
    if not keep_billing and (match := BILLING.match(texts[0] if texts else "")):
        texts[0] = texts[0][match.end() :]
        _log_once()
    return "".join(texts)


@functools.cache
def _log_once() -> None:
    log.info(
        "left the line x-anthropic-billing-header out of system prompts, which would defeat the "
        "prompt cache: --keep-billing-lines keeps it"
    )


def _messages(body: Body) -> list[dict[str, Any]]:
    """Return the messages of a body without the system prompt."""
    return [one for each in body["messages"] for one in _message(each)]


def _message(given: Body) -> list[dict[str, Any]]:
    """A message, with one before it for each result of a tool."""
    blocks = given["content"]
    if isinstance(blocks, str):
        return [dict(given)]
    results = [_result(each) for each in blocks if each["type"] == "tool_result"]
    thoughts = [each.get("thinking", "") for each in blocks if each["type"] == "thinking"]
    calls = [_call(each) for each in blocks if each["type"] == "tool_use"]
    rest = [each for each in blocks if each["type"] == "text"]
    message = {**given, "content": rest or ""}
    if thoughts:
        message["reasoning_content"] = "".join(thoughts)
    if calls:
        message["tool_calls"] = calls
    return [*results, message] if rest or thoughts or calls or not results else results


def _result(block: Body) -> dict[str, Any]:
    content = text_of(block.get("content", ""))
    return {"role": "tool", "content": content, "tool_call_id": block.get("tool_use_id")}


def _call(block: Body) -> dict[str, Any]:
    arguments = json.dumps(block.get("input", {}), ensure_ascii=False)
    function = {"name": block["name"], "arguments": arguments}
    return {"id": block.get("id"), "type": "function", "function": function}
