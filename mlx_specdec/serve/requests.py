"""The way from the internal request to requests to the engine: prompts, options and limits."""

import functools
import json
import math
import secrets
from abc import abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Any, Self, cast

from ..core.options import Options
from ..core.row import Request
from ..engine.memory import MemoryBudget
from ..engine.pair import Pair
from ..engine.request import beginning, chat_format, encode, prepared
from ..errors import PromptError
from ..text.markers import Markers, markers_of
from ..text.messages import in_order, messages_of, with_tools_in_message, without_volatile
from ..text.prompts import Infill, infill_of
from ..text.thoughts import Thoughts
from .engine import CONNECTIONS
from .events import ChannelReader, Reader
from .fields import Body, Boolean
from .internal import Chat, Sampled, Speculative, Thought, Wanted, checked, constrained
from .problems import beyond, invalid, too_long, unsupported
from .shared_bodies import SWITCHES
from .stored import StoredResponses

PLAIN = {one.name for one in fields(Options)} & Sampled.model_fields.keys() - {"stop", "logit_bias"}
"""Fields with the meaning and the values of the option of the same name."""
NO_PENALTIES = {"presence_penalty": 0.0, "frequency_penalty": 0.0, "repetition_penalty": 1.0}
MOST_CHARACTERS_PER_TOKEN = 32
"""Largest number of characters of a prompt per token of the context; usual texts have 3 to 5. A
longer prompt is refused before tokenization, which takes a second per million characters."""
USUAL_CHARACTERS = 4
"""Characters per token of usual texts, for the number of tokens in an error message."""
ENDLESS = 4096
"""Context, in tokens, of a model without a maximum position. The cost of such a model grows with
the square of the length."""


@dataclass(frozen=True)
class Prepared:
    """A client's request after all checks.

    Attributes:
        requests: The engine's requests, one for each completion, prompt by prompt.
        prompt_tokens: Number of tokens of all prompts, counting each prompt once.
        reader: Returns a new reader for the text of a completion.
    """

    requests: Sequence[Request]
    prompt_tokens: int
    reader: Callable[[], Reader] = Reader


@dataclass(frozen=True)
class Facts:
    """The facts of a model that clients may know, also if it is not in memory.

    Attributes:
        longest: See `LoadedModel.longest`; 0 before the model is loaded for the first time.
        capabilities: The abilities of the model, in ollama's words.
        chats: Whether the model has a chat template.
        family: The name of the architecture's module, such as "llama".
        dtype: The number format in words.
    """

    longest: int = 0
    capabilities: tuple[str, ...] = ("completion",)
    chats: bool = False
    family: str = ""
    dtype: str = ""


@dataclass(frozen=True)
class ServiceSettings:
    """How requests are read and answered, and how much one of them may take, so that no request can
    stop the others.

    Attributes:
        context: Tokens of a prompt and its completion together, or None for the model's context.
        seconds: Time for a request, from its beginning to its answer.
        drawn_seeds: Draw a random seed for a request without one, instead of the server's default.
        tool_call_parser: Name of the format of tool calls, or "" for the format that the chat
            template shows.
        thinking_budget: Tokens of the thoughts of an answer whose request sets no budget, or None
            for no limit.
    """

    context: int | None = None
    seconds: float = 600.0
    drawn_seeds: bool = True
    tool_call_parser: str = ""
    thinking_budget: int | None = None


