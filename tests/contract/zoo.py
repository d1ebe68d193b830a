"""Many tiny models behind one server, and what tests ask of one of them."""

import json
import re
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from ..support import tiny
from ..support.tokenizers import unigram
from ..support.tooled import CALLS, MARKS, TEMPLATE
from .call_texts import TEXTS
from .learned import learned
from .support import ROOT, Answer, Server, checkpoint, moved
from .test_tool_calls import template_of

AGAIN = ("", " again")
"""The ends of the two cues of each answer."""
CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
RESPONSES, MESSAGES = "/v1/responses", "/v1/messages"
TEXT = "def read_lines"
USER = {"role": "user", "content": "Who?"}
PERSON = r'\{"name": "[a-z]{1,4}", "age": \d{1,2}\}'
"""The pattern of a JSON object that fits SCHEMA."""
TEMPLATES: dict[str, str] = tomllib.loads(
    Path(__file__).with_name("templates.toml").read_text(encoding="utf-8")
)
SHOWN = " ".join(
    f"{{{{ {name} | default('-') }}}}"
    for name in ("enable_thinking", "thinking", "reasoning_effort")
)
OPENS = TEMPLATE.replace("{% if enable_thinking %}<think>{% endif %}", "<think>")
"""A template that opens a thought whatever the request wants."""
DEEPSEEK = tuple(f"<｜tool▁{name}｜>" for name in ("calls▁begin", "calls▁end"))
DEEPSEEK += tuple(f"<｜tool▁{name}｜>" for name in ("call▁begin", "sep", "call▁end"))
KIMI = tuple(f"<|tool_calls_section_{end}|>" for end in ("begin", "end"))
KIMI += tuple(f"<|tool_call_{part}|>" for part in ("begin", "argument_begin", "end"))
FORMATS: dict[str, tuple[str, tuple[str, ...]]] = {
    "deepseek_v3": (f"{DEEPSEEK[0]}```json", DEEPSEEK),
    "deepseek_v31": (DEEPSEEK[0], DEEPSEEK),
    "granite": ("<|tool_call|>", ("<|tool_call|>",)),
    "llama3_json": ('"parameters": dictionary of argument name', ("<|python_tag|>",)),
    "phi4_mini_json": ("<|/tool|>", ("<|tool_call|>", "<|/tool_call|>")),
    "kimi_k2": ("".join(KIMI), KIMI),
    "mistral": ("[TOOL_CALLS][ARGS]", ("[TOOL_CALLS]", "[ARGS]")),
    "mistrals-lists": ("[TOOL_CALLS]", ("[TOOL_CALLS]",)),
}
"""What the template of a format of tool calls shows, and its special tokens."""
HARMONY: tuple[str, ...] = ("<|start|>", "<|channel|>", "<|constrain|>", "<|message|>")
HARMONY += ("<|end|>", "<|call|>", "<|return|>")
ANALYSIS = TEMPLATES["channels"] + "<|channel|>analysis<|message|>"
KEEP = '{"name": "ab", "age": 7}'
CHANNEL_ANSWERS: dict[str, tuple[str, str, str, list[tuple[str, str]]]] = {
    cue: (text, thought, content, [(name, arguments) for name, arguments in calls])
    for cue, (text, thought, content, calls) in json.loads(
        Path(__file__).with_name("answers.json").read_text(encoding="utf-8")
    )["channels"].items()
}
"""What models write in channels by a cue, and how it is read: thoughts, content and calls."""
FILLING = ("<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>", "<|file_sep|>")
SUFFIX_FIRST = ("[PREFIX]", "[SUFFIX]")
MIDDLE = "total = sum(each.size for each in files if each.name)"
"""The text that two models write into a gap."""


def format_template(shown: str) -> str:
    """Return a template that shows a format of calls, and does not write calls in Qwen's format."""
    return f"{{# {shown} #}}" + TEMPLATE.replace("tool_call>", "call>").replace(
        "{% set tool_call = call.function %}", "{% set call = call.function %}"
    ).replace("tool_call.", "call.")


def twice(answers: Mapping[str, str]) -> dict[str, str]:
    """Return each answer for two cues, such as <<a>> and <<a again>>. A model writes the second one
    with other tokens than the first one, since all its tokens differ. For the same reason, short
    answers come first."""
    ordered = sorted(answers.items(), key=lambda answer: len(answer[1]))
    return {f"<<{cue}{more}>>": text for cue, text in ordered for more in AGAIN}


