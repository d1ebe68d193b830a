"""The messages and tools of a chat, from a request to token ids: by the model's chat template, by
the role prefixes of mlx_lm.server, or as the one source of an encoder-decoder."""

import functools
import json
import logging
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from ..engine.pair import Pair
from ..engine.request import encode
from ..errors import CheckpointError
from ..options import Options
from ..text.chat import Ending
from ..text.markers import markers_of
from ..text.tokenizer import Tokenizer
from .body import Body, loads
from .problems import invalid, unsupported

BILLING = re.compile(r"^x-anthropic-billing-header:(?: *[a-z_]+=[^;\s]*;)+\s*")
"""Claude Code's attribution, as it begins the first block of its system prompt:
`x-anthropic-billing-header: cc_version=2.1.101.e51; cc_entrypoint=cli; cch=a5145;`
(musistudio/claude-code-router issue 1220, vllm-project/vllm pull request 36829). `cch` changes with
every request, so that the prompt cache finds nothing after it. No line break need follow."""
COUNTDOWN = re.compile(r"\s*<total_tokens>[\d,.]+ tokens left</total_tokens>\s*")
"""Claude Code's budget, a system message or a block of one after prompts and results of tools
(anthropics/claude-code issue 90018, farion1231/cc-switch issue 7428)."""
SYSTEM = ("system", "developer")
ORDER = ("type", "function", "name", "description", "parameters", "properties", "required")
"""Keys of tools, in the order of prompts; all others follow in the order of the alphabet."""
UNSEEN = ("cache_control", "defer_loading", "eager_input_streaming")
"""Keys of tools that say something to the server and nothing to the model."""
Way = Literal["template", "role prefixes", "single user message"]
Message = dict[str, Any]
Tool = dict[str, Any]
PREFIXES = {"system": "ASSISTANT's RULE: ", "user": "USER: ", "assistant": "ASSISTANT: "}
MESSAGE_FIELDS = ("name", "tool_call_id", "reasoning_content")
"""Optional fields of a message that templates read."""
THINKING = {"enabled": True, "disabled": False}
SWITCHES = ("enable_thinking", "thinking")
"""Template variables for reasoning: of Qwen, GLM and others; of DeepSeek, Granite and Kimi."""
VOLATILE = (
    "left lines of billing (x-anthropic-billing-header) or countdowns (total_tokens) out of "
    "system prompts, which would defeat the prompt cache: --keep-billing-lines keeps them"
)
log_once = functools.lru_cache(maxsize=64)(logging.getLogger(__name__).info)


def way_of(pair: Pair, options: Options) -> Way:
    """Return how this model reads messages."""
    if pair.target.kind == "encoder-decoder":
        return "single user message"
    templated = options.chat_template and pair.tokenizer.has_chat_template
    return "template" if templated else "role prefixes"


def messages_of(given: Sequence[Message]) -> list[Message]:
    """Convert the messages of a request to those of chat templates, whose contents are strings."""
    messages = []
    for each in given:
        role = "system" if each["role"] in SYSTEM else each["role"]
        message = {"role": role, "content": text_of(each.get("content", ""))}
        message |= {name: each[name] for name in MESSAGE_FIELDS if name in each}
        if role == "assistant" and each.get("tool_calls"):
            message["tool_calls"] = [tool_call(call) for call in each["tool_calls"]]
        messages.append(message)
    return messages


def without_volatile(given: Sequence[Message]) -> list[Message]:
    """Leave out of system messages what clients change with every request and what tells the model
    nothing, so that prompts begin as earlier ones did. Texts of the user stay as they are."""
    left = []
    for message in given:
        content = message.get("content", "")
        blocks = [content] if isinstance(content, str) else [each["text"] for each in content]
        stable = ["" if COUNTDOWN.fullmatch(each) else BILLING.sub("", each) for each in blocks]
        if message["role"] not in SYSTEM or stable == blocks:
            left.append(message)
            continue
        log_once(VOLATILE)
        if text := lines_of(stable):
            left.append({**message, "content": text})
    return left or [{**given[-1], "content": ""}]


