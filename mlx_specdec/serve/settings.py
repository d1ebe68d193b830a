"""From the fields of a request to options: how its text is drawn, bound, and drafted."""

from __future__ import annotations

import math
import secrets
from dataclasses import replace
from typing import Any

from ..options import Options
from ..pair import Pair
from ..sampling.settings import LARGEST
from ..text.tokenizer import Tokenizer
from . import formats
from .body import Body
from .chat import text_of
from .limits import Limits

SAME = (
    "temperature",
    "top_p",
    "min_p",
    "repetition_penalty",
    "presence_penalty",
    "frequency_penalty",
    "xtc_probability",
    "xtc_threshold",
)
"""Fields that mean what the options of the same name mean."""


def options_of(
    body: Body, pair: Pair, options: Options, limits: Limits, *, drawn_seed: bool
) -> Options:
    """The options of a request. options: where it says nothing; drawn_seed: but for the seed, which
    is then drawn. Raises Problem, OptionError."""
    own: dict[str, Any] = {name: body[name] for name in SAME if name in body}
    own["top_k"] = max(0, body.get("top_k", options.top_k))
    if "stop" in body:
        stop = body["stop"]
        own["stop"] = (*options.stop, *([stop] if isinstance(stop, str) else stop))
    if "logit_bias" in body:
        # Ids beyond the vocabulary have no logits to bias.
        biases = ((int(token), bias) for token, bias in body["logit_bias"].items())
        own["logit_bias"] = {
            token: -math.inf if bias < -LARGEST else bias
            for token, bias in biases
            if token < pair.vocabulary
        }
    own["seed"] = body.get("seed", secrets.randbits(32) if drawn_seed else options.seed)
    speculative = body.get("speculative", True)
    if speculative is False:
        own["regular"] = True
    elif speculative is not True and "max" in speculative:
        own["num_draft"] = speculative["max"]
    own |= formats.binding(pair, options, body, limits)
    # The prompt is token ids by now.
    return replace(options, system_prompt=None, chat_template_config={}, **own)


def expected_ids(body: Body, tokenizer: Tokenizer) -> tuple[int, ...]:
    """Return the token ids of the predicted output."""
    content = text_of(body["prediction"]["content"]) if "prediction" in body else ""
    ids = tokenizer.encode(content) if content else []
    return tuple(id for id in ids if id not in tokenizer.special_ids)