def write_models(root: Path) -> dict[str, dict[str, Any]]:
    """Write the models, and return the flags of each one by its name."""

    def made(name: str, **more: Any) -> Path:
        return checkpoint(root / name, **more)

    target = made("tiny")
    words = unigram(
        root / "words",
        chat_template=TEMPLATES["plain"],
        eos_token="</s>",
        tokenizer_class="PreTrainedTokenizerFast",
    )
    vocabulary = json.loads((words / "tokenizer.json").read_text())["model"]["vocab"]
    tiny.write("llama", words, vocab_size=len(vocabulary))
    opens = made("opens", template=OPENS, tokens=MARKS, special=True)
    channels = made("channels", template=TEMPLATES["channels"], tokens=HARMONY, special=True)
    for file, change in {
        "tokenizer_config": {"eos_token": "<|return|>"},
        "config": {
            "eos_token_id": json.loads((channels / "config.json").read_text())["vocab_size"] - 1
        },
    }.items():
        path = channels / f"{file}.json"
        path.write_text(json.dumps({**json.loads(path.read_text()), **change}))
    drafted = {"num-draft": 2}
    lookup = {"proposer": "ngram", "num-draft": 4}
    flags: dict[str, dict[str, Any]] = {
        "tiny": {"model": target, "draft-model": moved(target, root / "tiny-draft"), **drafted},
        "templated": {
            "model": made("templated", template=TEMPLATES["plain"]),
            "system-prompt": "Hush.",
        },
        "talks": {
            "model": made("talks", template=f"{SHOWN} {TEMPLATE}", tokens=MARKS),
            **drafted,
            "max-model-len": 1024,
        },
        "marked": {
            "model": made("marked", template=TEMPLATE, tokens=MARKS, special=True),
            "draft-model": root / "opens-draft",
            **drafted,
        },
        "calls": {"model": made("calls", template=TEMPLATE, tokens=CALLS), **drafted},
        "opens": {"model": opens, "draft-model": moved(opens, root / "opens-draft"), **drafted},
        "opens-text": {"model": made("opens-text", template=OPENS, tokens=MARKS)},
        "budgeted": {"model": opens, "thinking-budget": 2},
        "channels": {"model": channels, **drafted},
        "analysis": {"model": made("analysis", template=ANALYSIS, tokens=HARMONY, special=True)},
        "words": {"model": words},
        "translator": {"model": ROOT / "weights/t5-enfr", "num-draft": 2},
        "translator-raw": {"model": ROOT / "weights/t5-enfr", "no-chat-template": True},
        "system-tools": {"model": made("system-tools", template=TEMPLATES["system-tools"])},
        "no-tools": {
            "model": made(
                "no-tools",
                template="{% for m in messages %}{{ m.content }}<tool_call>tool_call.name"
                "{% endfor %}",
            )
        },
        "own-calls": {
            "model": made("own-calls", template=TEMPLATE.replace("tool_call", "call_of_its_own"))
        },
        "filling": {
            "model": made("filling", tokens=FILLING, special=True),
            **lookup,
            "max-model-len": 400,
        },
    }
    flags["named-calls"] = {
        "model": flags["own-calls"]["model"],
        "tool-call-parser": "llama3_json",
    }
    for name, tokens in (("middle", FILLING), ("suffix-first", SUFFIX_FIRST)):
        model = learned(root / name, {"<<>>": MIDDLE}, "", tokens=tokens, least=1)
        for url in (COMPLETIONS, "/infill"):
            flags[f"{name}{url.replace('/', '-')}"] = {"model": model, **lookup}
    spoken = "{% for tool in tools or [] %}{{ tool.function.name }}, {% endfor %}"
    spoken += "<|start|>assistant{{ '\\n' + messages[-1].content }}"
    answers = twice({cue: answer for cue, (answer, *_) in CHANNEL_ANSWERS.items()})
    spoken = "{# <|channel|> #}" + spoken
    model = learned(root / "harmony", answers, spoken, tokens=HARMONY, least=2)
    flags["harmony"] = {"model": model, "max-tokens": 200}
    for format in {name for name, *_ in TEXTS}:
        texts = {str(at): text for at, (name, text, _) in enumerate(TEXTS) if name == format}
        answers = twice(texts)
        template, name = template_of(format), f"texts-{format}"
        model = learned(root / name, answers, template, tokens=MARKS[:2], least=2)
        flags[name] = {"model": model, "max-tokens": 400}
    for rule in ("token", "block", "typical"):
        flags[f"opens-{rule}"] = {**flags["opens"], "rule": rule, "num-draft": 4}
    for name, (shown, marks) in FORMATS.items():
        shows = format_template(shown)
        flags[name] = {"model": made(name, template=shows, tokens=marks, special=True)}
    return flags


