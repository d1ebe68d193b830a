"""The messages of a chat turned into token ids: by the model's chat template, by the role prefixes
of mlx_lm.server, or as the one source of an encoder-decoder."""

import functools
import json
import logging
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from ..errors import CheckpointError, PromptError
from .chat import Ending
from .markers import markers_of
from .prompts import parse_json
from .tokenizer import Tokenizer

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
Way = Literal["template", "role prefixes", "single user message"]
"""How a model reads messages."""
Message = dict[str, Any]
Tool = dict[str, Any]
PREFIXES = {"system": "ASSISTANT's RULE: ", "user": "USER: ", "assistant": "ASSISTANT: "}
MESSAGE_FIELDS = ("name", "tool_call_id", "reasoning_content")
"""Optional fields of a message that templates read."""
VOLATILE = (
    "left lines of billing (x-anthropic-billing-header) or countdowns (total_tokens) out of "
    "system prompts, which would defeat the prompt cache: --keep-billing-lines keeps them"
)
log_once = functools.lru_cache(maxsize=64)(logging.getLogger(__name__).info)


def messages_of(sent: Sequence[Message]) -> list[Message]:
    """Convert the messages of a request to those of chat templates, whose contents are strings."""
    messages = []
    for message_sent in sent:
        role = "system" if message_sent["role"] in SYSTEM else message_sent["role"]
        message = {"role": role, "content": text_of(message_sent.get("content", ""))}
        message |= {name: message_sent[name] for name in MESSAGE_FIELDS if name in message_sent}
        if role == "assistant" and message_sent.get("tool_calls"):
            message["tool_calls"] = [tool_call(call) for call in message_sent["tool_calls"]]
        messages.append(message)
    return messages


def without_volatile(sent: Sequence[Message]) -> list[Message]:
    """Leave out of system messages what clients change with every request and what tells the model
    nothing, so that prompts begin as earlier ones did. Texts of the user stay as they are."""
    left = []
    for message in sent:
        content = message.get("content", "")
        blocks = [content] if isinstance(content, str) else [part["text"] for part in content]
        stable = ["" if COUNTDOWN.fullmatch(block) else BILLING.sub("", block) for block in blocks]
        if message["role"] not in SYSTEM or stable == blocks:
            left.append(message)
            continue
        log_once(VOLATILE)
        if text := lines_of(stable):
            left.append({**message, "content": text})
    return left or [{**sent[-1], "content": ""}]


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
        return [in_order(item) for item in value]
    if not isinstance(value, dict):
        return value
    names = [*filter(value.__contains__, ORDER), *sorted(value.keys() - set(ORDER))]
    return {name: in_order(value[name]) for name in names}


def text_of(content: str | Sequence[Message]) -> str:
    """Return the text of a content: a string, or a list of text parts, one a line."""
    return content if isinstance(content, str) else lines_of(part["text"] for part in content)


def lines_of(parts: Iterable[str]) -> str:
    """Join the parts of a content with line breaks, as llama.cpp does. Empty parts are left out."""
    return "\n".join(filter(None, parts))


def tool_call(call: Message) -> Message:
    """Return a call in an earlier message with its arguments as an object, as templates need it:
    that of the string where they are no JSON object, as in an answer that was cut."""
    function = call["function"]
    arguments = text = function.get("arguments") or "{}"
    if isinstance(text, str):
        try:
            arguments = parse_json(text.encode())
        except (ValueError, RecursionError):
            arguments = None
    if not isinstance(arguments, dict):
        arguments = {"arguments": text}
    called = {"name": function["name"], "arguments": arguments}
    return {**call, "type": "function", "function": called}


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
    messages: Sequence[Message], tools: Sequence[Tool], system_prompt: str | None
) -> list[Message]:
    """Return messages whose first one, of the system, has the tools, where Phi-4's chat template
    reads them."""
    functions = json.dumps([tool["function"] for tool in tools], ensure_ascii=False)
    system, rest = {"role": "system", "content": system_prompt or ""}, list(messages)
    if rest[0]["role"] == "system":
        system, *rest = rest
    return [{**system, "tools": functions}, *rest]


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


@dataclass(frozen=True)
class ChatFormat:
    """How one model reads the messages of a chat.

    Attributes:
        tokenizer: The tokenizer of the model, with the chat template if there is one.
        way: How the model reads messages.
        encode: Returns the token ids of the source of an encoder-decoder.
        system_prompt: The message of the system for chats without one.
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
        """Return the token ids of a prompt, up to where the model begins to write.

        Args:
            messages: The conversation, as `messages_of` returns it.
            variables: Variables of the chat template, which override the format's.
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
        if ending != "answer":
            raise PromptError("this model cannot continue a message")
        return self.encode(messages[0]["content"])

    def _templated(
        self, messages: Sequence[Message], variables: Mapping[str, Any], ending: Ending
    ) -> list[int]:
        late = any(message["role"] == "system" for message in messages[1:])
        if late and not renders_late_system(self.tokenizer):
            messages = with_late_system(messages)
        if any(map(_thinks_aloud, messages)) and markers_of(self.tokenizer).channels is not None:
            messages = [_with_one_thought(message) for message in messages]
        try:
            return self.tokenizer.apply_chat(messages, variables, ending=ending)
        except CheckpointError:
            if not any("tool_calls" in message for message in messages):
                raise
        messages = [_with_text_arguments(message) for message in messages]
        return self.tokenizer.apply_chat(messages, variables, ending=ending)
