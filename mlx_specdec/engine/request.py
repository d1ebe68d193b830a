"""Requests, and their state while they are decoded."""

import functools
import math
import warnings
from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import cast

from ..core import rules
from ..core.noise import CoupledNoise, IndependentNoise, SilentNoise
from ..core.options import Options
from ..core.row import Prompt, Row
from ..core.statistics import summary
from ..errors import DAMAGED, OptionError
from ..models.base import check_prompt
from ..results import NO_TEXT, Result, Step
from ..text.chat import check_settings
from ..text.messages import ChatFormat, Way
from ..text.prompts import prompt_ids
from ..text.tokenizer import SENTINEL
from ..types import Rule
from .memory import Extent
from .pair import Pair


def extent(row: Row) -> Extent:
    """Return the numbers of tokens of a row."""
    return Extent(len(row.prompt), len(row.committed), len(row.committed) + row.remaining)


def reported(pair: Pair, row: Row, step: Step, now: float) -> Step:
    """Return a step of a row as the caller sees it, with the result if it is the last one.
    now: The time on the clock, in seconds."""
    row.tokens += step.tokens
    if row.ended and not row.options.stop and not (row.text + step.text).strip():
        # Sentinel tokens are added to a completion that would be blank without them. Completions
        # with stop strings stay as they are, since those have been searched already.
        texts = sentinels(pair, row.tokens)
        rest = "".join(texts[token] for token in row.tokens if token in texts)
        step = replace(step, text=step.text + rest)
    row.text += step.text
    scored, row.prompt_logprobs = tuple(row.prompt_logprobs), []
    proposer = step.proposer or row.labels.proposer if step.drafted else ""
    step = replace(step, proposer=proposer, prompt_logprobs=scored)
    if not row.ended:
        return step
    if step.finish_reason is None or step.finish_reason in NO_TEXT:
        return replace(step, error=NO_TEXT.get(step.finish_reason, DAMAGED))
    prefilled = row.prefilled or now  # an interrupt may come before
    times = {"prompt": prefilled - row.began, "decoding": now - prefilled}
    stats = summary(row.rounds, load=pair.load_seconds, **times, prompt_draft=row.drafting)
    result = Result(row.text, tuple(row.tokens), step.finish_reason, row.labels, stats)
    return replace(step, result=result)


def special_texts(pair: Pair) -> dict[int, str]:
    """Return the strings of special tokens by id, without EOS and padding tokens."""
    pieces, ends = pair.tokenizer.pieces, {*pair.eos_token_ids, *pair.tokenizer.eos_token_ids}
    named = ((id, pieces[id] or "") for id in pair.tokenizer.special_ids - ends)
    return {id: piece for id, piece in named if piece and "pad" not in piece.lower()}


def shown_texts(pair: Pair, ids: Sequence[int], options: Options) -> dict[int, str]:
    """Return the strings of the special tokens that the output of a prompt with these ids
    includes, by id."""
    shown = special_texts(pair) if options.show_special_tokens else {}
    if not shown and sentinels(pair, ids):
        # Without sentinels, the answer to a prompt with sentinels is useless.
        shown = sentinels(pair, pair.tokenizer.special_ids)
    return shown


def sentinels(pair: Pair, ids: Iterable[int]) -> dict[int, str]:
    """Return the strings of the sentinel tokens among `ids`, which stand for gaps, by id."""
    pieces, special = pair.tokenizer.pieces, pair.tokenizer.special_ids.intersection(ids)
    return {id: piece for id in special if SENTINEL.fullmatch(piece := pieces[id] or "")}


def rule_name(options: Options) -> str:
    """Return the name of the rule function that decides. At temperature 0, all exact rules are one
    rule."""
    exact = options.rule_name in ("coupled", "token", "block")
    return "coupled" if exact and options.temperature == 0 else options.rule_name


def make_rule(options: Options) -> Rule:
    """Return the rule of the options."""
    if options.rule == "typical":
        epsilon, alpha = options.posterior_threshold, options.posterior_alpha
        return functools.partial(rules.typical, epsilon=epsilon, alpha=alpha)
    rule: Rule = getattr(rules, rule_name(options))
    return rule


def make_noise(pair: Pair, prompt: Sequence[int], options: Options) -> SilentNoise:
    """Return the random numbers with which a completion is sampled. `prompt` holds token ids."""
    if options.temperature == 0:
        return SilentNoise()
    if options.rule_name == "coupled":
        return CoupledNoise(options.seed, pair.vocabulary, prompt)
    return IndependentNoise(options.seed, pair.vocabulary, prompt)


