"""Thoughts: told apart from answers, free before answers that are bound, and as long as their
budget allows, with and without drafts and in any batch."""

import re
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from ..support.tooled import MARKS
from ..support.tools import NAMED, SCHEMA, TOOLS
from .zoo import CHAT, MESSAGES, PERSON, RESPONSES, USER, Model, bound_to, joined

pytest.importorskip("llguidance", reason="the extra grammar is not installed")

Models = Callable[[str], Model]
BODY: dict[str, Any] = {"messages": [USER], "temperature": 1.0, "seed": 3, "max_tokens": 16}
THINKING = {"chat_template_kwargs": {"enable_thinking": True}}
PLAIN = {"speculative": False}


@pytest.fixture
def opens(models: Models) -> Model:
    return models("opens")


def endless(model: Model) -> dict[str, Any]:
    """Return a field with which no thought ends by itself."""
    return {"logit_bias": model.bias(**{"</think>": -30})}


def limited(budget: int) -> dict[str, Any]:
    return {"reasoning": {"max_tokens": budget}}


def thought_tokens(answer: Any) -> int:
    return int(answer["usage"]["completion_tokens_details"]["reasoning_tokens"])


def names(choice: Any) -> list[str]:
    return [token["token"] for token in choice["logprobs"]["content"]]


@pytest.mark.parametrize("name", ["talks", "marked"])
def test_a_thought_is_told_apart(models: Models, name: str) -> None:
    model, marks = models(name), MARKS if name == "marked" else ()
    body = {"messages": [USER], **bound_to("<think>\nHm.\n</think>\n\nYes.", marks)}
    choice = model.choice(CHAT, **body)
    assert choice["message"] == {
        "role": "assistant",
        "content": "Yes.",
        "refusal": None,
        "annotations": [],
        "reasoning_content": "Hm.",
    }
    assert choice["finish_reason"] == "stop"
    streamed = joined(model.streamed(CHAT, **body))
    assert (streamed["content"], streamed["reasoning_content"]) == ("Yes.", "Hm.")
    # The grammar that writes the marker has decided on the thought.
    begin = model.bias(**{"<think>": 9})
    assert model.message(**body, logit_bias=begin) == choice["message"]


def test_a_prompt_may_leave_a_thought_open(models: Models) -> None:
    model, body = models("talks"), {**BODY, **THINKING}
    ids = model.ok("/tokenize", messages=[USER], **THINKING)["tokens"]
    text = model.written(**{**BODY, "prompt": ids})
    assert "</think>" not in text and text.strip()
    message = model.message(**body)
    assert (message["reasoning_content"], message["content"]) == (text.lstrip(), "")
    assert joined(model.streamed(CHAT, **body))["reasoning_content"] == text.lstrip()


FITTING: dict[str, tuple[dict[str, Any], str]] = {
    "regex": ({"regex": "ab[ab]{2}"}, "ab[ab]{2}"),
    "schema": ({"guided_json": SCHEMA}, PERSON),
    "lark": ({"grammar": 'start: "(" PART{1,3} ")"\nPART: /[ab]/'}, r"\([ab]{1,3}\)"),
    "gbnf": ({"grammar": 'root ::= "(" part{1,3} ")"\npart ::= "a"'}, r"\(a{1,3}\)"),
    "call": ({"tools": TOOLS, "tool_choice": NAMED, "parallel_tool_calls": False}, ""),
}


@pytest.mark.parametrize(
    ("name", "kind"),
    [*(("opens", kind) for kind in FITTING), ("opens-text", "regex")],
)
def test_what_binds_an_answer_leaves_the_thought_before_it_free(
    models: Models, name: str, kind: str
) -> None:
    model, (constraint, pattern) = models(name), FITTING[kind]
    body = {**BODY, "max_tokens": 120, "seed": 6, **constraint}
    body["logit_bias"] = model.bias(**{"</think>": 5})
    drafted, plain = (model.choice(CHAT, **body, **more) for more in ({}, PLAIN))
    # A request that wants no thought gets none, although the prompt has opened one.
    calm = model.choice(CHAT, **body, reasoning_effort="none")
    for choice, thought in ((drafted, True), (plain, True), (calm, False)):
        message = choice["message"]
        assert bool(message.get("reasoning_content")) == thought, choice
        if pattern:
            assert re.fullmatch(pattern, message["content"])
            assert choice["finish_reason"] == "stop"
        else:
            [call] = message["tool_calls"]
            assert re.fullmatch(PERSON, call.pop("id") and call["function"]["arguments"])
    assert drafted == plain


