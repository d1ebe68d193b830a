"""LangChain's standard tests of chat models, through langchain-openai."""

from __future__ import annotations

from typing import Any

import pytest

pytest.importorskip("langchain_tests", reason="the extra clients is not installed")
pytest.importorskip("langchain_openai", reason="the extra clients is not installed")

from langchain_openai import ChatOpenAI
from langchain_tests.integration_tests import ChatModelIntegrationTests

from .conftest import KEY, MODEL


class TestLangChain(ChatModelIntegrationTests):
    """Of a random model: what it says means nothing, how it is said does."""

    @pytest.fixture(autouse=True)
    def _served(self, base_url: str) -> None:
        type(self).url = base_url

    url = ""

    @property
    def chat_model_class(self) -> type[ChatOpenAI]:
        return ChatOpenAI

    @property
    def chat_model_params(self) -> dict[str, Any]:
        return {
            "base_url": self.url or "http://127.0.0.1:9/v1",
            "api_key": KEY,
            "model": MODEL,
            "temperature": 0,
            "max_tokens": 100,
            "max_retries": 0,
            "stream_usage": True,
        }