def with_late_system(messages: Sequence[Message]) -> list[Message]:
    """Fold system messages into the messages before them, for templates that take one at the
    beginning only: the leading ones are joined, a later one ends the user's message or the tool's
    result before it, or begins the user's message after it. What follows changes no message."""
    folded: list[Message] = []
    held: list[str] = []
    for message in messages:
        role, text = message["role"], message["content"]
        if role == "system" and folded and folded[-1]["role"] != "assistant":
            folded[-1] = {**folded[-1], "content": _paragraphs(folded[-1]["content"], text)}
        elif role == "system" and folded:
            held.append(text)
        else:
            if held and role == "assistant":
                folded.append({"role": "user", "content": _paragraphs(*held)})
            elif held:
                texts = [*held, text] if role == "user" else [text, *held]
                message = {**message, "content": _paragraphs(*texts)}
            held = []
            folded.append(message)
    return [*folded, {"role": "user", "content": _paragraphs(*held)}] if held else folded


def _paragraphs(*texts: str) -> str:
    return "\n\n".join(filter(None, texts))


@functools.lru_cache(maxsize=1)
def renders_late_system(tokenizer: Tokenizer) -> bool:
    """Return whether the chat template writes a later system message where it stands, and changes
    nothing before it (vLLM probes templates like this, in entrypoints/anthropic)."""
    talk = [{"role": role, "content": f"one {role}"} for role in ("system", "user", "assistant")]
    system, user = ({"role": role, "content": f"two {role}"} for role in ("system", "user"))
    try:
        late = tokenizer.decode(tokenizer.apply_chat([*talk, system, user]))
        without = tokenizer.decode(tokenizer.apply_chat([*talk, user]))
    except CheckpointError:
        return False
    before, answer, after = late.partition("one assistant")
    same = without.startswith(before + answer)
    return same and 0 <= after.find("two system") < after.find("two user")


def in_order(value: Any) -> Any:
    """Return tools with the keys of their objects in one order, so that they give one prompt."""
    if isinstance(value, list):
        return [in_order(each) for each in value]
    if not isinstance(value, dict):
        return value
    names = [*filter(value.__contains__, ORDER), *sorted(value.keys() - set(ORDER))]
    return {name: in_order(value[name]) for name in names}


def text_of(content: str | Sequence[Message]) -> str:
    """Return the text of a content: a string, or a list of text parts, one a line."""
    return content if isinstance(content, str) else lines_of(each["text"] for each in content)


def lines_of(parts: Iterable[str]) -> str:
    """Join the parts of a content with line breaks, as llama.cpp does. Empty parts are left out."""
    return "\n".join(filter(None, parts))


def tool_call(given: Message) -> Message:
    """Return a call in an earlier message with its arguments as an object, as templates need it:
    that of the string where they are no JSON object, as in an answer that was cut."""
    function = given["function"]
    arguments = text = function.get("arguments") or "{}"
    if isinstance(text, str):
        try:
            arguments = loads(text.encode())
        except (ValueError, RecursionError):
            arguments = None
    if not isinstance(arguments, dict):
        arguments = {"arguments": text}
    called = {"name": function["name"], "arguments": arguments}
    return {**given, "type": "function", "function": called}


def _with_text_arguments(message: Message) -> Message:
    """Return a message whose calls have their arguments as text, as templates of DeepSeek do."""
    if "tool_calls" not in message:
        return message
    calls = []
    for call in message["tool_calls"]:
        arguments = json.dumps(call["function"]["arguments"], ensure_ascii=False)
        calls.append({**call, "function": {**call["function"], "arguments": arguments}})
    return {**message, "tool_calls": calls}


def with_tools_in_message(
    messages: Sequence[Message], tools: Sequence[Tool], options: Options
) -> list[Message]:
    """Return messages whose first one, of the system, has the tools, where Phi-4's chat template
    reads them."""
    functions = json.dumps([each["function"] for each in tools], ensure_ascii=False)
    system, others = {"role": "system", "content": options.system_prompt or ""}, list(messages)
    if others[0]["role"] == "system":
        system, *others = others
    return [{**system, "tools": functions}, *others]


def ending_of(body: Body, messages: Sequence[Message]) -> Ending:
    """Return how the prompt ends, by the fields that vLLM has for it. Raises Problem."""
    if not body.get("continue_final_message"):
        return "answer" if body.get("add_generation_prompt", True) else "closed"
    if messages[-1].get("tool_calls"):
        field = "continue_final_message"
        raise invalid(f"{field} cannot continue a message that calls tools", field)
    return "continue"