def preset(file: Path, flags: Mapping[str, Mapping[str, Any]]) -> Path:
    """Write a file for `serve --models-preset`."""
    tables = []
    for name, settings in flags.items():
        lines = {"max-tokens": 24, **settings}.items()
        values = {
            key: json.dumps(value if isinstance(value, int) else str(value)) for key, value in lines
        }
        tables += [f"[{name}]", *(f"{key} = {value}" for key, value in values.items())]
    file.write_text("\n".join(tables), encoding="utf-8")
    return file


@dataclass(frozen=True)
class Model:
    """One of the models of a server, which is asked by its name. path: Its checkpoint."""

    server: Server
    name: str
    path: Path

    def ask(self, path: str, **body: Any) -> Answer:
        return self.server.ask(path, {"model": self.name, **body})

    def ok(self, path: str, **body: Any) -> Any:
        """Send a body that must be answered with 200, and return the JSON of the answer."""
        answer = self.ask(path, **body)
        assert answer.status == 200, answer.body
        return answer.json

    def refused(self, path: str, **body: Any) -> Any:
        """Send a body that must be answered with 400, and return the error."""
        answer = self.ask(path, **body)
        assert answer.status == 400, answer
        return answer.json["error"]

    def streamed(self, path: str, **body: Any) -> list[Any]:
        """Return the chunks of a stream in OpenAI's format, which is well formed."""
        answer = self.ask(path, **body, stream=True)
        assert answer.status == 200, answer.body
        assert answer.headers["content-type"] == "text/event-stream; charset=utf-8"
        assert answer.headers["cache-control"] == "no-cache"
        *events, last, rest = answer.body.decode().split("\n\n")
        assert (last, rest) == ("data: [DONE]", "")
        return [json.loads(event.removeprefix("data: ")) for event in events if event[0] != ":"]

    def choice(self, path: str, **body: Any) -> Any:
        """Return the only choice of an answer."""
        [choice] = self.ok(path, **body)["choices"]
        return choice

    def written(self, **body: Any) -> str:
        """Return the text of a completion."""
        return str(self.choice(COMPLETIONS, **body)["text"])

    def message(self, **body: Any) -> Any:
        """Return the message of a chat, by default the answer to USER."""
        return self.choice(CHAT, **{"messages": [USER], "max_tokens": 200, **body})["message"]

    def ids(self, text: str) -> list[int]:
        return [int(id) for id in self.ok("/tokenize", content=text)["tokens"]]

    def bias(self, **amounts: float) -> dict[str, float]:
        """Return a logit_bias of the last token of each text."""
        return {str(self.ids(text)[-1]): amount for text, amount in amounts.items()}

    def prompt(self, **body: Any) -> str:
        """Return the prompt of messages as text, without special tokens."""
        tokens = self.ok("/tokenize", **{"messages": [USER], **body})["tokens"]
        return str(self.ok("/detokenize", tokens=tokens)["content"])

    @cached_property
    def vocabulary(self) -> dict[str, int]:
        """The pieces of the tokenizer and their ids."""
        content = json.loads((self.path / "tokenizer.json").read_text(encoding="utf-8"))
        added = {token["content"]: int(token["id"]) for token in content["added_tokens"]}
        return {**content["model"]["vocab"], **added}


def joined(chunks: Sequence[Any]) -> dict[str, Any]:
    """Return the message of a chat as a client puts it together from a stream."""
    message: dict[str, Any] = {"content": "", "reasoning_content": "", "tool_calls": []}
    for chunk in chunks:
        delta = chunk["choices"][0]["delta"]
        for name in ("content", "reasoning_content"):
            message[name] += delta.get(name, "")
        for call in delta.get("tool_calls", []):
            if "id" in call:
                assert call["index"] == len(message["tool_calls"])
                message["tool_calls"].append({**call, "function": dict(call["function"])})
            else:
                function = message["tool_calls"][call["index"]]["function"]
                function["arguments"] += call["function"]["arguments"]
    return message


def bound_to(text: str, special: Sequence[str] = ()) -> dict[str, str]:
    """Return a field that lets an answer be nothing but this text.

    Args:
        special: The special tokens in the text."""
    pattern = "|".join(map(re.escape, special)) or "(?!)"
    parts = [part for part in re.split(f"({pattern})", text) if part]
    rules = (part if part in special else json.dumps(part) for part in parts)
    return {"grammar": "start: " + " ".join(rules)}