@pytest.mark.parametrize(
    ("more", "shown"),
    [
        ({}, "- - -"),
        ({"reasoning_effort": "none"}, "False False -"),
        ({"reasoning_effort": "low"}, "- - low"),
        ({"reasoning": {"effort": "low"}}, "- - low"),
        ({"enable_thinking": False}, "False False -"),
        ({"thinking": {"type": "enabled"}}, "True True -"),
        ({"reasoning_effort": "none", **THINKING}, "True False -"),
    ],
    ids=str,
)
def test_a_request_tells_the_template_how_to_think(
    models: Models, more: dict[str, Any], shown: str
) -> None:
    model = models("talks")
    assert model.prompt(**more).startswith(f"{shown} [user]")
    count = model.ok("/tokenize", messages=[USER], **more)["count"]
    answer = model.ok(CHAT, messages=[USER], max_tokens=1, **more)
    assert answer["usage"]["prompt_tokens"] == count


@pytest.mark.parametrize(("budget", "temperature"), [(0, 1.0), (1, 0), (9, 1.0)])
def test_a_thought_ends_with_its_mark_at_the_budget(
    opens: Model, budget: int, temperature: float
) -> None:
    body = {**BODY, **endless(opens), "seed": 4, "temperature": temperature, "logprobs": True}
    answer = opens.ok(CHAT, **body, **limited(budget))
    [choice] = answer["choices"]
    assert names(choice).index("</think>") == budget == thought_tokens(answer)
    assert bool(choice["message"].get("reasoning_content")) == (budget > 0)
    # Up to the mark, the thought is that of an answer without a budget.
    free = opens.choice(CHAT, **body)
    assert names(free)[:budget] == names(choice)[:budget]
    assert free["message"]["content"] == ""
    plain = opens.choice(CHAT, **body, **limited(budget), **PLAIN)
    assert plain["message"] == choice["message"]


@pytest.mark.parametrize("rule", ["token", "block", "typical"])
def test_every_acceptance_rule_keeps_the_budget(models: Models, rule: str) -> None:
    model = models(f"opens-{rule}")
    for seed in range(2):
        body = {**BODY, **endless(model), **limited(6), "logprobs": True, "seed": seed}
        answer = model.ok(CHAT, **body)
        assert names(answer["choices"][0]).index("</think>") == 6
        assert answer["timings"]["draft_n_accepted"] > 0


def test_the_budget_is_the_same_in_any_batch(opens: Model) -> None:
    """Requests with different budgets, and one without, share their passes."""
    bodies = [
        {**BODY, "seed": seed, **({} if budget is None else limited(budget))}
        for seed, budget in enumerate((3, None, 0, 11, 5, 40))
    ]
    alone = [opens.message(**body, **PLAIN) for body in bodies]
    with ThreadPoolExecutor(len(bodies)) as pool:
        assert list(pool.map(lambda body: opens.message(**body), bodies)) == alone
    assert [bool(message["content"]) for message in alone][:3] == [True, False, True]


def test_every_api_has_the_budget_and_the_count(opens: Model) -> None:
    thinking = {"thinking": {"type": "enabled", "budget_tokens": 6}}
    body = BODY
    assert thought_tokens(opens.ok(CHAT, **body, **thinking, **endless(opens))) == 6
    # The smaller one of two budgets holds.
    both = {**thinking, **limited(4)}
    assert thought_tokens(opens.ok(CHAT, **body, **both, **endless(opens))) == 4
    message = opens.ok(MESSAGES, **body, **thinking)
    thought = message["usage"]["output_tokens_details"]["thinking_tokens"]
    assert 0 < thought <= 6 and message["content"][0]["type"] == "thinking"
    events = opens.ask(MESSAGES, **body, **thinking, stream=True).events
    [delta] = [event for event in events if event["type"] == "message_delta"]
    assert delta["usage"]["output_tokens_details"]["thinking_tokens"] == thought
    response = opens.ok(RESPONSES, input="Who?", max_output_tokens=24, seed=3, **limited(6))
    assert 0 < response["usage"]["output_tokens_details"]["reasoning_tokens"] <= 6
    assert [item["type"] for item in response["output"]] == ["reasoning", "message"]


def test_the_server_has_a_budget_for_requests_without_one(models: Models) -> None:
    model = models("budgeted")
    for more, count in (({}, 2), (limited(5), 5)):
        assert thought_tokens(model.ok(CHAT, **BODY, **endless(model), **more)) == count
