"""Token ids of the messages of a chat: by the model's chat template, by the role prefixes of
mlx_lm.server, or as the source of an encoder-decoder."""

import contextlib
import functools
import json
import logging
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from ..errors import CheckpointError, PromptError
from .chat import Ending, reasoning_of
from .markers import HARMONY
from .prompts import parse_json
from .tokenizer import Tokenizer

BILLING = re.compile(r"^x-anthropic-billing-header:(?: *[a-z_]+=[^;\s]*;)+\s*")
"""Claude Code's billing line, at the beginning of its system prompt:
`x-anthropic-billing-header: cc_version=2.1.101.e51; cc_entrypoint=cli; cch=a5145;`
(musistudio/claude-code-router issue 1220, vllm-project/vllm pull request 36829). `cch` changes with
every request, so the prefix cache would find nothing after it. A line break need not follow."""
COUNTDOWN = re.compile(r"\s*<total_tokens>[\d,.]+ tokens left</total_tokens>\s*")
"""Claude Code's token budget: a system message, or a block of a system message, after prompts and
results of tools (anthropics/claude-code issue 90018, farion1231/cc-switch issue 7428)."""
SYSTEM = ("system", "developer")
ORDER = ("type", "function", "name", "description", "parameters", "properties", "required")
"""Keys of tools, in their order in prompts. All other keys follow in alphabetical order."""
LONGEST_TOOL_NAME = 128
"""Largest number of characters of a tool's name, as in Anthropic's API. OpenAI's takes 64."""
Way = Literal["template", "role prefixes", "single user message"]
"""The form in which a model reads messages."""
Message = dict[str, Any]
Tool = dict[str, Any]
PREFIXES = {"system": "ASSISTANT's RULE: ", "user": "USER: ", "assistant": "ASSISTANT: "}
TEXT_PART_FIELDS = {
    **dict.fromkeys(
        ("text", "input_text", "output_text", "summary_text", "reasoning_text"), "text"
    ),
    "refusal": "refusal",
}
"""Types of parts that are text -> the field with the text."""
THOUGHTS = ("thinking", "redacted_thinking")
"""Types of parts that are reasoning and not content."""
VOLATILE = (
    "left lines of billing (x-anthropic-billing-header) or countdowns (total_tokens) out of "
    "system prompts, which would defeat the prompt cache"
)
log_once = functools.lru_cache(maxsize=64)(logging.getLogger(__name__).info)


def messages_of(sent: Sequence[Message]) -> list[Message]:
    """Convert messages of a request to messages of chat templates, whose contents are strings.

    A note stands in place of a part that is not text. An error would end the conversation, because
    clients send its history with every request. Raises PromptError if the newest message of the
    user has such a part."""
    messages = []
    newest = next((message for message in reversed(sent) if message["role"] == "user"), {})
    parts = newest.get("content", "")
    kinds = () if isinstance(parts, str) else [part["type"] for part in parts]
    if unread := next((kind for kind in kinds if kind not in TEXT_PART_FIELDS), None):
        raise PromptError(
            f"the newest message of the user has a part of the type {unread!r:.66}, and "
            "this model reads only text: leave it out"
        )
    for source in sent:
        role = "system" if source["role"] in SYSTEM else source["role"]
        content: Any = source.get("content", source.get("refusal", ""))
        message = {"role": role, "content": text_of(content)}
        message |= {name: source[name] for name in ("name", "tool_call_id") if name in source}
        if (reasoning := _reasoning(source, content)) is not None:
            message["reasoning_content"] = reasoning
        if role == "assistant" and source.get("tool_calls"):
            message["tool_calls"] = [tool_call(call) for call in source["tool_calls"]]
        messages.append(message)
    return messages


