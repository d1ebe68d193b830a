"""Prompts of a conversation begin alike, and what the prefix cache holds is not computed again."""

import random
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from starlette.testclient import TestClient

from mlx_specdec.engine.pair import Pair
from mlx_specdec.engine.prompt_cache_files import Store
from mlx_specdec.serve.app import Access
from mlx_specdec.text import messages as chat

from ..support.serving import (
    CHAT,
    COMPLETIONS,
    OPTIONS,
    SCHEMA,
    client_of,
    ok,
    running,
    streamed,
    user,
)
from ..support.tooled import CALLS, TEMPLATE, make_tooled

LEFT = "<total_tokens>12345 tokens left</total_tokens>"
HOISTING = (
    "{% for m in messages if m.role == 'system' %}[system] {{ m.content }}\n{% endfor %}"
    "{% for m in messages if m.role != 'system' %}[{{ m.role }}] {{ m.content }}\n{% endfor %}"
    "{% if add_generation_prompt %}[assistant]{% endif %}"
)
RAISING = (
    "{% for m in messages %}{% if m.role == 'system' and not loop.first %}"
    "{{ raise_exception('a system message must come first') }}{% endif %}"
    "[{{ m.role }}] {{ m.content }}\n{% endfor %}"
    "{% if add_generation_prompt %}[assistant]{% endif %}"
)
FORGETFUL = (
    "{% set last = namespace(user=0) %}{% for m in messages %}{% if m.role == 'user' %}"
    "{% set last.user = loop.index0 %}{% endif %}{% endfor %}"
    "{% for m in messages %}[{{ m.role }}] {% if m.reasoning_content and loop.index0 > last.user %}"
    "<think>{{ m.reasoning_content }}</think>{% endif %}{{ m.content }}\n{% endfor %}"
    "{% if add_generation_prompt %}[assistant]{% endif %}"
)
SYSTEM, ANSWER = {"role": "system", "content": "S"}, {"role": "assistant", "content": "A"}


def say(role: str, content: str) -> dict[str, Any]:
    return {"role": role, "content": content}


