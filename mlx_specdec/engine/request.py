"""Requests, and their state while they are decoded."""

import functools
import math
import sys
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Self, cast

from ..decoding.sequence import Sequence as Decoded
from ..decoding.sequence import StopCriteria
from ..decoding.statistics import Recorder
from ..errors import DAMAGED, DecodingError, OptionError
from ..interfaces import NoiseSource, Progress, Proposer, Rule, Verdict
from ..interfaces.records import NO_TEXT, FinishReason, Labels, Result, Step
from ..models.base import check_prompt
from ..options import Options
from ..proposers.drafter import Drafter
from ..sampling.constraint import Constraint
from ..sampling.distribution import Distribution
from ..sampling.noise import CoupledNoise, IndependentNoise, SilentNoise
from ..sampling.thought_budget import ThoughtBudget
from ..text.chat import Messages, check_settings
from ..text.prompts import is_chat, prompt_ids
from ..text.stream import StopStrings, TextStream
from ..text.thoughts import Thoughts
from ..text.tokenizer import SENTINEL
from ..verification import rules
from .memory import Extent
from .pair import Pair

Prompt = str | Sequence[int] | Messages


@dataclass(frozen=True)
class Request:
    """A prompt with options of its own, for `stream_many` and `generate_many`.

    Attributes:
        prompt: A string, messages, or token ids; see `generate`.
        options: The settings of this completion.
        prediction: Token ids that the completion may turn out to have. They are drafted if
            requests come one by one.
        top_logprobs: The number of most likely tokens that each emission lists with their
            log-probabilities; None lists nothing.
        shown: The text of special tokens that are printed, by id.
        ignore_eos: Whether no token ends the completion.
        tenant: Whose earlier completions may be drafted from.
        answers: Whether the completion is an answer in a chat, whose first blank is not printed.
        thoughts: The thoughts before the first token and their budget, or None without thoughts.
        scores_prompt: Whether the first part has the log-probabilities of the prompt's tokens, for
            a decoder-only target. Such a request shares no pass, so that they are always the same.
        open_end: Whether the completion ends if the model does not continue a text that the grammar
            of the options accepts, although the grammar allows more text.
    """

    prompt: Prompt
    options: Options
    prediction: tuple[int, ...] = ()
    top_logprobs: int | None = None
    shown: Mapping[int, str] = field(default_factory=dict)
    ignore_eos: bool = False
    tenant: str = ""
    answers: bool = False
    thoughts: Thoughts | None = None
    scores_prompt: bool = False
    open_end: bool = False


@dataclass(frozen=True)
class Overrides:
    """A proposer that replaces those of the options. `timed` says whether some rounds are timed in
    parts. `progress` receives the number of prefilled prompt tokens."""

    proposer: Proposer | None = None
    timed: bool = False
    progress: Progress | None = None


HOTTEST_TRIAL = 1.0
"""Temperature above which a low acceptance rate is no sign of a wrong drafter. Neither is one under
a constraint."""


def proposer_kind(chosen: Sequence[Drafter]) -> str:
    """Return the name of the only drafter, "auto" for several drafters, or "none"."""
    names = [drafter.name for drafter in chosen]
    return "auto" if len(names) > 1 else "".join(names) or "none"