def _reasoning(message: Message, content: str | Sequence[Message]) -> str | None:
    """Return the reasoning of a message from any of the fields in which clients send it back."""
    parts = [*message.get("reasoning_details", ())]
    if not isinstance(content, str):
        parts += (part for part in content if part["type"] in THOUGHTS)
    names = ("text", "summary", "thinking")
    texts = [text_of(part[name]) for part in parts for name in names if part.get(name)]
    return reasoning_of(message) or "".join(texts) or reasoning_of(message)


def without_volatile(sent: Sequence[Message]) -> list[Message]:
    """Remove billing lines and countdowns from system messages. Clients change them with every
    request, so prompts would not begin as earlier ones. The user's messages are not changed."""
    left = []
    for message in sent:
        content = message.get("content", "")
        blocks = [content] if isinstance(content, str) else [*map(_text_of_part, content)]
        stable = ["" if COUNTDOWN.fullmatch(block) else BILLING.sub("", block) for block in blocks]
        if message["role"] not in SYSTEM or stable == blocks:
            left.append(message)
            continue
        log_once(VOLATILE)
        if text := lines_of(stable):
            left.append({**message, "content": text})
    return left or [{**sent[-1], "content": ""}]


def with_late_system(messages: Sequence[Message]) -> list[Message]:
    """Move the text of later system messages into other messages, for templates that accept a
    system message only at the beginning.

    Leading system messages are joined. A later one is appended to the user's message or the tool's
    result before it, or else put before the user's message after it. Later messages never change
    the result for earlier ones."""
    folded: list[Message] = []
    moved = False  # whether the last message is the text of a system message after an answer
    for message in messages:
        role, text = message["role"], message["content"]
        if role == "system" and folded and folded[-1]["role"] == "assistant":
            folded.append({"role": "user", "content": text})
            moved = True
        elif role == "system" and folded:
            texts = (folded[-1]["content"], text)
            folded[-1] = {**folded[-1], "content": lines_of(texts, "\n\n")}
        else:
            if moved and role != "assistant":
                held = folded.pop()["content"]
                texts = (held, text) if role == "user" else (text, held)
                message = {**message, "content": lines_of(texts, "\n\n")}
            moved = False
            folded.append(message)
    return folded


@functools.lru_cache(maxsize=1)
def renders_late_system(tokenizer: Tokenizer) -> bool:
    """Return whether the chat template writes a later system message in its place, without a change
    to the text before it. vLLM probes templates in the same way (entrypoints/anthropic)."""
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


def shown_name(name: str, namespace: str | None) -> str:
    """Return the name by which the model knows a tool. namespace: The tool's namespace in OpenAI's
    Responses API."""
    space = "" if namespace is None else f"{namespace.rstrip('_')}__"
    return f"{space}{name}"[-LONGEST_TOOL_NAME:]


def in_order(value: Any) -> Any:
    """Return tools with sorted keys, so that equal tools have equal prompts."""
    if isinstance(value, list):
        return [in_order(item) for item in value]
    if not isinstance(value, dict):
        return value
    names = [*filter(value.__contains__, ORDER), *sorted(value.keys() - set(ORDER))]
    return {name: in_order(value[name]) for name in names}


def text_of(content: str | Sequence[Message]) -> str:
    """Return the text of a content: a string, or the lines of a list of parts."""
    return content if isinstance(content, str) else lines_of(map(_text_of_part, content))


def _text_of_part(part: Message) -> str:
    """Return the text of a part: "" for reasoning, and a note for a part that is not text."""
    kind = part["type"]
    if kind in TEXT_PART_FIELDS:
        return str(part[TEXT_PART_FIELDS[kind]])
    note = f"[{kind} left out: this model reads only text]"
    return "" if kind in THOUGHTS else note


def lines_of(parts: Iterable[str], between: str = "\n") -> str:
    """Join the parts of a content, as llama.cpp does. Empty parts are left out."""
    return between.join(filter(None, parts))


