"""What is meant is taken, what is not meant is refused by name."""

import json
from dataclasses import asdict

import numpy as np
import pytest

from mlx_specdec.engine.generate import generate, stream_generate
from mlx_specdec.engine.pair import Pair
from mlx_specdec.errors import OptionError, PromptError
from mlx_specdec.options import Options

from .support.pairs import PROMPT, SIZE, decoder_only


@pytest.fixture(scope="module")
def pair() -> Pair:
    return decoder_only("llama")


def test_numbers_of_numpy_are_pythons() -> None:
    options = Options(
        seed=np.int64(3), max_tokens=np.int32(5), top_p=np.float32(0.5), num_draft=True
    )
    assert options == Options(seed=3, max_tokens=5, top_p=0.5, num_draft=1)
    json.dumps(asdict(options))


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("max_tokens", 2.5),
        ("max_tokens", "3"),
        ("seed", None),
        ("seed", 3.0),
        ("num_draft", "three"),
        ("ngram_min", 1.5),
        ("top_k", None),
        ("temperature", "0.5"),
        ("temperature", 10**400),
        ("xtc_probability", "0.5"),
        ("xtc_special_tokens", ("a",)),
        ("prefill_step_size", 2.5),
        ("system_prompt", 3),
        ("chat_template_config", "thinking"),
        ("delta", None),
        ("stop", (3,)),
        ("stop", ("a", "")),
        ("logit_bias", {"3": 1.0}),
        ("logit_bias", {3: "a"}),
        ("logit_bias", [3]),
        ("logit_bias", None),
        ("stop", 3),
        ("stop", b"self"),
        ("stop", None),
        ("xtc_special_tokens", 3),
        ("regular", "no"),
        ("chat_template", None),
    ],
)
def test_what_is_no_number_is_refused_by_name(name: str, value: object) -> None:
    with pytest.raises(OptionError, match=name.replace("_", "-")):
        Options(**{name: value})


def test_biases_are_copied_and_name_tokens_that_there_are(pair: Pair) -> None:
    biases = {3: -1.0}
    options = Options(logit_bias=biases)
    biases[4] = 1.0
    assert options.logit_bias == {3: -1.0}
    with pytest.raises(OptionError, match=f"no token {SIZE}"):
        stream_generate(pair, PROMPT, Options(logit_bias={SIZE: 1.0}))


def test_numpy_ids_are_a_prompt_and_bytes_are_none(pair: Pair) -> None:
    options = Options(max_tokens=6, temperature=1.0, seed=np.int64(3))
    plain = generate(pair, PROMPT, Options(max_tokens=6, temperature=1.0, seed=3))
    assert generate(pair, np.array(PROMPT), options).as_dict()["tokens"] == list(plain.tokens)
    for prompt in (b"bytes", [{"role": "user", "content": "messages"}], [1.5]):
        with pytest.raises(PromptError, match=r"a prompt is text|no chat template"):
            generate(pair, prompt, options)


@pytest.mark.parametrize("extra", [np.int64, str, lambda id: [id], lambda id: (str(id), 63)])
def test_extra_tokens_end_the_text_too(pair: Pair, extra) -> None:
    plain = generate(pair, PROMPT, Options(max_tokens=20))
    ends = plain.tokens[4]
    done = generate(pair, PROMPT, Options(max_tokens=20, extra_eos_token=extra(ends)))
    assert done.finish_reason == "eos"
    assert done.tokens == plain.tokens[: plain.tokens.index(ends) + 1]


@pytest.mark.parametrize("token", ["<|end|>", SIZE, -1, "2.5"])
def test_extra_tokens_that_the_model_lacks_are_refused(pair: Pair, token: object) -> None:
    with pytest.raises(OptionError, match="extra-eos-token: the model has no token"):
        stream_generate(pair, PROMPT, Options(extra_eos_token=token))