@dataclass(eq=False)
class Job:
    """The state of a request in the scheduler.

    Attributes:
        ids: The token ids of the prompt.
        reads_with: Equal for jobs whose prompts may be prefilled together.
        rule: Equal for jobs that may be decoded together.
        chosen: The drafters of all requests.
        began, read: The times on the clock, in seconds, when the prefill began and ended.
        drafting: The seconds that the drafters took in the prefill.
        behind: A job that this one waits for, since its prompt has a prefix in common.
            scores_prompt: See `Request`.
    """

    pair: Pair
    number: int
    options: Options
    ids: list[int]
    sequence: Decoded
    labels: Labels
    reads_with: object
    rule: object
    chosen: Sequence[Drafter]
    prediction: tuple[int, ...]
    tenant: str
    scores_prompt: bool = False
    recorder: Recorder = field(default_factory=Recorder)
    text: list[str] = field(default_factory=list)
    tokens: list[int] = field(default_factory=list)
    began: float = 0.0
    read: float = 0.0
    drafting: float = 0.0
    behind: Self | None = None

    @classmethod
    def of(
        cls,
        pair: Pair,
        number: int,
        request: Request,
        chosen: Sequence[Drafter],
        overrides: Overrides = Overrides(),
        shares: object = None,
    ) -> Self:
        """Create the job of a new request. Raises PromptError and OptionError.

        Args:
            chosen: The drafters.
            shares: Equal for jobs that may share passes, if their rules are equal too.
        """
        ids, bound, options = prepared(pair, request.prompt, request.options)
        longest = len(ids) + options.max_tokens
        pair, bound = pair.reaching(longest), bound.reaching(longest)
        if request.ignore_eos:
            bound = replace(bound, eos_token_ids=frozenset())
        prefix = beginning(bound, ids, options)
        grammar, bias = options.constraint, options.logit_bias
        constraint = bound.constraint(grammar, bias, open_end=request.open_end)
        most = bound.target.max_length
        room = sys.maxsize if most is None else most - len(prefix)
        chat = is_chat(bound.tokenizer, request.prompt, chat_template=options.chat_template)
        # With a grammar, the output begins as the grammar demands, and not with a blank.
        starts = request.answers or chat or constraint is not None
        drafting = chosen if most_drafted(options) > 0 else ()
        proposer = overrides.proposer
        labels = Labels(
            model=pair.name,
            draft_model=pair.draft_name if any(drafter.identity for drafter in drafting) else None,
            proposer=proposer_kind(drafting) if proposer is None else type(proposer).__name__,
            rule=options.rule_name,
            lossy=options.lossy,
            delta=options.delta,
            seed=options.seed,
            num_draft=options.num_draft if drafting or proposer is not None else 0,
            prompt_tokens=len(ids),
            exact=options.exact,
        )
        shown = special_texts(pair) if options.show_special_tokens else {}
        if not shown and sentinels(pair, ids):
            # Without sentinels, the answer to a prompt with sentinels is useless.
            shown = sentinels(pair, pair.tokenizer.special_ids)
        stop = StopCriteria(
            # EOS does not end a completion that only measures speed.
            eos=bound.eos_token_ids,
            remaining=min(options.max_tokens, room),
            stream=TextStream(
                bound.tokenizer, {**shown, **request.shown}, () if starts else prefix
            ),
            stops=StopStrings(tuple(options.stop)),
        )
        closing: Constraint | ThoughtBudget | None = constraint
        if request.thoughts is not None and request.thoughts.budget is not None:
            closing = ThoughtBudget(request.thoughts, bound.vocabulary, constraint)
        distribution = Distribution(options, bound.vocabulary, ids, closing, len(prefix))
        noise = make_noise(bound, ids, options)
        rule = rule_name(options), options.delta
        models = pair.target, pair.draft
        alike = replace(options, seed=0, max_tokens=1, stop=())
        return cls(
            *(pair, number, options, ids),
            sequence=Decoded(prefix, distribution, noise, stop, request.top_logprobs),
            labels=labels,
            reads_with=(alike, request.prediction, request.tenant, shares, models),
            rule=(*rule, options.posterior_threshold, options.posterior_alpha, shares, models),
            chosen=chosen,
            prediction=tuple(id for id in request.prediction if 0 <= id < pair.vocabulary),
            tenant=request.tenant,
            scores_prompt=request.scores_prompt,
        )

    @property
    def extent(self) -> Extent:
        now = len(self.sequence.committed)
        return Extent(len(self.ids), now, now + self.sequence.remaining)

    def report(self, step: Step, clock: Callable[[], float]) -> Step:
        """Return a step with its number, and with the result if it is the last one. The clock
        returns seconds."""
        self.tokens += step.tokens
        step = self._with_sentinels(step)
        self.text.append(step.text)
        scored, self.sequence.prompt_logprobs = tuple(self.sequence.prompt_logprobs), []
        proposer = step.proposer or self.labels.proposer if step.drafted else ""
        step = replace(step, number=self.number, proposer=proposer, prompt_logprobs=scored)
        if not self.sequence.ended:
            return step
        try:
            return replace(step, result=self._result(step.finish_reason, clock()))
        except DecodingError as problem:
            return replace(step, error=str(problem))

    def _with_sentinels(self, step: Step) -> Step:
        """Add sentinel tokens to the last step if the completion would be blank without them.
        Completions with stop strings stay as they are, since those have been searched already."""
        if not self.sequence.ended or self.options.stop:
            return step
        if any(text.strip() for text in [*self.text, step.text]):
            return step
        texts = sentinels(self.pair, self.tokens)
        rest = "".join(texts[token] for token in self.tokens if token in texts)
        return replace(step, text=step.text + rest)

    def _result(self, reason: FinishReason | None, now: float) -> Result:
        if reason is None or reason in NO_TEXT:
            raise DecodingError(NO_TEXT.get(reason, DAMAGED))
        options = self.options
        if options.constraint is None and options.temperature <= HOTTEST_TRIAL:
            for caution in self.pair.cautions(self.chosen, self.recorder.drafts):
                warnings.warn(caution, RuntimeWarning, stacklevel=7)
        read = self.read or now  # an interrupt may come before the prompt was read
        load, prompt, decoding = self.pair.load_seconds, read - self.began, now - read
        stats = self.recorder.summary(
            load=load, prompt=prompt, decoding=decoding, prompt_draft=self.drafting
        )
        return Result("".join(self.text), tuple(self.tokens), reason, self.labels, stats)