def tool_call(call: Message) -> Message:
    """Return a call in an earlier message with its arguments as an object, for chat templates. If
    the arguments are not a JSON object, because they were cut, the object contains their text."""
    function = call["function"]
    arguments = text = function.get("arguments") or "{}"
    if isinstance(text, str):
        with contextlib.suppress(ValueError, RecursionError):
            arguments = parse_json(text.encode())
    if not isinstance(arguments, dict):
        arguments = {"arguments": text}
    called = {"name": function["name"], "arguments": arguments}
    return {**call, "type": "function", "function": called}


def _with_text_arguments(message: Message) -> Message:
    """Return a message whose calls have text as arguments, for templates such as DeepSeek's."""
    if "tool_calls" not in message:
        return message
    calls = []
    for call in message["tool_calls"]:
        arguments = json.dumps(call["function"]["arguments"], ensure_ascii=False)
        calls.append({**call, "function": {**call["function"], "arguments": arguments}})
    return {**message, "tool_calls": calls}


def with_tools_in_message(
    messages: Sequence[Message], tools: Sequence[Tool], system_prompt: str | None
) -> list[Message]:
    """Return messages with the tools in the system message, for Phi-4's chat template."""
    functions = json.dumps([tool["function"] for tool in tools], ensure_ascii=False)
    system, rest = {"role": "system", "content": system_prompt or ""}, list(messages)
    if rest[0]["role"] == "system":
        system, *rest = rest
    return [{**system, "tools": functions}, *rest]


def _with_one_thought(message: Message) -> Message:
    """Append the content before a call to the reasoning: gpt-oss's template accepts only one."""
    if not all(message.get(name) for name in ("tool_calls", "reasoning_content", "content")):
        return message
    thought = lines_of([message["reasoning_content"], message["content"]])
    return {**message, "reasoning_content": thought, "content": ""}


@dataclass(frozen=True)
class ChatFormat:
    """The form in which one model reads the messages of a chat.

    Attributes:
        encode: Returns the token ids of the source of an encoder-decoder.
        system_prompt: The system message for chats without one.
        variables: Variables of the chat template.
    """

    tokenizer: Tokenizer
    way: Way
    encode: Callable[[str], list[int]]
    system_prompt: str | None = None
    variables: Mapping[str, Any] = field(default_factory=dict)

    def ids(
        self,
        messages: Sequence[Message],
        variables: Mapping[str, Any] | None = None,
        ending: Ending = "answer",
    ) -> list[int]:
        """Return the token ids of a prompt.

        Args:
            messages: The conversation, as `messages_of` returns it.
            variables: Variables of the chat template, which override the format's variables.
            ending: How the prompt ends.
        Raises:
            PromptError: If the model cannot read such messages.
            CheckpointError: If the chat template fails.
        """
        if self.system_prompt is not None and messages[0]["role"] != "system":
            messages = [{"role": "system", "content": self.system_prompt}, *messages]
        if self.way == "template":
            return self._templated(messages, {**self.variables, **(variables or {})}, ending)
        if self.way == "role prefixes":
            lines = [PREFIXES.get(message["role"], "") + message["content"] for message in messages]
            beginning = PREFIXES["assistant"].rstrip()
            lines += {"answer": [beginning], "closed": [""], "continue": []}[ending]
            return self.tokenizer.encode("\n".join(lines))
        if [message["role"] for message in messages] != ["user"]:
            raise PromptError("this model takes a single message of the user")
        return self.encode(messages[0]["content"])

    def _templated(
        self, messages: Sequence[Message], variables: Mapping[str, Any], ending: Ending
    ) -> list[int]:
        late = any(message["role"] == "system" for message in messages[1:])
        if late and not renders_late_system(self.tokenizer):
            messages = with_late_system(messages)
        if self.tokenizer.ids.keys() >= {*HARMONY}:
            messages = [_with_one_thought(message) for message in messages]
        try:
            return self.tokenizer.apply_chat(messages, variables, ending=ending)
        except CheckpointError:
            if not any("tool_calls" in message for message in messages):
                raise
        messages = [_with_text_arguments(message) for message in messages]
        return self.tokenizer.apply_chat(messages, variables, ending=ending)
