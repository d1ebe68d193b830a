"""Clients on top of OpenAI's: instructor."""

from importlib.util import find_spec

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
