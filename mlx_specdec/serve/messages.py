"""What Anthropic's clients ask for: /v1/messages, as a chat completion would say it."""

from __future__ import annotations

import functools
import json
import logging
import re
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from . import body as fields
from .asked import Asked, Asking
from .body import Body
from .chat import text_of
from .problems import Problem, unsupported, wrong
from .settings import SEEDS

SAME = ("model", "temperature", "top_p", "top_k", "seed", "stream", "speculative")
"""Fields that are fields of a chat completion."""
HARMLESS: dict[str, tuple[object, ...]] = {
    "container": (),
    "mcp_servers": ([],),
}
"""Fields that would change the answer and cannot here, with values that change nothing."""
BILLING = re.compile(r"x-anthropic-billing-header:(?: *[a-z_]+=[^;\s]*;)+\s*")
"""Claude Code's attribution, as it begins the first block of its system prompt:
`x-anthropic-billing-header: cc_version=2.1.101.e51; cc_entrypoint=cli; cch=a5145;`
(musistudio/claude-code-router issue 1220, vllm-project/vllm pull request 36829). `cch` changes from
request to request, so that the prompt cache finds nothing behind it. Where no line break follows,
the next text may stand directly behind the last semicolon."""
log = logging.getLogger(__name__)
CHOICES: Mapping[object, str] = {"auto": "auto", "any": "required", "none": "none"}
TYPES = {
    404: "not_found_error",
    413: "request_too_large",
    500: "api_error",
    503: "overloaded_error",
}


def ask(asking: Asking, body: Body) -> Asked:
    """What a body for /v1/messages asks for. Raises Problem."""
    if "max_tokens" not in body:
        raise wrong("max_tokens must be given", "max_tokens")
    # Nobody can leave it out, and agents ask for more than small contexts have: as at Anthropic, an
    # answer then goes on to their end.
    most = fields.whole(body, "max_tokens", 0, 0, SEEDS)
    asking = replace(asking, options=replace(asking.options, max_tokens=most))
    fields.refuse_unless_harmless(body, HARMLESS)
    own = {name: body[name] for name in SAME if name in body}
    own |= {"stop": stops(body), **_format(body)}
    return asking.chat({**own, **as_chat(asking, body)})


def as_chat(asking: Asking, body: Body) -> Body:
    """What belongs to the prompt, as fields of a chat completion. Raises Problem."""
    messages = _messages(body)
    if "system" in body:
        system = _system(body["system"], keep_billing=asking.keep_billing)
        messages = [{"role": "system", "content": system}, *messages]
    last = messages[-1]
    told = {"messages": messages, **_tools(body), "thinking": fields.object_of(body, "thinking")}
    # A last message of the assistant is the beginning of the answer.
    begun = isinstance(last, dict) and last.get("role") == "assistant" and last.get("content")
    return {**told, "continue_final_message": bool(begun and not last.get("tool_calls"))}


def stops(body: Body) -> list[str]:
    """The stop sequences. Raises Problem."""
    given = body.get("stop_sequences", [])
    if not isinstance(given, list):
        raise wrong("stop_sequences must be a list of strings", "stop_sequences")
    return fields.strings("stop_sequences", given)


def error(problem: Problem) -> dict[str, Any]:
    """A problem as Anthropic's clients read it."""
    told = problem.as_dict()["error"]
    kind = TYPES.get(problem.status, told["type"])
    return {"type": "error", "error": {"type": kind, "message": problem.message}}


def _format(body: Body) -> dict[str, Any]:
    """The schema of an answer: of output_config, or as it was called before. Efforts are hints."""
    given = fields.object_of(body, "output_config").get("format") or body.get("output_format")
    return {} if given is None else {"response_format": given}


def _tools(body: Body) -> dict[str, Any]:
    given = body.get("tools", [])
    if not isinstance(given, list):
        raise wrong("tools must be a list", "tools")
    told: dict[str, Any] = {"tools": [_tool(each) for each in given]}
    choice = fields.object_of(body, "tool_choice")
    if not choice:
        return told
    kind = choice.get("type")
    if fields.truth(choice, "disable_parallel_tool_use"):
        told["parallel_tool_calls"] = False
    if kind == "tool":
        function = {"name": choice.get("name")}
        return {**told, "tool_choice": {"type": "function", "function": function}}
    if kind not in CHOICES:
        raise wrong("tool_choice must be of the type auto, any, tool or none", "tool_choice")
    return {**told, "tool_choice": CHOICES[kind]}


def _tool(given: object) -> object:
    if not isinstance(given, dict):
        raise wrong("each of tools must be an object", "tools")
    if given.get("type", "custom") != "custom":
        raise unsupported("tools", "tools of the server's own are not supported: give your own")
    function = {
        "name": given.get("name"),
        "description": given.get("description"),
        "parameters": given.get("input_schema"),
    }
    return {"type": "function", "function": function}


def _system(given: object, *, keep_billing: bool) -> str:
    """The system prompt, without lines that tell who pays for it."""
    blocks = [[each] for each in given] if isinstance(given, list) else [given]
    texts = [text_of(each, "system") for each in blocks]
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
    """The messages of a body but for the system prompt."""
    given = body.get("messages")
    if not isinstance(given, list) or not given:
        raise wrong('messages must be a list of {"role": ..., "content": ...}', "messages")
    return [one for at, each in enumerate(given) for one in _message(each, f"messages[{at}]")]


def _message(given: object, where: str) -> list[dict[str, Any]]:
    """A message, with one before it for each result of a tool."""
    content = given.get("content") if isinstance(given, dict) else None
    if not isinstance(given, dict) or not isinstance(content, list):
        return [given]  # type: ignore[list-item]  # looked at by whoever reads chats
    blocks = [each if isinstance(each, dict) else {} for each in content]
    results = [_result(each, where) for each in blocks if each.get("type") == "tool_result"]
    thoughts = [str(each.get("thinking", "")) for each in blocks if each.get("type") == "thinking"]
    calls = [_call(each, where) for each in blocks if each.get("type") == "tool_use"]
    known = ("tool_result", "thinking", "redacted_thinking", "tool_use")
    rest = [each for each in content if not isinstance(each, dict) or each.get("type") not in known]
    message = {**given, "content": rest or ""}
    if thoughts:
        message["reasoning_content"] = "".join(thoughts)
    if calls:
        message["tool_calls"] = calls
    return [*results, message] if rest or thoughts or calls or not results else results


def _result(block: Mapping[str, Any], where: str) -> dict[str, Any]:
    content = text_of(block.get("content") or "", "messages", where)
    return {"role": "tool", "content": content, "tool_call_id": block.get("tool_use_id")}


def _call(block: Mapping[str, Any], where: str) -> dict[str, Any]:
    given = block.get("input", {})
    if not isinstance(given, dict):
        raise wrong(f"{where} has a tool_use whose input is no object", "messages")
    function = {"name": block.get("name"), "arguments": json.dumps(given, ensure_ascii=False)}
    return {"id": block.get("id"), "type": "function", "function": function}
