"""The settings of one text, checked together before any model is loaded. This module imports no
MLX, so that a wrong setting is reported at once."""

from __future__ import annotations  # the checks below read types as words

import math
import operator
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, fields
from functools import cached_property
from numbers import Real
from typing import Any, Literal, cast

from ..errors import OptionError
from ..models.drafters import DRAFTER_KINDS
from .grammar import Grammar, compiled, schema_text

PROPOSERS = ("ngram", "draft", *DRAFTER_KINDS, "medusa")
RULES = ("coupled", "token", "block", "typical")
MOST_DRAFTED = 64
MOST_EXACT = 4
"""Most draft tokens of a round with `Options.exact`. Metal's kernels sum in one order in passes
of 2 to 5 rows, and in another order in larger passes. A model may allow fewer; see ExactPasses."""
LARGEST_BIAS = 1e20
"""Largest magnitude of a bias or penalty. It exceeds any logit, and sums of it fit float32."""
TEMPERATURE_LIMITS = (1e-30, 1e30)
"""Least and greatest temperature above 0, both well inside the range of float32."""
LEAST_TOP_P = 1e-30
"""Least value of top-p, well above the smallest float32."""
REPETITION_PENALTIES = (1e-6, 1e6)
"""Least and greatest repetition penalty."""


def mtp_of(draft_model: object) -> str | None:
    """Return the repository from which a draft of this name takes layers for multi-token
    prediction: "" for "mtp", which means the target's original, R for "mtp:R", None for any other
    draft."""
    kind, _, repository = str(draft_model).partition(":")
    return repository if kind == "mtp" else None


def proposers() -> tuple[str, ...]:
    """Return the names that `Options.proposer` may have."""
    return ("auto", *PROPOSERS, "none")