def prepared(pair: Pair, prompt: Prompt, options: Options) -> tuple[list[int], Pair, Options]:
    """Return the token ids of a prompt, then the pair and the options as `for_model` returns them.
    Warns if the prompt is longer than the model was trained for. Raises PromptError and
    OptionError."""
    pair, options = for_model(pair, options)
    ids = encode(pair, prompt, options)
    check_prompt(ids, pair.target.source_vocabulary or pair.vocabulary, pair.target.max_length)
    if caution := pair.target.caution(len(ids)):
        warnings.warn(caution, stacklevel=6)
    return ids, pair, options


def for_model(pair: Pair, options: Options) -> tuple[Pair, Options]:
    """Return the pair with the options' additional EOS tokens, and the options with defaults that
    depend on the model. Raises OptionError if the options do not suit the model."""
    check_settings(options.chat_template_config)
    templated = options.system_prompt is not None or options.chat_template_config
    if templated and not pair.tokenizer.has_chat_template:
        raise OptionError(
            "system-prompt and chat-template-config are for a chat template, and this model has "
            "none: leave them out"
        )
    beyond = max(options.logit_bias, default=0)
    if beyond >= pair.vocabulary:
        raise OptionError(
            f"logit-bias: there is no token {beyond}, the model has {pair.vocabulary:,} tokens"
        )
    if sum(bias == -math.inf for bias in options.logit_bias.values()) >= pair.vocabulary:
        raise OptionError("logit-bias bans every token: leave one that may be written")
    if extra := cast(tuple[str | int, ...], options.extra_eos_token):
        ids, ends = pair.tokenizer.ids, set()
        for token in map(str, extra):
            id = int(token) if token.isascii() and token.isdigit() else ids.get(token, -1)
            if not 0 <= id < pair.vocabulary:
                raise OptionError(f"extra-eos-token: the model has no token {token!r:.80}")
            ends.add(id)
        pair = replace(pair, eos_token_ids=pair.eos_token_ids | ends)
    pair.constraint(options)
    if options.xtc_probability > 0 and options.xtc_special_tokens is None:
        # As in mlx-lm, XTC excludes neither line ends nor tokens that end a text.
        special = {*pair.tokenizer.encode("\n"), *pair.eos_token_ids}
        options = replace(options, xtc_special_tokens=tuple(sorted(special)))
    return pair, options


def encode(pair: Pair, prompt: Prompt, options: Options) -> list[int]:
    """Return the token ids of a prompt; see `text.prompts.prompt_ids`."""
    if isinstance(prompt, str) and prompt.strip():
        prompt = missing_prefix(pair, prompt, options) + prompt
        if pair.languages is not None:
            return pair.languages.source(prompt, pair.tokenizer.encode, *_languages(pair, options))
    chat = options.chat_template, options.system_prompt, options.chat_template_config
    return prompt_ids(pair.tokenizer, prompt, *chat)


def beginning(pair: Pair, ids: Sequence[int], options: Options) -> list[int]:
    """Return the committed tokens before the first generated one, of a prompt with these ids. They
    may name the target language. Raises OptionError if the target does not have it."""
    prefix, target = pair.target.prefix(ids), _languages(pair, options)[1]
    return prefix if pair.languages is None else pair.languages.prefix(prefix, target)


def _languages(pair: Pair, options: Options) -> tuple[str | None, str | None]:
    """Return the codes of source and target language. Raises OptionError if one is unusable."""
    languages, target, source = pair.languages, options.target_lang, options.source_lang
    if languages is None:
        for name, language in (("target-lang", target), ("source-lang", source)):
            if language is not None:
                raise OptionError(
                    f"{name} is for translation models that name their languages, and this model "
                    "names none: leave it out"
                )
        return None, None
    if target is None and languages.required:
        raise OptionError(
            "target-lang must be given, the language that the model is to translate into: "
            + ", ".join(sorted(languages.known))
        )
    return languages.find("source-lang", source), languages.find("target-lang", target)


def missing_prefix(pair: Pair, prompt: str, options: Options) -> str:
    """Return the task prefix of the target's config.json if the prompt lacks it, else ""."""
    wanted = options.chat_template and not prompt.startswith(pair.task_prefix.rstrip())
    return pair.task_prefix if wanted else ""


def chat_format(pair: Pair, options: Options) -> ChatFormat:
    """Return the format in which the target model reads messages.

    Args:
        pair: The loaded models.
        options: Whether the chat template is used, its variables, and the system prompt.
    """
    way: Way = "role prefixes"
    if pair.target.kind == "encoder-decoder":
        way = "single user message"
    elif options.chat_template and pair.tokenizer.has_chat_template:
        way = "template"
    settings = options.system_prompt, options.chat_template_config
    return ChatFormat(pair.tokenizer, way, lambda text: encode(pair, text, options), *settings)
