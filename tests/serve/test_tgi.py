"""The endpoints of Hugging Face's text-generation-inference, read by its own client's types."""

import json
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from huggingface_hub import TextGenerationOutput, TextGenerationStreamOutput
from starlette.testclient import TestClient

from mlx_specdec.engine.pair import Pair
from mlx_specdec.engine.request import Request
from mlx_specdec.interfaces.records import Step, TokenLogprob
from mlx_specdec.serve import tgi
from mlx_specdec.serve.answers import Choice
from mlx_specdec.serve.requests import ParsedRequest
from mlx_specdec.serve.tgi import TgiWriter

from ..support.serving import OPTIONS, TEXT, client_of, running

SCHEMA = {"type": "object", "properties": {"a": {"enum": [1, 2]}}, "required": ["a"]}


def answer_to(client: TestClient, path: str = "/generate", **parameters: Any) -> Any:
    answer = client.post(path, json={"inputs": TEXT, "parameters": parameters})
    assert answer.status_code == 200, answer.text
    return answer.json()


def events(client: TestClient, **parameters: Any) -> list[TextGenerationStreamOutput]:
    answer = client.post("/generate_stream", json={"inputs": TEXT, "parameters": parameters})
    assert answer.headers["content-type"].startswith("text/event-stream")
    lines = [line.removeprefix("data: ") for line in answer.text.split("\n\n") if line]
    return [TextGenerationStreamOutput.parse_obj_as_instance(json.loads(each)) for each in lines]


@pytest.mark.parametrize(
    ("parameters", "means"),
    [
        ({}, {"temperature": 0}),
        ({"do_sample": True, "seed": 3}, {"temperature": 1.0, "seed": 3}),
        ({"temperature": 0.7, "seed": 3}, {"temperature": 0.7, "seed": 3}),
        ({"top_k": 5, "seed": 4}, {"temperature": 1.0, "top_k": 5, "seed": 4}),
        ({"temperature": 1.0, "top_p": 1.0, "top_k": 0}, {"temperature": 0}),
        ({"do_sample": True, "temperature": 1, "seed": 3}, {"temperature": 1.0, "seed": 3}),
    ],
    ids=str,
)
def test_a_text_is_that_of_a_completion(
    client: TestClient,
    pair: Pair,
    alone: Callable[..., str],
    parameters: dict[str, Any],
    means: dict[str, Any],
) -> None:
    text = alone(pair.tokenizer.encode(TEXT), max_tokens=15, **means)
    more = {**parameters, "max_new_tokens": 15}
    assert answer_to(client, **more) == {"generated_text": text}
    assert answer_to(client, "/", **more) == [{"generated_text": text}]
    assert answer_to(client, **more, return_full_text=True) == {"generated_text": TEXT + text}
    output = TextGenerationOutput.parse_obj_as_instance(answer_to(client, **more, details=True))
    assert output.details.finish_reason == "length"
    assert output.details.generated_tokens == len(output.details.tokens) == 15
    *before, last = chunks = events(client, **more)
    assert "".join(each.token.text for each in chunks) == text == last.generated_text
    assert [each.index for each in chunks] == list(range(1, 16))
    assert [each.token.id for each in chunks] == [each.id for each in output.details.tokens]
    assert all(each.generated_text is None and each.details is None for each in before)
    assert last.details.finish_reason == "length"
    assert last.details.input_length == len(pair.tokenizer.encode(TEXT))
    assert last.details.seed == output.details.seed or "seed" not in parameters


def test_no_sampling_means_greedy_although_the_model_is_sampled_by_default(
    llama: tuple[Path, Path], pair: Pair, alone: Callable[..., str]
) -> None:
    with running(llama, replace(OPTIONS, temperature=1.0, seed=3)) as engine:
        client = client_of(engine)
        for do_sample, temperature in ((None, 1.0), (False, 0.0)):
            text = alone(pair.tokenizer.encode(TEXT), max_tokens=9, temperature=temperature, seed=3)
            answer = answer_to(client, do_sample=do_sample, max_new_tokens=9, seed=3)
            assert answer == {"generated_text": text}


