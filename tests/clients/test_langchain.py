"""LangChain's standard tests of chat models, through langchain-openai."""

import json
from typing import Any, ClassVar

import pytest

pytest.importorskip("langchain_tests", reason="the extra clients is not installed")
pytest.importorskip("langchain_openai", reason="the extra clients is not installed")

from langchain_openai import ChatOpenAI
from langchain_tests.integration_tests import ChatModelIntegrationTests

from ..support.tools import KEY, MODEL

MAGIC = {"name": "magic_function", "arguments": {"input": 3}}
CALLS = {
    "test_agent_loop": {"name": "get_weather", "arguments": {"location": "San Francisco"}},
    "test_bind_runnables_as_tools": {
        "name": "greeting_generator",
        "arguments": {"answer_style": "pirate"},
    },
    "test_tool_calling": MAGIC,
    "test_tool_calling_async": MAGIC,
    "test_tool_calling_with_no_arguments": {"name": "magic_function_no_args", "arguments": {}},
    "test_unicode_tool_call_integration": {
        "name": "unicode_customer",
        "arguments": {"customer_name": "你好, こんにちは", "description": "集团"},
    },
}
"""What a model would call that knows what is wanted of it. A grammar has the random one write it,
so that all but the choice is real: the text is read, streamed and told back as any other call."""


class TestLangChain(ChatModelIntegrationTests):
    """Of a random model: what it says means nothing, how it is said does."""

    @pytest.fixture(autouse=True)
    def _served(
        self, request: pytest.FixtureRequest, base_url: str, ending: dict[str, int]
    ) -> None:
        own = type(self)
        own.url, own.ending = base_url, ending
        own.call = CALLS.get(request.node.originalname)

    url = ""
    ending: ClassVar[dict[str, int]] = {}
    call: ClassVar[dict[str, Any] | None] = None

    @property
    def chat_model_class(self) -> type[ChatOpenAI]:
        return ChatOpenAI

    @property
    def structured_output_kwargs(self) -> dict[str, Any]:
        # A random model makes use of every property that a schema does not forbid.
        return {"strict": True}

    @property
    def chat_model_params(self) -> dict[str, Any]:
        bound: dict[str, str] = {}
        if self.call is not None:
            text = f"<tool_call>{json.dumps(self.call, ensure_ascii=False)}</tool_call>"
            # A text cannot be bound to two things at once.
            bound = {"grammar": f"start: {json.dumps(text)}", "tool_choice": "auto"}
        return {
            "base_url": self.url or "http://127.0.0.1:9/v1",
            "api_key": KEY,
            "model": MODEL,
            "temperature": 0,
            "max_tokens": 200,
            "model_kwargs": {"logit_bias": self.ending},
            "extra_body": bound,
            "max_retries": 0,
            "stream_usage": True,
        }
