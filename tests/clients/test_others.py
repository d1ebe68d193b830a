"""Clients on top of OpenAI's: llm on the command line, instructor."""

import json
import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

from ..support.tools import KEY, MODEL


def needs(name: str) -> pytest.MarkDecorator:
    """Skips where a package is not installed, before anything is served."""
    return pytest.mark.skipif(find_spec(name) is None, reason="the extra clients is not installed")


@needs("instructor")
def test_instructor_reads_what_it_asks_for(base_url: str, ending: dict[str, int]) -> None:
    import instructor
    from openai import OpenAI
    from pydantic import BaseModel, Field

    class Person(BaseModel):
        """Whom an answer is about."""

        name: str = Field(pattern="^[a-z]{1,4}$")
        age: int = Field(ge=0, le=99)

    client = OpenAI(base_url=base_url, api_key=KEY, max_retries=0)
    for mode in (instructor.Mode.TOOLS, instructor.Mode.JSON_SCHEMA):
        answer = instructor.from_openai(client, mode=mode).chat.completions.create(
            model=MODEL,
            messages=[{"role": "user", "content": "Who?"}],
            response_model=Person,
            max_tokens=200,
            max_retries=0,
            logit_bias=ending,
        )
        assert isinstance(answer, Person)


@needs("llm")
def test_llm_asks_on_the_command_line(shipped: str, tmp_path: Path) -> None:
    models = f"- model_id: {MODEL}\n  model_name: {MODEL}\n  api_base: {shipped}/v1\n"
    (tmp_path / "extra-openai-models.yaml").write_text(models)
    environment = {**os.environ, "LLM_USER_PATH": str(tmp_path), "OPENAI_API_KEY": KEY}

    def ask(*flags: str) -> str:
        command = [sys.executable, "-m", "llm", "-m", MODEL, "Who?", "-o", "max_tokens", "20"]
        settings = ["-o", "temperature", "0", *flags]
        ended = subprocess.run(
            [*command, *settings], env=environment, capture_output=True, text=True, timeout=120
        )
        assert ended.returncode == 0, ended.stderr
        return ended.stdout

    text = ask()
    assert text.strip() and ask("--no-stream") == text
    logged = subprocess.run(
        [sys.executable, "-m", "llm", "logs", "--json"],
        env=environment,
        capture_output=True,
        text=True,
        check=True,
    )
    assert json.loads(logged.stdout)[0]["response"].strip() == text.strip()
