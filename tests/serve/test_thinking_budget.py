"""Budgets of thoughts over HTTP: kept to the token with and without drafts and in any batch, and
counted in the usage of every wire format."""

import json
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from starlette.testclient import TestClient

from ..support.models import moved
from ..support.serving import CHAT, OPTIONS, client_of, ok, running, user
from ..support.tooled import TEMPLATE, make_tooled

OPENS = TEMPLATE.replace("{% if enable_thinking %}<think>{% endif %}", "<think>")
"""A template whose prompts open a thought."""
BUDGET = 9
BODY: dict[str, Any] = {"messages": [user("Who?")], "temperature": 1.0, "max_tokens": 16}


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tooled(tmp_path_factory.mktemp("opens"), template=OPENS, special=True)


@pytest.fixture(scope="module")
def client(directory: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[TestClient]:
    draft = moved(directory, tmp_path_factory.mktemp("draft"))
    with running((directory, draft)) as engine:
        yield client_of(engine)


def mark(client: TestClient, text: str) -> int:
    return ok(client, "/tokenize", content=text)["tokens"][-1]


def limited(budget: int) -> dict[str, Any]:
    return {"reasoning": {"max_tokens": budget}}


@pytest.mark.parametrize(("budget", "temperature"), [(0, 1.0), (1, 0), (BUDGET, 1.0)])
def test_a_thought_ends_with_its_mark_at_the_budget(
    client: TestClient, budget: int, temperature: float
) -> None:
    body = {**BODY, "seed": 4, "temperature": temperature, "logprobs": True}
    # No thought ends by itself in this test.
    body["logit_bias"] = {str(mark(client, "</think>")): -30}
    answer = ok(client, CHAT, **body, **limited(budget))
    [choice] = answer["choices"]
    tokens = [token["token"] for token in choice["logprobs"]["content"]]
    assert tokens.index("</think>") == budget
    assert answer["usage"]["completion_tokens_details"]["reasoning_tokens"] == budget
    assert bool(choice["message"].get("reasoning_content")) == (budget > 0)
    # Up to the mark, the thought is that of an answer without a budget.
    free = ok(client, CHAT, **body)["choices"][0]
    assert [token["token"] for token in free["logprobs"]["content"]][:budget] == tokens[:budget]
    assert free["message"]["content"] == ""
    plain = ok(client, CHAT, **body, **limited(budget), speculative=False)["choices"][0]
    assert plain["message"] == choice["message"]


@pytest.mark.parametrize("rule", ["token", "block", "typical"])
def test_every_acceptance_rule_keeps_the_budget(directory: Path, tmp_path: Path, rule: str) -> None:
    options = replace(OPTIONS, rule=rule, num_draft=4, proposer="draft")
    with running((directory, moved(directory, tmp_path)), options) as engine:
        client = client_of(engine)
        body = {**BODY, "logprobs": True, "logit_bias": {str(mark(client, "</think>")): -30}}
        for seed in range(2):
            answer = ok(client, CHAT, **body, **limited(6), seed=seed)
            content = answer["choices"][0]["logprobs"]["content"]
            assert [token["token"] for token in content].index("</think>") == 6
            assert answer["timings"]["draft_n_accepted"] > 0


def test_the_budget_is_the_same_in_any_batch(client: TestClient) -> None:
    """Requests with different budgets, and one without, share their passes."""
    bodies = [
        {**BODY, "seed": seed, **({} if budget is None else limited(budget))}
        for seed, budget in enumerate((3, None, 0, 11, 5, 40))
    ]

    def message(body: dict[str, Any]) -> Any:
        return ok(client, CHAT, **body)["choices"][0]["message"]

    alone = [message({**body, "speculative": False}) for body in bodies]
    with ThreadPoolExecutor(len(bodies)) as pool:
        together = list(pool.map(message, bodies))
    assert together == alone
    assert [bool(each["content"]) for each in alone][:3] == [True, False, True]


def test_a_thought_that_the_model_opens_has_a_budget_too(
    tmp_path: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    directory = make_tooled(tmp_path, special=True)
    with running((directory, moved(directory, tmp_path_factory.mktemp("draft")))) as engine:
        client = client_of(engine)
        begin, end = mark(client, "<think>"), mark(client, "</think>")
        body = {**BODY, "seed": 1, "logit_bias": {str(begin): 6, str(end): -30}, "logprobs": True}
        for speculative in (True, False):
            answer = ok(client, CHAT, **body, **limited(4), speculative=speculative)
            tokens = [token["token"] for token in answer["choices"][0]["logprobs"]["content"]]
            first = tokens.index("<think>")
            assert tokens.index("</think>") <= first + 5
            # All thoughts share one budget: the last one begins when nothing is left.
            again = [at for at, token in enumerate(tokens) if token == "<think>"][1:]
            assert again and tokens[again[-1] + 1 : again[-1] + 2] in ([], ["</think>"])
            assert answer["usage"]["completion_tokens_details"]["reasoning_tokens"] == 4


def test_a_pattern_binds_the_answer_after_the_budget(client: TestClient) -> None:
    pytest.importorskip("llguidance", reason="the extra grammar is not installed")
    bias = {str(mark(client, "</think>")): -30}
    body = {**BODY, "seed": 2, "regex": "ab[ab]{2}", "logit_bias": bias}
    for speculative in (True, False):
        answer = ok(client, CHAT, **body, **limited(5), speculative=speculative)
        [choice] = answer["choices"]
        assert choice["finish_reason"] == "stop" and len(choice["message"]["content"]) == 4
        assert answer["usage"]["completion_tokens_details"]["reasoning_tokens"] == 5


def test_every_wire_format_has_the_budget_and_the_count(client: TestClient) -> None:
    bias = {str(mark(client, "</think>")): -30}
    thinking = {"type": "enabled", "budget_tokens": 6}
    chat = ok(client, CHAT, **BODY, thinking=thinking, seed=3, logit_bias=bias)
    assert chat["usage"]["completion_tokens_details"]["reasoning_tokens"] == 6
    # The smaller one of two budgets holds.
    both = ok(client, CHAT, **BODY, **limited(4), thinking=thinking, seed=3, logit_bias=bias)
    assert both["usage"]["completion_tokens_details"]["reasoning_tokens"] == 4
    message = ok(client, "/v1/messages", **BODY, thinking=thinking, seed=3)
    thought = message["usage"]["output_tokens_details"]["thinking_tokens"]
    assert 0 < thought <= 6 and message["content"][0]["type"] == "thinking"
    streamed = client.post(
        "/v1/messages", json={**BODY, "thinking": thinking, "seed": 3, "stream": True}
    )
    events = [line[6:] for line in streamed.text.splitlines() if line.startswith("data: ")]
    [delta] = [each for each in map(json.loads, events) if each["type"] == "message_delta"]
    assert delta["usage"]["output_tokens_details"]["thinking_tokens"] == thought
    response = ok(client, "/v1/responses", input="Who?", max_output_tokens=24, seed=3, **limited(6))
    details = response["usage"]["output_tokens_details"]
    assert 0 < details["reasoning_tokens"] <= 6
    assert [item["type"] for item in response["output"]] == ["reasoning", "message"]


def test_the_server_has_a_budget_for_requests_without_one(directory: Path) -> None:
    with running((directory, None)) as engine:
        client = client_of(engine, thinking_budget=2)
        body = {**BODY, "logit_bias": {str(mark(client, "</think>")): -30}}
        for more, count in (({}, 2), (limited(5), 5)):
            usage = ok(client, CHAT, **body, **more)["usage"]
            assert usage["completion_tokens_details"]["reasoning_tokens"] == count


@pytest.mark.parametrize("budget", [-1, 2.5, "many"])
def test_a_wrong_budget_is_refused_by_name(client: TestClient, budget: object) -> None:
    for field, name in (("reasoning", "max_tokens"), ("thinking", "budget_tokens")):
        body = {**BODY, field: {"type": "enabled", name: budget}}
        answer = client.post(CHAT, json=body)
        assert answer.status_code == 400 and f"{field}.{name}" in answer.json()["error"]["message"]


def test_the_mark_of_a_budget_may_not_be_banned(client: TestClient) -> None:
    banned = {str(mark(client, "</think>")): -1e30}
    answer = client.post(CHAT, json={**BODY, **limited(3), "logit_bias": banned})
    assert answer.status_code == 400 and answer.json()["error"]["param"] == "logit_bias"