@dataclass(frozen=True)
class LoadedModel:
    """A model in memory, which prepares the requests of a tenant.

    Attributes:
        options: The defaults of requests.
        name: The model's name for clients.
        budget: The memory budget, or None for no limit.
        load_seconds: Seconds for which the request has waited for the model.
        responses: The responses that clients can fetch or continue.
    """

    pair: Pair
    options: Options
    settings: ServiceSettings
    name: str
    budget: MemoryBudget | None = None
    tenant: str = ""
    load_seconds: float = 0.0
    responses: StoredResponses = field(default_factory=StoredResponses)

    @property
    def facts(self) -> Facts:
        """The facts that clients may know of the model."""
        markers = self._markers
        signs: dict[str, object] = {"completion": True, "tools": markers.calls}
        signs |= {"thinking": markers.think, "insert": infill_of(self.pair.tokenizer)}
        capabilities = tuple(name for name, sign in signs.items() if sign)
        family, chats = self.pair.target.family, self.way == "template"
        return Facts(self.longest, capabilities, chats, family, self.pair.dtype)

    @property
    def way(self) -> str:
        """The form in which the model reads messages."""
        return chat_format(self.pair, self.options).way

    @property
    def longest(self) -> int:
        """Largest number of tokens of a prompt and its completion together, or of each of them in
        an encoder-decoder."""
        bounds = [self.pair.target.max_length, self.settings.context]
        return min((bound for bound in bounds if bound is not None), default=ENDLESS)

    @property
    def most_characters(self) -> int:
        """Largest number of characters of a prompt."""
        return MOST_CHARACTERS_PER_TOKEN * self.longest

    @property
    def _markers(self) -> Markers:
        templated = self.way == "template"
        parser = self.settings.tool_call_parser
        return markers_of(self.pair.tokenizer, parser) if templated else Markers()

    def check_ids(self, ids: Sequence[int], field: str) -> None:
        """Raise Problem, which names the field, for ids that are not in the vocabulary."""
        size = self.pair.vocabulary
        if ids and not (min(ids) >= 0 and max(ids) < size):
            at = next(place for place, id in enumerate(ids) if not 0 <= id < size)
            raise invalid(f"{field}[{at}] must be a token id below {size}, not {ids[at]}", field)

    def check_characters(self, value: object, field: str) -> None:
        """Raise Problem if a text, or a JSON value, has too many characters for the context."""
        text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
        if len(text) > self.most_characters:
            about = f"about {len(text) // USUAL_CHARACTERS}"
            raise too_long(field, about, self.longest - 1, self.longest)

    def chat(self, chat: Chat, wanted: Wanted) -> Prepared:
        """Prepare the next message of a conversation. Raises Problem and SpecdecError."""
        if chat.tools.must and wanted.constraints:
            message = "tool_choice asks for a call: give no format or grammar for the text"
            raise invalid(message, "tool_choice")
        model, markers = self._asked(wanted), self._markers
        if not chat.tools.listed:
            markers = markers.without_calls()
        elif self.way != "template":
            raise unsupported("tools", "tools need a chat template, and this model has none")
        elif markers.calls is None:
            raise unsupported(
                "tools",
                "tools are unsupported for this model: the format of its calls is unknown; name it "
                "by --tool-call-parser",
            )
        if markers.channels and markers.calls is not None:
            model = model._ending(str(self.pair.tokenizer.ids[markers.calls.end]))
        answers = chat.ending != "continue"
        return model._prepared([model.chat_ids(chat)], wanted, chat, markers, answers=answers)

    def texts(
        self,
        prompts: Sequence[str | list[int]],
        wanted: Wanted,
        *,
        suffix: str = "",
        scores_prompt: bool = False,
    ) -> Prepared:
        """Prepare completions of texts or token ids.

        Args:
            suffix: The text after the completion, or "" for none.
            scores_prompt: Whether the tokens of the prompt get log-probabilities, too.
        Raises:
            Problem, SpecdecError: If the request is wrong.
        """
        model, ids = self._asked(wanted), []
        infill, model = model._infill("suffix") if suffix else (None, model)
        for prompt in prompts:
            if not isinstance(prompt, str):
                if infill is not None:
                    raise invalid("suffix needs a prompt of text, not of token ids", "suffix")
                self.check_ids(prompt, "prompt")
                ids.append(prompt)
            elif infill is not None:
                self.check_characters([prompt, suffix], "prompt")
                ids.append(infill.prompt(prompt, suffix))
            else:
                ids.append(model.text_ids(prompt))
        if scores_prompt and self.pair.target.kind == "encoder-decoder":
            message = "this model reads the prompt with an encoder, which gives no logprobs"
            raise invalid(f"echo with logprobs is impossible: {message}", "echo")
        return model._prepared(ids, wanted, Chat(), Markers(), scores_prompt=scores_prompt)

    def infill(
        self, before: str, after: str, files: Sequence[tuple[str, str]], wanted: Wanted
    ) -> Prepared:
        """Prepare a text between two texts, which are shortened if they do not fit. files: Names
        and texts of other files. Raises Problem and SpecdecError."""
        infill, model = self._asked(wanted)._infill("input_suffix")
        room = self.longest - max(1, min(model.options.max_tokens, self.longest // 4))
        self.check_characters([before, after, files], "prompt")
        prompt = infill.prompt(before, after, files, room)
        return model._prepared([prompt], wanted, Chat(), Markers())

    def _infill(self, field: str) -> tuple[Infill, Self]:
        """Return the tokens for prompts with a suffix, and the model with completions that end
        before it. Raises Problem if the model cannot fill in."""
        infill = infill_of(self.pair.tokenizer)
        if infill is None:
            raise unsupported(field, "this model has no tokens that mark prefix and suffix")
        return infill, self._ending(*infill.ends)

    def _ending(self, *tokens: str | int) -> Self:
        """Return the model with completions that also end at these tokens."""
        extra = cast(tuple[str | int, ...], self.options.extra_eos_token)
        return replace(self, options=replace(self.options, extra_eos_token=(*extra, *tokens)))

    def chat_ids(self, chat: Chat) -> list[int]:
        """Return the token ids of a conversation with its tools. Raises Problem."""
        reads, tools = chat_format(self.pair, self.options), list(chat.tools.listed)
        try:
            messages = messages_of(without_volatile(chat.messages))
            # An image in the history has more characters than the note in its place.
            self.check_characters([messages, tools, chat.variables], "messages")
            if chat.ending == "continue" and messages[-1].get("tool_calls"):
                field = "continue_final_message"
                raise invalid(f"{field} cannot continue a message that calls tools", field)
            if chat.ending != "answer" and reads.way == "single user message":
                message = "this model cannot continue a message"
                raise unsupported("continue_final_message", message)
            ids = reads.ids(messages, chat.variables, chat.ending)
        except PromptError as error:
            raise invalid(str(error), "messages") from None
        if not tools:
            return ids
        variables = {**chat.variables, "tools": in_order(tools)}
        with_tools = reads.ids(messages, variables, chat.ending)
        if with_tools != ids:
            return with_tools
        calls = self._markers.calls
        if calls is None or calls.name != "phi4_mini_json":
            raise unsupported("tools", "this model's chat template does not support tools")
        system = self.options.system_prompt
        messages = with_tools_in_message(messages, variables["tools"], system)
        return reads.ids(messages, variables, chat.ending)

    def text_ids(self, text: str) -> list[int]:
        """Return the token ids of a text without a chat template. Raises Problem."""
        self.check_characters(text, "prompt")
        templated = self.options.chat_template and self.way == "single user message"
        plain = replace(self.options, system_prompt=None, chat_template_config={})
        return encode(self.pair, text, replace(plain, chat_template=templated))

    def _prepared(
        self, prompts: list[list[int]], wanted: Wanted, chat: Chat, markers: Markers, **flags: bool
    ) -> Prepared:
        """Prepare completions of prompts.

        Args:
            prompts: The token ids of each prompt.
            chat: The conversation if the prompt is one, or an empty one.
            markers: The markers of reasoning and tool calls in the completions of a chat.
            flags: Further arguments of each Request.
        """
        sampling, count = wanted.sampling, wanted.count
        if len(prompts) * count > CONNECTIONS:
            message = f"the number of prompts times n must be at most {CONNECTIONS}"
            param = "n" if count > CONNECTIONS else "prompt"
            raise invalid(f"{message}: send several requests", param)
        # The prompts are token ids, so these options have had their effect.
        options = replace(self.options, system_prompt=None, chat_template_config={})
        prompts = [ids[-(sampling.truncate_prompt_tokens or 0) :] for ids in prompts]
        thought = self._thought(chat, markers, prompts[0])
        options = constrained(options, chat.tools, markers, self.pair, thought)
        self.check_characters(wanted.prediction, "prediction")
        special = self.pair.tokenizer.special_ids
        predicted = self.pair.tokenizer.encode(wanted.prediction)
        field = "messages" if chat.messages else "prompt"
        requests = []
        for ids in prompts:
            pair, bounded = self._with_room(ids, options, sampling.max_tokens, field)
            request = Request(
                ids,
                bounded,
                prediction=tuple(id for id in predicted if id not in special),
                top_logprobs=wanted.top_logprobs,
                shown=markers.special,
                ignore_eos=sampling.ignore_eos,
                tenant=self.tenant,
                thoughts=self._thoughts(chat, markers, ids, bounded),
                # The model decides by itself whether another call follows.
                open_end=bool(chat.tools.must),
                pair=pair,
                **flags,
            )
            seeded = (replace(bounded, seed=bounded.seed + choice) for choice in range(count))
            requests += [replace(request, options=options) for options in seeded]
        reader = functools.partial(
            ChannelReader if markers.channels else Reader,
            markers,
            chat.tools.listed,
            thinking=thought in ("open", "close"),
            most_calls=chat.tools.most_calls,
            header=markers.in_header(prompts[0]),
        )
        return Prepared(requests, sum(map(len, prompts)), reader)

    def _thoughts(
        self, chat: Chat, markers: Markers, prompt: list[int], options: Options
    ) -> Thoughts | None:
        """Return the thoughts at the end of a prompt, with their budget. Raises Problem."""
        budget, default = chat.thinking_budget, self.settings.thinking_budget
        thoughts = markers.thoughts(prompt, default if budget is None else budget)
        ends = () if thoughts is None or thoughts.budget is None else thoughts.end
        if any(options.logit_bias.get(id, 0) == -math.inf for id in ends):
            message = "logit_bias excludes the mark that ends a thought, which a budget needs"
            raise invalid(message, "logit_bias")
        return thoughts

    def _thought(self, chat: Chat, markers: Markers, prompt: list[int]) -> Thought:
        """Return the kind of thought that precedes the answer to a prompt."""
        variables: Mapping[str, Any] = {**self.options.chat_template_config, **chat.variables}
        unwanted = any(variables.get(name) is False for name in SWITCHES)
        if (thoughts := markers.thoughts(prompt)) is not None and thoughts.open:
            return "close" if unwanted else "open"
        if chat.ending == "continue":
            return "begun"
        thought = markers.has_thought(prompt, self.pair.tokenizer)
        return "none" if unwanted or thought else "optional"

    def _asked(self, wanted: Wanted) -> Self:
        """Return the model with the options of a request. Raises Problem, OptionError."""
        sampling = wanted.sampling
        if len(wanted.constraints) > 1:
            names = " and ".join(constraint.field for constraint in wanted.constraints)
            rule = f"at most one of {names} may be given: leave the others out"
            raise invalid(rule, wanted.constraints[0].field)
        changes = sampling.model_dump(include=PLAIN, exclude_none=True)
        if sampling.repeat_last_n == 0:
            changes |= NO_PENALTIES
        if sampling.max_tokens == -1:
            changes["max_tokens"] = self.longest
        stops = [sampling.stop] if isinstance(sampling.stop, str) else sampling.stop
        changes["stop"] = (*self.options.stop, *filter(None, stops))
        if sampling.logit_bias is not None:
            # Ids outside of the vocabulary have no logits.
            size, biases = self.pair.vocabulary, sampling.logit_bias.items()
            changes["logit_bias"] = {id: bias for id, bias in biases if id < size}
        if self.settings.drawn_seeds:
            changes.setdefault("seed", secrets.randbits(32))
        drafts = sampling.speculative
        most = drafts.max if isinstance(drafts, Speculative) else None if drafts else 0
        changes |= {} if most is None else {"num_draft": most}
        for constraint in wanted.constraints:
            if sampling.ignore_eos:
                rule = "ignore_eos cannot be combined with a format or grammar, which ends the text"
                raise invalid(rule, "ignore_eos")
            checked(self.pair, self.options, constraint)
            changes[constraint.kind] = constraint.text
        return replace(self, options=replace(self.options, **changes))

    def _with_room(
        self, ids: list[int], options: Options, max_tokens: int | None, field: str
    ) -> tuple[Pair, Options]:
        """Return the pair and the options of a request, with max_tokens limited by the context and
        the memory budget. Raises Problem, PromptError and OptionError."""
        longest = self.longest
        if len(ids) >= longest:
            raise too_long(field, len(ids), longest - 1, longest)
        room = longest - len(beginning(self.pair, ids, options))
        most = min(options.max_tokens, room)
        if self.budget is not None:
            try:
                fits = self.budget.room(len(ids), most)
            except PromptError as error:
                fits = self.budget.longest_prompt(longest - 1)
                raise too_long(field, len(ids), fits, fits + 1, str(error)) from None
            if fits < most == max_tokens:
                advice = f"ask for at most {fits} tokens, or raise memory-budget"
                total = f"{len(ids)} + {most} > {len(ids) + fits}"
                words = f"input length and `max_tokens` exceed context limit: {total}"
                raise beyond(words, len(ids) + fits, advice, "max_tokens")
            most = fits
        return prepared(self.pair, ids, replace(options, max_tokens=most))[1:]


class CompletionBody(Body):
    """A body that completions answer. stream: Whether the answer is a stream."""

    stream: Boolean = False

    @abstractmethod
    def prepared(self, model: LoadedModel) -> Prepared:
        """Prepare the completions. Raises Problem or SpecdecError for a request that must be
        refused."""
