"""What is asked of a pair: prompts and options, checked and filled in before decoding begins."""

from __future__ import annotations

import math
import warnings
from collections.abc import Sequence
from dataclasses import replace
from typing import cast

from ..errors import OptionError
from ..models.base import check_prompt
from ..options import Options
from ..text.chat import Messages, check_settings
from ..text.prompts import prompt_ids
from .pair import Pair


def prepared(
    pair: Pair, prompt: str | Sequence[int] | Messages, options: Options
) -> tuple[list[int], Pair, Options]:
    """Token ids of a prompt, and pair and options with what its options ask of the model.

    Warns of a prompt that is longer than the model has learned. Raises PromptError, for ids that
    tokenizer and model do not both know as well, and OptionError.
    """
    pair, options = for_model(pair, options)
    ids = encode(pair, prompt, options)
    check_prompt(ids, pair.vocabulary, pair.target.max_length)
    if caution := pair.target.caution(len(ids)):
        warnings.warn(caution, stacklevel=3)
    return ids, pair, options


def checked_options(options: Options | None) -> Options:
    """The defaults for None. Raises OptionError for what are no Options."""
    if options is None:
        return Options()
    if not isinstance(options, Options):
        raise OptionError(f"options must be made by Options(...), not be {options!r:.80}")
    return options


def for_model(pair: Pair, options: Options) -> tuple[Pair, Options]:
    """Pair and options with what the options ask of the model, whatever the prompt.

    Raises OptionError for what the model does not have.
    """
    _check_chat(pair, options)
    _check_bias(pair, options)
    pair = _with_extra_eos(pair, options)
    pair.constraint(options.constraint, options.logit_bias)
    return pair, _with_special_tokens(pair, options)


def encode(pair: Pair, prompt: str | Sequence[int] | Messages, options: Options) -> list[int]:
    """Token ids of a prompt; see `text.prompt_ids`."""
    if isinstance(prompt, str) and prompt.strip():
        prompt = missing_prefix(pair, prompt, options) + prompt
    return prompt_ids(
        pair.tokenizer,
        prompt,
        chat_template=options.chat_template,
        system_prompt=options.system_prompt,
        chat_settings=options.chat_template_config,
    )


def missing_prefix(pair: Pair, prompt: str, options: Options) -> str:
    """What `encode` puts before a prompt that lacks the task's prefix which the target's
    config.json asks for; mostly nothing."""
    wanted = options.chat_template and not prompt.startswith(pair.task_prefix.rstrip())
    return pair.task_prefix if wanted else ""


def _check_chat(pair: Pair, options: Options) -> None:
    """Raises OptionError for settings of a chat template that none takes."""
    check_settings(options.chat_template_config)
    asked = options.system_prompt is not None or options.chat_template_config
    if asked and not pair.tokenizer.has_chat_template:
        raise OptionError(
            "system-prompt and chat-template-config are for a chat template, and this model has "
            "none: leave them out"
        )


def _with_extra_eos(pair: Pair, options: Options) -> Pair:
    """Raises OptionError for a token that the model does not have."""
    if not options.extra_eos_token:
        return pair
    ids = {piece: id for id, piece in enumerate(pair.tokenizer.pieces())}
    extra = set()
    for token in map(str, cast(tuple[str | int, ...], options.extra_eos_token)):
        id = int(token) if token.isascii() and token.isdigit() else ids.get(token, -1)
        if not 0 <= id < pair.vocabulary:
            raise OptionError(f"extra-eos-token: the model has no token {token!r:.80}")
        extra.add(id)
    return replace(pair, eos_token_ids=pair.eos_token_ids | extra)


def _with_special_tokens(pair: Pair, options: Options) -> Options:
    """As mlx-lm has it, XTC excludes neither line ends nor what ends a text."""
    if options.xtc_probability == 0 or options.xtc_special_tokens is not None:
        return options
    special = {*pair.tokenizer.encode("\n"), *pair.eos_token_ids}
    return replace(options, xtc_special_tokens=tuple(sorted(special)))


def _check_bias(pair: Pair, options: Options) -> None:
    """Raises OptionError where every token is banned, and for ids that texts do not have."""
    beyond = max(options.logit_bias, default=0)
    if beyond >= pair.vocabulary:
        raise OptionError(
            f"logit-bias: there is no token {beyond}, the model has {pair.vocabulary:,} tokens"
        )
    banned = sum(bias == -math.inf for bias in options.logit_bias.values())
    if banned >= pair.vocabulary:
        raise OptionError("logit-bias bans every token: leave one that may be written")
