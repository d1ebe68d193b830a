"""The prompts that chat templates make of messages, and what begins and continues an answer."""

import json
from collections.abc import Callable
from typing import Any

import pytest

from mlx_specdec import Options, generate, load

from ..support.tools import TOOLS
from .zoo import CHAT, COMPLETIONS, USER, Model

Models = Callable[[str], Model]
PREFIX = "translate English to French: "


def test_a_chat_template_is_used_where_there_is_one(models: Models) -> None:
    model = models("templated")
    own = {"role": "system", "content": "Own."}
    for messages, prompt in (
        ([USER], "[system] Hush.\n[user] Who?\n[assistant]"),
        ([own, USER], "[system] Own.\n[user] Who?\n[assistant]"),
    ):
        body = {"messages": messages}
        reply = model.ok("/tokenize", **body)
        assert model.prompt(**body) == prompt
        raw = model.written(prompt=reply["tokens"], temperature=0, max_tokens=8)
        assert model.message(**body, temperature=0, max_tokens=8)["content"] == raw
        calm = {**body, "chat_template_kwargs": {"calm": "yes"}, "max_tokens": 1}
        assert model.ok(CHAT, **calm)["usage"]["prompt_tokens"] > reply["count"]
    assert model.server.get("/props?model=templated").json["chat"] == "template"
    begun = [USER, {"role": "assistant", "content": "It "}]
    for more, end in (
        ({}, "[assistant] It \n[assistant]"),
        ({"add_generation_prompt": False}, "[assistant] It \n"),
        ({"continue_final_message": True}, "[assistant] It "),
    ):
        assert model.prompt(messages=begun, **more) == f"[system] Hush.\n[user] Who?\n{end}"


@pytest.mark.parametrize("text", ["", "Be calm."])
def test_a_template_may_read_the_tools_in_the_message_of_the_system(
    models: Models, text: str
) -> None:
    system = [{"role": "system", "content": text}] if text else []
    prompt = models("system-tools").prompt(messages=[*system, USER], tools=TOOLS)
    begin, _, rest = prompt.partition("<|tool|>")
    assert begin == f"<|system|>{text}"
    listed, _, rest = rest.partition("<|/tool|>")
    assert [tool["name"] for tool in json.loads(listed)] == ["keep", "drop"]
    assert rest == "<|user|>Who?"


def test_a_translator_answers_a_single_message(models: Models) -> None:
    model, text = models("translator"), "I am cold."
    body = {"temperature": 0.7, "seed": 3}
    message = model.message(messages=[{"role": "user", "content": text}], **body)
    props = model.server.get("/props?model=translator").json
    assert (props["chat"], props["task_prefix"]) == ("single user message", PREFIX)
    for prompt in (text, PREFIX + text):
        answer = model.ok(COMPLETIONS, prompt=prompt, **body)
        assert answer["choices"][0]["text"] == message["content"]
    assert model.written(prompt=text, speculative=False, **body) == message["content"]
    # Without a template, the model gets no task but the prompt.
    raw = models("translator-raw")
    counts = [
        answer["usage"]["prompt_tokens"]
        for answer in (
            raw.ok(COMPLETIONS, prompt=text, max_tokens=1),
            raw.ok(CHAT, messages=[{"role": "user", "content": text}], max_tokens=1),
            answer,
        )
    ]
    assert counts[0] == counts[1] < counts[2]
    assert raw.server.get("/props?model=translator-raw").json["task_prefix"] == ""


def test_the_blank_before_a_continuation_is_part_of_it(models: Models) -> None:
    """The tokenizer writes blanks as parts of words, and leaves out that of the first one."""
    model, pair = models("words"), load(models("words").path)
    word = json.loads((model.path / "tokenizer.json").read_text(encoding="utf-8"))["model"]
    id = [piece for piece, _ in word["vocab"]].index("▁des")
    body = {"max_tokens": 2, "logit_bias": {str(id): 100}}
    assert model.written(prompt="Les", echo=True, **body) == "Les des des"
    choices = model.ok(COMPLETIONS, prompt=["Les", "Les"], **body)["choices"]
    assert [choice["text"] for choice in choices] == [" des des"] * 2
    chunks = model.streamed(COMPLETIONS, prompt="Les", **body)
    assert "".join(chunk["choices"][0]["text"] for chunk in chunks) == " des des"
    # An answer, and a text that fits a pattern, stand alone.
    user = {"role": "user", "content": "Les"}
    assert model.message(messages=[user], **body)["content"] == "des des"
    begun = [user, {"role": "assistant", "content": "Les"}]
    continued = model.message(messages=begun, continue_final_message=True, **body)
    assert continued["content"] == " des des"
    options: dict[str, Any] = {"max_tokens": 2, "logit_bias": {id: 100.0}, "cost_cache": False}
    assert generate(pair, "Les", Options(chat_template=False, **options)).text == " des des"
    assert generate(pair, "Les", Options(**options)).text == "des des"
    pytest.importorskip("llguidance", reason="the extra grammar is not installed")
    assert model.written(prompt="Les", regex="des( des)*", **body) == "des des"