@pytest.mark.parametrize("ids", [(1, 2, 0), (1, 0), (0,)], ids=str)
def test_those_who_pass_over_special_tokens_read_the_whole_text(
    ids: tuple[int, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The text does not begin with the first token's space, or was held back before the end."""
    parsed = ParsedRequest([Request([5], OPTIONS)], 1)
    monkeypatch.setattr(tgi, "token_pieces", lambda _: [b"</s>", b" a", b"b"])
    parser: Any = SimpleNamespace(
        pair=SimpleNamespace(tokenizer=SimpleNamespace(special_ids={0})),
        completions=lambda body: parsed,
    )
    writer = TgiWriter(parser, {"inputs": "x"}, True)
    logprobs = tuple(TokenLogprob(id, -1.0, ()) for id in ids)
    emission = Step(tokens=ids, text="ab", finish_reason="eos", logprobs=logprobs)
    tokens = [each["token"] for each in writer.piece(Choice(), emission, [])]
    assert [each["id"] for each in tokens] == [*ids]
    assert "".join(each["text"] for each in tokens if not each["special"]) == "ab"


def test_a_stop_sequence_is_reported(client: TestClient) -> None:
    text = answer_to(client, max_new_tokens=15)["generated_text"]
    output = answer_to(client, max_new_tokens=15, stop=[text[4:6]], details=True)
    assert output["generated_text"] == text[: text.index(text[4:6])]
    assert output["details"]["finish_reason"] == "stop_sequence"
    assert events(client, max_new_tokens=15, stop=[text[4:6]])[-1].details.finish_reason == (
        "stop_sequence"
    )


@pytest.mark.parametrize(
    ("grammar", "pattern"),
    [
        ({"type": "regex", "value": "[ab]{3}é"}, "[ab]{3}é"),
        ({"type": "json", "value": SCHEMA}, r'\{"a": [12]\}'),
        ({"type": "json", "value": json.dumps(SCHEMA)}, r'\{"a": [12]\}'),
        ({"type": "json_schema", "value": {"name": "x", "schema": SCHEMA}}, r'\{"a": [12]\}'),
    ],
    ids=str,
)
def test_a_grammar_binds_the_text(
    client: TestClient, grammar: dict[str, Any], pattern: str
) -> None:
    pytest.importorskip("llguidance", reason="the extra grammar is not installed")
    output = answer_to(client, max_new_tokens=40, grammar=grammar, details=True, seed=1)
    assert re.fullmatch(pattern, output["generated_text"])
    assert output["details"]["finish_reason"] == "eos_token"
    assert (
        events(client, max_new_tokens=40, grammar=grammar, seed=1)[-1].generated_text
        == (output["generated_text"])
    )


WRONG = {
    "temperature": (-1, True),
    "do_sample": ("yes",),
    "max_new_tokens": ("all",),
    "grammar": ("json", {"type": "regex", "value": {}}, {"type": "regex", "value": "a("}),
    "best_of": (2,),
    "watermark": (True,),
}


@pytest.mark.parametrize(
    "body",
    [
        {},
        {"inputs": 5},
        {"inputs": "x", "parameters": 5},
        *(
            {"inputs": "x", "parameters": {name: each}}
            for name, values in WRONG.items()
            for each in values
        ),
    ],
    ids=str,
)
def test_errors_are_reported_as_tgi_tells_them(client: TestClient, body: dict[str, Any]) -> None:
    for path in ("/generate", "/generate_stream", "/"):
        answer = client.post(path, json=body)
        assert answer.status_code == 422
        assert answer.json()["error_type"] == "validation" and answer.json()["error"]


def test_info_is_what_clients_look_at(client: TestClient) -> None:
    info = client.get("/info").json()
    assert (info["model_id"], info["max_total_tokens"], info["max_input_tokens"]) == (
        "tiny",
        4096,
        4095,
    )