@dataclass(frozen=True)
class Options:
    """Settings of one completion. With the defaults it is the target's own greedy text.

    Attributes:
        max_tokens: The most tokens to generate; 0 is valid.
        num_draft: The draft tokens of a round, 0 to 64, or "auto", which learns the number from
            what rounds cost and bring on this machine. Since it follows the clock, a seed's text
            repeats under the rules token, block and typical only with a number.
        proposer: The drafter: "draft" (a draft model), "ngram" (prompt lookup), "medusa" (heads), a
            hidden-state drafter by its kind ("dspark", "dflash2", "dflash", "peagle", "eagle3",
            "mtp", "eagle", "gemma4_assistant"), "none", or "auto". "auto" is lookup, and a drafter
            with weights if lookup finds nothing. Of several it takes the best by measurement, or
            the first if `num_draft` is a number. None is auto; if `num_draft` is a number, lookup
            drafts only if nothing else does.
        ngram_min: The tokens of the shortest match of lookup; None takes 2, or 4 before another
            drafter.
        ngram_choice: The continuation that lookup takes: "recent" or "frequent".
        rule: The acceptance rule: "coupled", "token", "block", or "typical" (lossy). None takes
            coupled, or token if `delta` needs it.
        delta: The lenience in [0, 1]; above 0 the text is no longer the target's own (lossy).
        posterior_threshold, posterior_alpha: Settings of the typical rule, (0, 1) each. It accepts
            a draft token if p > min(threshold, alpha * exp(-entropy)).
        seed: The seed of all random numbers of the completion.
        stop: Strings that end the text, or a single one; the text does not contain them.
        json_schema: A JSON schema that the whole text fulfils, as an object or as its JSON. Of this
            and the next two, one may be given. Only `max_tokens` and `stop` cut such a text.
        regex: A regular expression that the whole text matches.
        grammar: A grammar that the whole text matches, in llguidance's variant of Lark.
        extra_eos_token: Tokens, or their ids, that end the text in addition to the model's own.
        show_special_tokens: Whether the output includes special tokens, except for those that end
            or pad it. If False, it includes sentinels such as <extra_id_0> if the prompt has one,
            or if an output without stop strings would be blank without them.
        exact: Compute each position with the same bits whatever was drafted. Half precision on a
            GPU needs it for equal outputs. Rounds then have at most 4 draft tokens, with MKL on a
            CPU at most 2. A pass has one sequence, and only whole chunks of prompts are cached.
        regular: Decode plainly, without a proposer.
        cost_cache: Begin with the costs that earlier runs have saved on this machine, and save
            the costs of this run, if `num_draft` is "auto".
        chat_template: Apply the chat template if the model has one, or the task prefix of a T5.
        system_prompt: The message that the chat template puts first.
        chat_template_config: More variables of the chat template, by name.
        target_lang, source_lang: The languages of a translation model by its own codes: the one to
            translate into, and the one of the prompt, if the model needs it.
        prefill_step_size: The prompt tokens of one pass. None takes 512, or 2,048 on a GPU with
            memory for it if the model's attention is fused there.
        temperature: 0 decodes greedily; otherwise from 1e-30 to 1e30.
        top_k: Sample from this many of the most likely tokens; 0 for all.
        top_p: Sample from the most likely tokens with this total probability; 1 for all.
        min_p: Sample from tokens with at least this share of the largest probability; 0 for all.
        repetition_penalty: For tokens in the prompt and in the completion so far, divide positive
            logits by this number and multiply negative ones by it; 1 changes nothing. The prompt of
            an encoder-decoder model does not count.
        presence_penalty: Subtract this from the logit of every token in the completion so far.
        frequency_penalty: Subtract this from a token's logit for each time that it occurs in the
            completion so far.
        logit_bias: The numbers that are added to the logits of single tokens, by id; -inf bans.
        xtc_probability: The probability in [0, 1] of excluding the top choices of a position.
        xtc_threshold: The probability in [0, 0.5] above which a token is a top choice.
        xtc_special_tokens: The ids that are never excluded; None takes line ends and EOS tokens.

    Raises:
        OptionError: A value is out of range, or two settings contradict each other.

    Example:
        Options(max_tokens=200, temperature=0.7, top_p=0.9, seed=1, stop="###")
    """

    max_tokens: int = 100
    num_draft: int | Literal["auto"] = "auto"
    proposer: str | None = None
    ngram_min: int | None = None
    ngram_choice: str = "recent"
    rule: str | None = None
    delta: float = 0.0
    posterior_threshold: float = 0.09
    posterior_alpha: float = 0.3
    seed: int = 0
    stop: str | Iterable[str] = ()
    json_schema: str | Mapping[str, Any] | None = None
    regex: str | None = None
    grammar: str | None = None
    extra_eos_token: str | int | Iterable[str | int] = ()
    show_special_tokens: bool = False
    exact: bool = False
    regular: bool = False
    cost_cache: bool = True
    chat_template: bool = True
    system_prompt: str | None = None
    chat_template_config: Mapping[str, Any] = field(default_factory=dict)
    target_lang: str | None = None
    source_lang: str | None = None
    prefill_step_size: int | None = None
    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: Mapping[int, float] = field(default_factory=dict)
    xtc_probability: float = 0.0
    xtc_threshold: float = 0.1
    xtc_special_tokens: tuple[int, ...] | None = None

    def __post_init__(self) -> None:
        self._normalize()
        self._check_ranges()
        if self.delta > 0 and self.rule not in (None, "token"):
            raise OptionError(
                f"rule {self.rule} has no lenience: leave out --rule, or set delta to 0"
            )
        if self.exact and self.num_draft != "auto" and self.num_draft > MOST_EXACT:
            raise OptionError(
                f"exact allows at most {MOST_EXACT} draft tokens a round, not {self.num_draft}: "
                "lower num-draft, or leave out exact"
            )
        if any(not text for text in self.stop):
            raise OptionError("a stop string must not be empty")
        if not self.chat_template and (self.chat_template_config or self.system_prompt is not None):
            raise OptionError(
                "system-prompt and chat-template-config are for the chat template: leave out "
                "no-chat-template"
            )
        _ = self.constraint

    def _check(self, name: str, holds: bool, what: str) -> None:
        if not holds:
            shown = name.replace("_", "-")
            raise OptionError(f"{shown} must {what}, not {getattr(self, name)!r:.80}")

    def _check_ranges(self) -> None:
        count, least, step = self.num_draft, self.ngram_min, self.prefill_step_size
        coldest, hottest = TEMPERATURE_LIMITS
        weakest, strongest = REPETITION_PENALTIES
        warm = self.temperature == 0 or coldest <= self.temperature <= hottest
        drafted = count == "auto" or 0 <= count <= MOST_DRAFTED
        penalty = weakest <= self.repetition_penalty <= strongest
        small, names = f"be at most {LARGEST_BIAS:g} in size", proposers()
        for name, holds, what in (
            ("max_tokens", self.max_tokens >= 0, "be 0 or more"),
            ("num_draft", drafted, f"be auto or lie between 0 and {MOST_DRAFTED}"),
            ("proposer", self.proposer in (None, *names), f"be one of {', '.join(names)}"),
            ("ngram_min", least is None or least >= 1, "be 1 or more"),
            ("ngram_choice", self.ngram_choice in ("recent", "frequent"), "be recent or frequent"),
            ("delta", 0 <= self.delta <= 1, "lie in [0, 1]"),
            ("rule", self.rule in (None, *RULES), f"be one of {', '.join(RULES)}"),
            ("posterior_threshold", 0 < self.posterior_threshold < 1, "lie between 0 and 1"),
            ("posterior_alpha", 0 < self.posterior_alpha < 1, "lie between 0 and 1"),
            ("prefill_step_size", step is None or step >= 1, "be 1 or more"),
            ("temperature", warm, f"be 0 or lie between {coldest:g} and {hottest:g}"),
            ("top_k", self.top_k >= 0, "be 0 (off) or more"),
            ("top_p", LEAST_TOP_P <= self.top_p <= 1, f"lie in [{LEAST_TOP_P:g}, 1]"),
            ("min_p", 0 <= self.min_p <= 1, "lie in [0, 1]"),
            ("repetition_penalty", penalty, f"lie between {weakest:g} and {strongest:g}"),
            ("presence_penalty", abs(self.presence_penalty) <= LARGEST_BIAS, small),
            ("frequency_penalty", abs(self.frequency_penalty) <= LARGEST_BIAS, small),
            ("xtc_probability", 0 <= self.xtc_probability <= 1, "lie in [0, 1]"),
            ("xtc_threshold", 0 <= self.xtc_threshold <= 0.5, "lie in [0, 0.5]"),
        ):
            self._check(name, holds, what)
        for token, bias in self.logit_bias.items():
            if token < 0 or not (abs(bias) <= LARGEST_BIAS or bias == -math.inf):
                raise OptionError(
                    f"logit-bias {token}={bias} is not usable: give a token id and a number of at "
                    f"most {LARGEST_BIAS:g} in size, or -inf"
                )

    def _normalize(self) -> None:
        """Check types. Convert numbers of numpy to Python's, one stop string to a tuple; copy the
        biases."""
        taken: dict[str, object] = {}
        for one in fields(self):
            name, value, kind = one.name.replace("_", "-"), getattr(self, one.name), str(one.type)
            if kind == "float":
                taken[one.name] = number(name, value)
            elif kind == "int" or (kind.startswith("int") and value != one.default):
                taken[one.name] = integer(name, value)
            elif kind == "bool":
                self._check(one.name, value in (True, False), "be bool")
            elif kind == "str | None":
                self._check(one.name, isinstance(value, str | None), "be a string")
            elif kind.startswith("Mapping"):
                is_map = isinstance(value, Mapping)
                self._check(one.name, is_map, "map names or token ids to values")
        stops = [self.stop] if isinstance(self.stop, str | bytes) else self.stop
        several = isinstance(stops, Iterable) and all(isinstance(text, str) for text in stops)
        self._check("stop", several, "be a string or several")
        taken["stop"] = tuple(stops)
        taken["chat_template_config"] = dict(self.chat_template_config)
        taken["logit_bias"] = {
            integer("a token id of logit-bias", token): number("logit-bias", bias)
            for token, bias in self.logit_bias.items()
        }
        if (ids := self.xtc_special_tokens) is not None:
            self._check("xtc_special_tokens", isinstance(ids, Iterable), "be token ids")
            what = "a token id of xtc-special-tokens"
            taken["xtc_special_tokens"] = tuple(integer(what, token) for token in ids)
        extra = self.extra_eos_token
        if isinstance(extra, str) or not isinstance(extra, Iterable):
            extra = (extra,)
        taken["extra_eos_token"] = tuple(extra)
        if self.json_schema is not None:
            taken["json_schema"] = schema_text(self.json_schema)
        for name, value in taken.items():
            object.__setattr__(self, name, value)

    @cached_property
    def constraint(self) -> Grammar | None:
        """The grammar of the text, for core.constraint.Alphabet. It is compiled once for as long as
        these options are used."""
        schema = cast(str | None, self.json_schema)
        return compiled(schema, self.regex, self.grammar)

    @property
    def kind(self) -> tuple[object, ...]:
        """The settings from `temperature` on. Equal kinds map equal logits to equal
        distributions."""
        names = list(self.__dataclass_fields__)
        return tuple(getattr(self, name) for name in names[names.index("temperature") :])

    @property
    def filters(self) -> bool:
        """Whether top-k, top-p or min-p may remove tokens; at temperature 0 they have no effect."""
        return self.temperature > 0 and (self.top_k > 0 or self.top_p < 1 or self.min_p > 0)

    @property
    def lossy(self) -> bool:
        """Whether the text may differ in distribution from the target's own."""
        return self.delta > 0 or self.rule == "typical"

    @property
    def rule_name(self) -> str:
        """The name of the rule: one of RULES, or lenient (delta > 0 at temperature 0)."""
        if self.delta > 0:
            return "token" if self.temperature > 0 else "lenient"
        return self.rule or "coupled"


def integer(name: str, value: object) -> int:
    """Convert an integer of Python or numpy to int. Raises OptionError for any other value."""
    try:
        return operator.index(value)  # type: ignore[arg-type]
    except TypeError:
        raise OptionError(f"{name} must be a whole number, not {value!r}") from None


def number(name: str, value: object) -> float:
    """Convert a real number of Python or numpy to float. Raises OptionError for other values."""
    if not isinstance(value, Real):
        raise OptionError(f"{name} must be a number, not {value!r}")
    try:
        return float(value)
    except OverflowError:
        raise OptionError(f"{name} is too large for a number with a fraction") from None