def template_settings(body: Body) -> dict[str, Any]:
    """Return the variables of a request for the chat template. Clients turn reasoning on or off by
    different fields; chat_template_kwargs takes precedence."""
    thinks: bool | None = THINKING.get(body.get("thinking", {}).get("type"))
    settings: dict[str, Any] = {}
    effort = body.get("reasoning_effort")
    if effort == "none":
        thinks = False
    elif effort:
        settings["reasoning_effort"] = effort
    thinks = body.get("enable_thinking", thinks)
    if thinks is not None:
        settings |= dict.fromkeys(SWITCHES, thinks)
    return {**settings, **body.get("chat_template_kwargs", {})}


def _thinks_aloud(message: Message) -> bool:
    """Return whether a message has a content and a thought before its calls."""
    has = (message.get(name) for name in ("tool_calls", "reasoning_content", "content"))
    return all(has)


def _with_one_thought(message: Message) -> Message:
    """Move the content before a call to the thought: gpt-oss's template takes only one of both."""
    if not _thinks_aloud(message):
        return message
    thought = lines_of([message["reasoning_content"], message["content"]])
    return {**message, "reasoning_content": thought, "content": ""}


def wants_no_thought(body: Body, options: Options) -> bool:
    """Return whether a request, or the options, turn reasoning off."""
    variables = {**options.chat_template_config, **template_settings(body)}
    return any(variables.get(name) is False for name in SWITCHES)


def ids_of(
    pair: Pair,
    messages: Sequence[Message],
    options: Options,
    settings: Mapping[str, Any],
    ending: Ending = "answer",
) -> list[int]:
    """Return the token ids of messages, up to where the model begins to write. settings: override
    those of the options. Raises Problem, PromptError, CheckpointError."""
    if options.system_prompt is not None and messages[0]["role"] != "system":
        messages = [{"role": "system", "content": options.system_prompt}, *messages]
    way = way_of(pair, options)
    if way == "template":
        late = any(each["role"] == "system" for each in messages[1:])
        if late and not renders_late_system(pair.tokenizer):
            messages = with_late_system(messages)
        if any(map(_thinks_aloud, messages)) and markers_of(pair.tokenizer).channels is not None:
            messages = [_with_one_thought(each) for each in messages]
        variables = {**options.chat_template_config, **settings}
        try:
            return pair.tokenizer.apply_chat(messages, variables, ending=ending)
        except CheckpointError:
            if not any("tool_calls" in each for each in messages):
                raise
        messages = [_with_text_arguments(each) for each in messages]
        return pair.tokenizer.apply_chat(messages, variables, ending=ending)
    if way == "role prefixes":
        lines = [PREFIXES.get(each["role"], "") + each["content"] for each in messages]
        beginning = PREFIXES["assistant"].rstrip()
        lines += {"answer": [beginning], "closed": [""], "continue": []}[ending]
        return pair.tokenizer.encode("\n".join(lines))
    if [each["role"] for each in messages] != ["user"]:
        raise invalid("this model takes a single message of the user", "messages")
    if ending != "answer":
        raise unsupported("continue_final_message", "this model cannot continue a message")
    return encode(pair, messages[0]["content"], options)


@dataclass(frozen=True)
class Tools:
    """The tools that the model may call, in the format of chat templates. must: names of which one
    has to be called; empty where the model may answer without. most_calls: None for any number.
    schema: JSON schema of an answer without a call, if it has one."""

    given: tuple[Tool, ...] = ()
    must: tuple[str, ...] = ()
    most_calls: int | None = None
    schema: str = ""


def tools_of(body: Body) -> Tools:
    """Return the tools of a chat; a later one replaces one of the same name. Raises Problem."""
    given = [each["function"] for each in body.get("tools", ())] or body.get("functions", ())
    choice = body.get("tool_choice", body.get("function_call", "auto"))
    functions = {
        each["name"]: {
            name: value for name, value in each.items() if value is not None and name not in UNSEEN
        }
        for each in given
    }
    allowed = choice.get("allowed_tools") if isinstance(choice, dict) else None
    if allowed is not None:
        names = {each["function"]["name"] for each in allowed["tools"]}
        functions = {name: each for name, each in functions.items() if name in names}
        choice = allowed["mode"]
        if not functions:
            raise invalid("tool_choice allows none of the functions in tools", "tool_choice")
    tools = tuple({"type": "function", "function": each} for each in functions.values())
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