def special_texts(pair: Pair) -> dict[int, str]:
    """Return the strings of special tokens by id, without EOS and padding tokens."""
    pieces, ends = pair.tokenizer.pieces(), {*pair.eos_token_ids, *pair.tokenizer.eos_token_ids}
    named = ((id, pieces[id] or "") for id in pair.tokenizer.special_ids - ends)
    return {id: piece for id, piece in named if piece and "pad" not in piece.lower()}


def sentinels(pair: Pair, ids: Iterable[int]) -> dict[int, str]:
    """Return the strings of the sentinel tokens among `ids`, which stand for gaps, by id."""
    pieces = pair.tokenizer.pieces()
    named = ((id, pieces[id] or "") for id in pair.tokenizer.special_ids.intersection(ids))
    return {id: piece for id, piece in named if SENTINEL.fullmatch(piece)}


def most_drafted(options: Options) -> int:
    """Return the maximum number of draft tokens of a sequence in a round."""
    if options.regular or options.proposer == "none":
        return 0
    return sys.maxsize if options.num_draft == "auto" else options.num_draft


RULE_FUNCTIONS: Mapping[str, Callable[..., Verdict]] = {
    "coupled": rules.coupled,
    "lenient": rules.lenient_greedy,
    "token": rules.token,
    "block": rules.block,
    "typical": rules.typical,
}
"""Name of a rule -> its function. `typical` becomes an `interfaces.Rule` with two thresholds."""


def rule_name(options: Options) -> str:
    """Return the name, in RULE_FUNCTIONS, of the rule that decides. At temperature 0, all exact
    rules are one rule."""
    exact = options.rule_name in ("coupled", "token", "block")
    return "coupled" if exact and options.temperature == 0 else options.rule_name


def make_rule(options: Options) -> Rule:
    """Return the rule of the options."""
    rule = RULE_FUNCTIONS[rule_name(options)]
    if rule is rules.typical:
        epsilon, alpha = options.posterior_threshold, options.posterior_alpha
        return functools.partial(rule, epsilon=epsilon, alpha=alpha)
    return rule


def make_noise(pair: Pair, prompt: Sequence[int], options: Options) -> NoiseSource:
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
    pair.constraint(options.constraint, options.logit_bias)
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
    return prompt_ids(
        pair.tokenizer,
        prompt,
        chat_template=options.chat_template,
        system_prompt=options.system_prompt,
        chat_settings=options.chat_template_config,
    )


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
