"""The endpoints of Hugging Face's text-generation-inference, read by its own client."""

import json
import re
from typing import Any

import huggingface_hub
import pytest
from huggingface_hub import TextGenerationOutput, TextGenerationStreamOutput

from .several import PROMPT, Several

CHOICE = {"type": "object", "properties": {"a": {"enum": [1, 2]}}, "required": ["a"]}


def ask(several: Several, path: str = "/generate", model: str = "tiny", **parameters: Any) -> Any:
    return several.server.ok(path, model=model, inputs=PROMPT, parameters=parameters)


def events(several: Several, **parameters: Any) -> list[TextGenerationStreamOutput]:
    body = {"model": "tiny", "inputs": PROMPT, "parameters": parameters}
    answer = several.server.ask("/generate_stream", body)
    assert answer.headers["content-type"].startswith("text/event-stream")
    return [TextGenerationStreamOutput.parse_obj_as_instance(event) for event in answer.events]


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
    several: Several, parameters: dict[str, Any], means: dict[str, Any]
) -> None:
    text = several.alone(PROMPT, max_tokens=15, **means)
    more = {**parameters, "max_new_tokens": 15}
    assert ask(several, **more) == {"generated_text": text}
    assert ask(several, "/", **more) == [{"generated_text": text}]
    assert ask(several, **more, return_full_text=True) == {"generated_text": PROMPT + text}
    output = TextGenerationOutput.parse_obj_as_instance(ask(several, **more, details=True))
    details: Any = output.details
    assert details.finish_reason == "length"
    assert details.generated_tokens == len(details.tokens) == 15
    *before, last = chunks = events(several, **more)
    # Clients pass over special tokens and read the complete text from the others.
    shown = (chunk.token.text for chunk in chunks if not chunk.token.special)
    assert "".join(shown) == text == last.generated_text
    assert [chunk.index for chunk in chunks] == list(range(1, 16))
    assert [chunk.token.id for chunk in chunks] == [token.id for token in details.tokens]
    assert all(chunk.generated_text is None and chunk.details is None for chunk in before)
    end: Any = last.details
    assert (end.finish_reason, end.input_length) == ("length", len(several.ids(PROMPT)))
    assert end.seed == details.seed or "seed" not in parameters


def test_no_sampling_means_greedy_although_the_model_samples_by_default(several: Several) -> None:
    for do_sample, temperature in ((None, 1.0), (False, 0.0)):
        text = several.alone(PROMPT, max_tokens=9, temperature=temperature, seed=3)
        answer = ask(several, model="random", do_sample=do_sample, max_new_tokens=9, seed=3)
        assert answer == {"generated_text": text}


def test_special_tokens_are_marked_and_the_others_have_the_complete_text(several: Several) -> None:
    """The model ends its answer, and the tokens of one round come together."""
    body = {"model": "chat", "inputs": "[answer]", "parameters": {"max_new_tokens": 40}}
    answer = several.server.ask("/generate_stream", body)
    tokens = [event["token"] for event in answer.events]
    text = "".join(token["text"] for token in tokens if not token["special"])
    assert text == "Nobody was there." == answer.events[-1]["generated_text"]
    assert (tokens[-1]["special"], tokens[-1]["text"]) == (True, "")
    assert answer.events[-1]["details"]["finish_reason"] == "eos_token"


@pytest.mark.parametrize(
    ("grammar", "pattern"),
    [
        ({"type": "regex", "value": "[ab]{3}é"}, "[ab]{3}é"),
        ({"type": "json", "value": CHOICE}, r'\{"a": [12]\}'),
        ({"type": "json", "value": json.dumps(CHOICE)}, r'\{"a": [12]\}'),
        ({"type": "json_schema", "value": {"name": "x", "schema": CHOICE}}, r'\{"a": [12]\}'),
    ],
    ids=["regex", "json", "text", "schema"],
)
def test_a_grammar_binds_the_text(several: Several, grammar: dict[str, Any], pattern: str) -> None:
    pytest.importorskip("llguidance", reason="the extra grammar is not installed")
    bound: dict[str, Any] = {"max_new_tokens": 40, "grammar": grammar, "seed": 1}
    output = ask(several, **bound, details=True)
    assert re.fullmatch(pattern, output["generated_text"])
    assert output["details"]["finish_reason"] == "eos_token"
    assert events(several, **bound)[-1].generated_text == output["generated_text"]


WRONG = {
    "temperature": (-1, True),
    "do_sample": ("yes",),
    "max_new_tokens": ("all",),
    "grammar": ("json", {"type": "regex", "value": {}}, {"type": "regex", "value": "a("}),
    "best_of": (2,),
    "watermark": (True,),
}


def test_errors_are_reported_as_tgi_reports_them(several: Several) -> None:
    parameters = ({name: value} for name, values in WRONG.items() for value in values)
    bodies: list[dict[str, Any]] = [{}, {"inputs": 5}, {"inputs": "x", "parameters": 5}]
    bodies += [{"inputs": "x", "parameters": wrong} for wrong in parameters]
    for body in bodies:
        for path in ("/generate", "/generate_stream", "/"):
            answer = several.server.ask(path, {"model": "tiny", **body})
            assert answer.status == 422, (path, body)
            assert answer.json["error_type"] == "validation" and answer.json["error"]


def test_hugging_faces_client_reads_what_it_expects(
    several: Several, monkeypatch: pytest.MonkeyPatch
) -> None:
    # It would not even connect to this machine.
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", False)
    url = f"http://127.0.0.1:{several.server.port}"
    client = huggingface_hub.InferenceClient(url, token="none")
    text = several.alone(PROMPT, max_tokens=10)
    assert client.text_generation(PROMPT, max_new_tokens=10) == text
    assert "".join(client.text_generation(PROMPT, max_new_tokens=10, stream=True)) == text
    details: Any = client.text_generation(PROMPT, max_new_tokens=10, details=True)
    assert (details.generated_text, details.details.generated_tokens) == (text, 10)
    answer = client.chat_completion([{"role": "user", "content": "Who?"}], max_tokens=10)
    said = several.alone("USER: Who?\nASSISTANT:", max_tokens=10)
    assert answer.choices[0].message.content == said
    with pytest.raises(huggingface_hub.errors.ValidationError, match="top_p"):
        client.text_generation(PROMPT, top_p=5.0)
