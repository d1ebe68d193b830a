"""From the fields of a request to options: how its text is drawn, bound, and drafted."""

from __future__ import annotations

import secrets
from dataclasses import replace
from typing import Any

from ..options import MOST_DRAFTED, Options
from ..pair import Pair
from ..text.tokenizer import Tokenizer
from . import body as fields
from . import formats
from .body import Body
from .chat import text_of
from .limits import Limits
from .problems import unsupported, wrong

NUMBERS = (
    "temperature",
    "top_p",
    "top_k",
    "min_p",
    "repetition_penalty",
    "presence_penalty",
    "frequency_penalty",
    "xtc_probability",
    "xtc_threshold",
)
"""Fields that mean what the options of the same name mean."""
HARMLESS: dict[str, tuple[object, ...]] = {
    "adapters": (),
    "allowed_token_ids": (),
    "audio": (),
    "bad_words": ([],),
    "best_of": (1,),
    "chat_template": (),
    "documents": ([],),
    "dry_multiplier": (0,),
    "dynatemp_range": (0,),
    "frequency_context_size": (),
    "function_call": ("none", "auto"),
    "functions": ([],),
    "guided_choice": (),
    "guided_grammar": (),
    "guided_json": (),
    "guided_regex": (),
    "include_stop_str_in_output": (False,),
    "json_schema": (),
    "min_tokens": (0,),
    "mirostat": (0,),
    "modalities": (["text"],),
    "n_predict": (-1,),
    "presence_context_size": (),
    "repeat_penalty": (1,),
    "repetition_context_size": (),
    "role_mapping": (),
    "skip_special_tokens": (True,),
    "stop_token_ids": ([],),
    "suffix": ("",),
    "tool_choice": ("none", "auto"),
    "tools": ([],),
    "truncate_prompt_tokens": (),
    "typical_p": (1,),
    "use_beam_search": (False,),
    "web_search_options": (),
}
"""Fields that would change the answer and cannot here, with values that change nothing."""
SEEDS = 2**63


def options_of(
    body: Body, pair: Pair, options: Options, limits: Limits, *, drawn_seed: bool
) -> Options:
    """The options of a request. options: where it says nothing; drawn_seed: but for the seed, which
    is then drawn. Raises Problem, OptionError."""
    own: dict[str, Any] = {
        name: fields.number(name, body[name]) for name in NUMBERS if name in body
    }
    if "stop" in body:
        own["stop"] = (*options.stop, *_stops(fields.strings("stop", body["stop"]), limits))
    if "logit_bias" in body:
        own["logit_bias"] = _biases(fields.object_of(body, "logit_bias"), limits)
    seed = secrets.randbits(32) if drawn_seed else options.seed
    own["seed"] = fields.whole(body, "seed", seed, -SEEDS, SEEDS - 1)
    own |= _speculation(body.get("speculative", True))
    own |= formats.binding(pair, options, body, limits)
    # The prompt is token ids by now.
    return replace(options, system_prompt=None, chat_template_config={}, **own)


def ignores_eos(body: Body, options: Options) -> bool:
    """Whether what ends a text is not to end this one. Raises Problem."""
    asked = fields.truth(body, "ignore_eos")
    if asked and options.constraint is not None:
        raise wrong("ignore_eos cannot hold where a grammar says how the text ends", "ignore_eos")
    return asked


def _stops(given: list[str], limits: Limits) -> list[str]:
    if len(given) > limits.stops or any(len(each) > limits.stop_length for each in given):
        raise wrong(
            f"stop must be at most {limits.stops} strings of {limits.stop_length} characters",
            "stop",
        )
    return given


def _biases(given: Body, limits: Limits) -> dict[int, float]:
    if len(given) > limits.biases:
        raise wrong(f"logit_bias must have at most {limits.biases} entries", "logit_bias")
    if not all(name.isascii() and name.isdigit() and len(name) < 10 for name in given):
        raise wrong('logit_bias must look like {"42": -5}, with token ids', "logit_bias")
    return {int(name): fields.number("logit_bias", given[name]) for name in given}


def _speculation(given: object) -> dict[str, Any]:
    """The options that `speculative` asks for: true, false, or an object with max."""
    if isinstance(given, bool):
        return {} if given else {"regular": True}
    if not isinstance(given, dict):
        raise wrong('speculative must be true, false, or {"max": 4}', "speculative")
    for name in given:
        if name != "max":
            raise unsupported(f"speculative.{name}")
    if given.get("max") is None:
        return {}
    return {"num_draft": fields.whole(given, "max", 0, 0, MOST_DRAFTED)}


def expected_ids(body: Body, tokenizer: Tokenizer) -> tuple[int, ...]:
    """Token ids of what the client predicts. Raises Problem."""
    given = fields.object_of(body, "prediction")
    if not given:
        return ()
    if given.get("type") != "content":
        raise wrong('prediction must be {"type": "content", "content": ...}', "prediction")
    content = text_of(given.get("content"), "prediction")
    ids = tokenizer.encode(content) if content else []
    return tuple(id for id in ids if id not in tokenizer.special_ids)
