"""T5Gemma 2 against transformers' numbers, and the same texts with drafts and in batches."""

from __future__ import annotations

import json
from pathlib import Path

import mlx.core as mx
import numpy as np
import pytest

from mlx_specdec.interfaces import feed
from mlx_specdec.models.encoder_decoder.context import EncoderDecoderModel
from mlx_specdec.models.loading import load_model

FIXTURES = Path(__file__).parents[1] / "fixtures" / "t5gemma2"
KINDS = ("grouped", "old")
ROWS = 40


def lines(kind: str) -> list[dict[str, list[int]]]:
    text = (FIXTURES / kind / "texts.jsonl").read_text()
    return [json.loads(line) for line in text.splitlines()]


@pytest.fixture(scope="module", params=KINDS)
def kind(request) -> str:
    return request.param


@pytest.fixture(scope="module")
def model(kind: str) -> EncoderDecoderModel:
    return load_model(FIXTURES / kind, dtype="float32").model


def fed(line: dict[str, list[int]]) -> list[int]:
    return [2, *line["text"][:-1]]


def test_the_greedy_tokens_are_those_of_transformers_one_by_one_and_in_a_pass(kind, model) -> None:
    for number, line in enumerate(lines(kind)):
        whole = model.open(line["source"]).advance(mx.array([fed(line)])).logits[0]
        assert mx.argmax(whole, axis=-1).tolist() == line["text"]
        if number % 16:
            continue
        context, token = model.open(line["source"]), 2
        for expected in line["text"]:
            token = int(mx.argmax(context.advance(mx.array([[token]])).logits).item())
            assert token == expected


def test_logits_are_those_of_transformers(kind, model) -> None:
    expected = mx.load(str(FIXTURES / kind / "logits.st"), format="safetensors")
    for number, line in enumerate(lines(kind)[20::21]):
        logits = model.open(line["source"]).advance(mx.array([fed(line)])).logits[0]
        difference = mx.abs(logits - expected[str(number)]).max().item()
        assert difference < 2e-5 * max(1.0, mx.abs(logits).max().item()), difference