def test_countdowns_are_left_out(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO")
    chat.log_once.cache_clear()
    talk = [SYSTEM, user(LEFT), say("system", LEFT), ANSWER]
    assert chat.without_volatile(talk) == [SYSTEM, user(LEFT), ANSWER]
    parts = [{"type": "text", "text": each} for each in (f" {LEFT}\n", "Be calm.")]
    assert chat.without_volatile([{**SYSTEM, "content": parts}]) == [say("system", "Be calm.")]
    assert len(caplog.messages) == 1
    for text in (f"{LEFT} and more", "<total_tokens>none</total_tokens>"):
        assert chat.without_volatile([say("system", text)]) == [say("system", text)]
    assert chat.without_volatile([say("system", LEFT)]) == [say("system", "")]


def test_later_system_messages_are_folded_where_they_stand() -> None:
    call = {**ANSWER, "tool_calls": [{}]}
    talk = [SYSTEM, say("system", "S2"), user("U"), say("system", "a"), call]
    talk += [say("system", "b"), say("tool", "T1"), say("tool", "T2"), say("system", "c"), ANSWER]
    talk += [say("system", "d"), user("V"), ANSWER, say("system", "e")]
    folded = [say("system", "S\n\nS2"), user("U\n\na"), call, say("tool", "T1\n\nb")]
    folded += [say("tool", "T2\n\nc"), ANSWER, user("d\n\nV"), ANSWER, user("e")]
    assert chat.with_late_system(talk) == folded
    # Each prompt extends the one before.
    for end in range(1, len(talk)):
        if talk[end]["role"] == "assistant":
            begun = chat.with_late_system(talk[:end])
            assert folded[: len(begun)] == begun


@pytest.mark.parametrize(
    ("template", "prompt"),
    [
        (HOISTING, "[system] S\n[user] U\n\nX\n[assistant] A\n[user] V\n[assistant]"),
        (RAISING, "[system] S\n[user] U\n\nX\n[assistant] A\n[user] V\n[assistant]"),
        (TEMPLATE, "[system] S[user] U[system] X[assistant] A[user] V[assistant]"),
    ],
    ids=["hoisting", "raising", "in place"],
)
def test_templates_are_tried(template: str, prompt: str, tmp_path: Path) -> None:
    with running((make_tooled(tmp_path, template=template), None)) as engine:
        client = client_of(engine)
        talk = [user("U"), say("system", "X"), ANSWER, user("V")]
        assert ok(client, "/apply-template", messages=[SYSTEM, *talk])["prompt"] == prompt
        for wrong in ({}, {"messages": None}, {"messages": []}, {"messages": [{"role": "x"}]}):
            assert client.post("/apply-template", json=wrong).status_code == 400
        body = {"system": "S", "messages": talk, "max_tokens": 2}
        assert ok(client, "/v1/messages", **body)["usage"]["input_tokens"] > 4


def test_keys_of_tools_have_one_order_and_nothing_for_servers_in_it(
    tmp_path_factory: pytest.TempPathFactory,
) -> None:
    template = "{{ tools | tojson }}" + TEMPLATE
    directory = make_tooled(tmp_path_factory.mktemp("tools"), template=template, marks=CALLS)

    def shuffled(value: Any, dice: random.Random) -> Any:
        if not isinstance(value, dict):
            return value
        names = dice.sample(list(value), len(value))
        return {name: shuffled(value[name], dice) for name in names}

    with running((directory, None)) as engine:
        client = client_of(engine)
        function = {"name": "keep", "description": "Keeps.", "parameters": SCHEMA}
        prompts = set()
        for seed in range(5):
            tool = shuffled({"type": "function", "function": function}, random.Random(seed))
            tool["function"] |= {"cache_control": {"type": "ephemeral"}} if seed else {}
            given = {"messages": [user("Who?")], "tools": [tool]}
            prompts.add(ok(client, "/apply-template", **given)["prompt"])
        [prompt] = prompts
        assert prompt.startswith('[{"type": "function", "function": {"name": "keep", "description"')
        assert "cache_control" not in prompt
        mark = {"cache_control": {"type": "ephemeral"}}
        tool = {"name": "keep", "input_schema": SCHEMA}
        text = {"type": "text", "text": "Who?"}
        bodies = (
            {"system": [{**text, **more}], "tools": [{**tool, **more}], "messages": messages}
            for more in ({}, mark)
            for messages in ([{"role": "user", "content": [{**text, **more}]}],)
        )
        counts = {
            ok(client, "/v1/messages/count_tokens", **each)["input_tokens"] for each in bodies
        }
        assert len(counts) == 1


def test_what_changes_means_nothing_to_the_prompt_cache(tmp_path: Path) -> None:
    """Two turns of Claude Code, and reasoning that the template drops with the next question."""
    directory = make_tooled(tmp_path, template=FORGETFUL)
    with running((directory, None), store=Store(1 << 26)) as engine:
        client = client_of(engine)

        def turn(number: int, rest: list[Any]) -> dict[str, Any]:
            billing = f"x-anthropic-billing-header: cc_version=2.1; cch={number:05};"
            system = [{"type": "text", "text": each} for each in (billing, "You edit files. " * 9)]
            body = {"system": system, "messages": rest, "max_tokens": 4, "stream": False}
            return ok(client, "/v1/messages", **body)["usage"]

        question = [user("Who? " * 20), say("system", LEFT)]
        thought = {"type": "thinking", "thinking": "Hm. " * 20}
        answer = {"role": "assistant", "content": [thought, {"type": "text", "text": "Me."}]}
        talk = [*question, answer, user("Why?"), say("system", LEFT.replace("1", "2"))]
        first = turn(1, question)
        before = first["input_tokens"] + first["cache_read_input_tokens"]
        assert turn(2, talk)["cache_read_input_tokens"] >= before - 1


def test_documents_of_text_are_read(tmp_path: Path) -> None:
    with running((make_tooled(tmp_path), None)) as engine:
        client = client_of(engine)

        def count(*blocks: Any) -> int:
            body = {"messages": [{"role": "user", "content": list(blocks)}]}
            return ok(client, "/v1/messages/count_tokens", **body)["input_tokens"]

        source = {"type": "text", "media_type": "text/plain", "data": "Files."}
        document = {"type": "document", "title": "T", "source": source}
        asked = {"type": "text", "text": "Who?"}
        assert count(document, asked) == count({"type": "text", "text": "T\nFiles.\n"}, asked)
        parts = {"type": "content", "content": [{"type": "text", "text": "Files."}]}
        assert count({**document, "source": parts}, asked) == count(document, asked)
        pdf = {**document, "source": {"type": "base64", "data": "JVBE"}}
        body = {"messages": [{"role": "user", "content": [pdf]}], "max_tokens": 1}
        assert client.post("/v1/messages", json=body).status_code == 400


QUESTION = {"role": "user", "content": "def read_lines"}


@pytest.fixture
def system(request: pytest.FixtureRequest) -> str:
    """A text that no other test begins with."""
    return f"{request.node.name} reads files, line by line, and says nothing else. " * 2


@pytest.fixture(scope="module")
def client(llama: tuple[Path, Path]) -> Iterator[TestClient]:
    with running(llama, store=Store(1 << 26)) as engine:
        yield client_of(engine)


def cached(report: dict[str, Any]) -> int:
    return report["usage"]["prompt_tokens_details"]["cached_tokens"]


def test_a_conversation_is_read_once(client: TestClient, system: str) -> None:
    talk = [{"role": "system", "content": system}, QUESTION]
    body = {"max_tokens": 12, "temperature": 0.9, "seed": 4}
    first = ok(client, CHAT, messages=talk, **body)
    assert first["timings"]["cache_n"] == cached(first) < 30
    answer = first["choices"][0]["message"]
    reply = ok(client, CHAT, messages=[*talk, answer, {"role": "user", "content": "x"}], **body)
    usage, timings = reply["usage"], reply["timings"]
    before = first["usage"]["prompt_tokens"]
    assert before - 1 <= cached(reply) < usage["prompt_tokens"]
    assert timings["cache_n"] == cached(reply)
    assert timings["prompt_n"] == usage["prompt_tokens"] - cached(reply)


def test_the_text_is_that_of_the_prompt_alone(
    client: TestClient, system: str, pair: Pair, alone: Callable[..., str]
) -> None:
    for temperature in (0.0, 0.9):
        for tail in ("a", "b", "a", "a c"):
            body = {"max_tokens": 12, "temperature": temperature, "seed": 4}
            answer = ok(client, COMPLETIONS, prompt=system + tail, **body)
            ids = pair.tokenizer.encode(system + tail)
            wanted = alone(ids, max_tokens=12, temperature=temperature, seed=4)
            assert answer["choices"][0]["text"] == wanted
    assert cached(answer) > 20


def test_choices_count_a_prompt_once(client: TestClient, system: str) -> None:
    for _ in range(2):
        answer = ok(client, COMPLETIONS, prompt=system, max_tokens=2, n=3)
    assert cached(answer) == answer["usage"]["prompt_tokens"] - 1


def test_every_dialect_tells_of_it(client: TestClient, system: str) -> None:
    body = {"messages": [{"role": "user", "content": system}], "max_tokens": 3}
    first, second = (ok(client, "/v1/messages", **body)["usage"] for _ in range(2))
    assert first["cache_read_input_tokens"] < 30 and first["output_tokens"] == 3
    assert second["input_tokens"] == 1
    read = first["input_tokens"] + first["cache_read_input_tokens"]
    assert second["cache_read_input_tokens"] == read - 1
    wanted = {"stream_options": {"include_usage": True}, "prompt": system, "max_tokens": 3}
    streamed(client, COMPLETIONS, **wanted)
    *_, last = streamed(client, COMPLETIONS, **wanted)
    assert cached(last) == last["usage"]["prompt_tokens"] - 1
    asked = {"input": system, "max_output_tokens": 3}
    _, usage = (ok(client, "/v1/responses", **asked)["usage"] for _ in range(2))
    assert usage["input_tokens_details"] == {"cached_tokens": usage["input_tokens"] - 1}
    events = client.post("/v1/messages", json={**body, "stream": True}).text
    assert f'"cache_read_input_tokens": {second["cache_read_input_tokens"]}' in events


def test_metrics_count_hits_in_tokens(client: TestClient, system: str) -> None:
    before = metrics(client)
    answer = [ok(client, COMPLETIONS, prompt=system, max_tokens=2) for _ in range(2)]
    size, hits = answer[0]["usage"]["prompt_tokens"], cached(answer[0]) + cached(answer[1])
    assert hits >= size - 1
    after = metrics(client)
    for name, more in (
        ("vllm:prefix_cache_queries_total", 2 * size),
        ("vllm:prefix_cache_hits_total", hits),
        ("vllm:prompt_tokens_total", 2 * size),
    ):
        assert after[name] - before[name] == more, name
    assert after["mlx_specdec:prompt_cache_bytes"] > before["mlx_specdec:prompt_cache_bytes"]


def metrics(client: TestClient) -> dict[str, float]:
    lines = [each for each in client.get("/metrics").text.splitlines() if each[0] != "#"]
    return {line.split("{")[0].split(" ")[0]: float(line.split(" ")[-1]) for line in lines}


def test_nobody_hits_what_another_key_has_sent(
    llama: tuple[Path, Path], system: str, tmp_path: Path
) -> None:
    """Neither in memory nor on disk."""

    def hits(client: TestClient, key: str) -> int:
        body = {"prompt": system, "max_tokens": 2}
        return cached(client.post(COMPLETIONS, json=body, headers={"x-api-key": key}).json())

    for order, hit in (
        (("one", "two", "two", "one"), [False, False, True, True]),
        (("two", "three", "one"), [True, False, True]),
    ):
        with running(llama, store=Store(1 << 26, tmp_path)) as engine:
            client = client_of(engine, access=Access(["one", "two", "three"]))
            assert [hits(client, key) > 0 for key in order] == hit


def test_nobody_drafts_from_what_another_key_has_written(llama: tuple[Path, Path]) -> None:
    options = replace(OPTIONS, proposer="ngram", num_draft=8)
    with running((llama[0], None), options, history=True) as engine:
        client = client_of(engine, access=Access(["one", "two"]))

        def asked(key: str) -> tuple[str, int]:
            body = {"prompt": "def read_lines", "max_tokens": 40, "temperature": 0}
            answer = client.post(COMPLETIONS, json=body, headers={"x-api-key": key}).json()
            return answer["choices"][0]["text"], answer["timings"]["draft_n_accepted"]

        first, again, other, others = asked("one"), asked("one"), asked("two"), asked("two")
        assert {each[0] for each in (first, again, other, others)} == {first[0]}
        assert other[1] == first[1] < again[1] == others[1]
        metrics = client.get("/metrics", headers={"x-api-key": "one"}).text
        assert f"history_bytes {engine.nbytes[1]}" in metrics
        assert engine.nbytes[1] > 0
