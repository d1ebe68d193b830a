"""/v1/embeddings: means of hidden states, compared with mlx-lm's own modules and with numpy."""

from concurrent.futures import ThreadPoolExecutor
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from tokenizers import Tokenizer

from ..support import tiny
from .several import PROMPT, Several

PATH = "/v1/embeddings"
LOOP = "for line in open(path):\n    print(line)\n"
TEXTS = [PROMPT, "é", LOOP * 3, PROMPT]


def vectors(several: Several, texts: object, model: str = "tiny", **more: Any) -> list[Any]:
    data = several.server.ok(PATH, model=model, input=texts, **more)["data"]
    places = [("embedding", at) for at in range(len(data))]
    assert [(entry["object"], entry["index"]) for entry in data] == places
    return [entry["embedding"] for entry in data]


def mean(states: Any, ids: list[int], special: set[int]) -> Any:
    """Return the mean over the tokens of a text that are not special, scaled to length 1."""
    rows = np.array(states.astype(mx.float32))[[token not in special for token in ids]]
    return rows.mean(axis=0) / np.linalg.norm(rows.mean(axis=0))


def test_a_decoders_embedding_is_the_mean_of_its_last_states(several: Several) -> None:
    network: Any = tiny.build("llama", vocab_size=size(several, "tiny"))
    # The last text is longer than a chunk of prefill.
    for text in (*TEXTS, LOOP * 20):
        ids = several.ids(text)
        assert ids[0] == 0, "a special token that does not count"
        [vector] = vectors(several, text)
        assert np.linalg.norm(vector) == pytest.approx(1, abs=1e-5)
        # The complete text in one pass.
        states = network.model(mx.array([ids]))[0]
        assert np.allclose(vector, mean(states, ids, {0, 1}), atol=1e-5)
        assert vectors(several, ids) == [vector]


def size(several: Several, model: str) -> int:
    file = several.directory / model / "tokenizer.json"
    return Tokenizer.from_file(str(file)).get_vocab_size()


def test_an_encoder_decoder_embeds_with_its_encoder(several: Several) -> None:
    weights: Any = mx.load(str(several.directory / "translator" / "model.safetensors"))
    scales, biases = (weights[f"shared.{part}"].astype(mx.float32) for part in ("scales", "biases"))
    embedded = mx.dequantize(weights["shared.weight"], scales, biases, group_size=64, bits=8)
    for text in (PROMPT, "Where is the station?"):
        ids = several.ids(text, "translator")
        scale = weights["encoder.final_layer_norm.weight"].astype(mx.float32)
        states = mx.fast.rms_norm(embedded[mx.array(ids)], scale, 1e-6)
        [vector] = vectors(several, text, "translator")
        assert np.allclose(vector, mean(states, ids, {0, 1, 2}), atol=1e-5)


@pytest.mark.parametrize("model", ["tiny", "translator"])
def test_an_embedding_does_not_depend_on_its_batch(several: Several, model: str) -> None:
    alone = [vectors(several, text, model)[0] for text in TEXTS]
    assert vectors(several, TEXTS, model) == alone and alone[0] == alone[-1] != alone[1]

    def complete(text: str) -> Any:
        body = {"model": model, "prompt": text, "max_tokens": 20}
        return several.server.ok("/v1/completions", **body)["choices"]

    # Completions and other embeddings are computed at the same time.
    with ThreadPoolExecutor(6) as pool:
        texts = [pool.submit(complete, text) for text in TEXTS]
        lists = [pool.submit(vectors, several, TEXTS[::-1], model) for _ in range(2)]
        assert [future.result() for future in lists] == [alone[::-1]] * 2
        assert all(future.result() for future in texts)


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({}, "input"),
        ({"input": ""}, "input"),
        ({"input": []}, "input"),
        ({"input": ["a", 1]}, "input"),
        ({"input": [1 << 30]}, "input"),
        ({"input": ["a"] * 16_385}, "input"),
        ({"input": [5] * 5000}, "input"),
        ({"input": "a", "dimensions": 8}, "dimensions"),
        ({"input": "a", "encoding_format": "int8"}, "encoding_format"),
    ],
    ids=lambda part: str(part)[:30],
)
def test_what_cannot_be_embedded_is_refused_by_name(
    several: Several, body: dict[str, Any], param: str
) -> None:
    answer = several.server.ask(PATH, {"model": "tiny", **body})
    assert answer.status == 400 and answer.json["error"]["param"] == param
