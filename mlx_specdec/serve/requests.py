"""Translation of request bodies into requests to the engine: prompts and options."""

import functools
import json
import math
import secrets
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Self, cast

from ..core.options import LARGEST_BIAS, LEAST_TOP_P, Options
from ..core.row import Request
from ..engine.chat import chat_format
from ..engine.memory import MemoryBudget
from ..engine.pair import Pair
from ..engine.request import beginning, encode, prepared
from ..errors import PromptError
from ..text.infill import infill_of
from ..text.markers import NONE, Markers, markers_of
from ..text.messages import in_order, messages_of, text_of, with_tools_in_message, without_volatile
from ..text.thoughts import Thoughts
from . import chat, constraints
from .bodies import Body
from .channels import ChannelReader
from .chat import Tools
from .constraints import Thought
from .events import Reader
from .problems import invalid, too_long, too_many, unsupported
from .settings import ServiceSettings
from .stored import StoredResponses

LANGUAGES = ("target_lang", "source_lang")
OPTION_FIELDS: tuple[str, ...] = ("temperature", "top_p", "min_p", "exact")
OPTION_FIELDS += ("xtc_probability", "xtc_threshold")
PENALTIES = {"presence_penalty": 0.0, "frequency_penalty": 0.0, "repetition_penalty": 1.0}
"""The values that turn penalties off."""
OPTION_FIELDS += (*LANGUAGES, *PENALTIES)
"""Fields with the meaning of the option of the same name."""
TEMPLATE_FIELDS: tuple[str, ...] = ("tools", "functions", "chat_template_kwargs")
TEMPLATE_FIELDS += ("reasoning", "reasoning_effort")
"""Fields, besides the messages, that chat templates read."""
MOST_CHARACTERS_PER_TOKEN = 32
"""Largest number of characters of a prompt per token of the context; usual texts have 3 to 5. A
longer prompt is refused before tokenization, which takes a second per million characters."""
USUAL_CHARACTERS = 4
"""Characters per token of usual texts, for the number of tokens in an error message."""
ENDLESS = 4096
"""Context, in tokens, of a model without a maximum position. The cost of such a model grows with
the square of the length."""


@dataclass(frozen=True)
class ParsedRequest:
    """A client's request after all checks.

    Attributes:
        requests: The engine's requests, one for each choice, prompt by prompt.
        prompt_tokens: Number of tokens of all prompts, counting each prompt once.
        reader: Returns a new reader for the text of a choice.
        echoed: The text to repeat before each choice, or () if echo is not set.
    """

    requests: Sequence[Request]
    prompt_tokens: int
    reader: Callable[[], Reader] = Reader
    echoed: Sequence[str] = ()


@dataclass(frozen=True)
class Facts:
    """The facts of a model that clients may know, also if it is not in memory.

    Attributes:
        longest: See `RequestParser.longest`.
        capabilities: The abilities of the model, in ollama's words.
        chats: Whether the model has a chat template.
        family: The name of the architecture's module, such as "llama".
        dtype: The number format in words.
    """

    longest: int
    capabilities: tuple[str, ...]
    chats: bool
    family: str
    dtype: str


def _keep(seconds: float) -> None: ...


@dataclass(frozen=True)
class RequestParser:
    """A parser of request bodies.

    Attributes:
        options: The defaults of requests.
        name: The model's name for clients.
        budget: The memory budget, or None for no limit.
        responses: The responses that a request may continue.
        keep: Sets the seconds without a request after which the model is unloaded.
        load_seconds: Seconds for which the request has waited for the model.
    """

    pair: Pair
    options: Options
    settings: ServiceSettings
    name: str
    budget: MemoryBudget | None = None
    responses: StoredResponses = field(default_factory=StoredResponses)
    tenant: str = ""
    keep: Callable[[float], None] = _keep
    load_seconds: float = 0.0

    @property
    def facts(self) -> Facts:
        """The facts that clients may know of the model."""
        tokenizer = self.pair.tokenizer
        template = chat_format(self.pair, self.options).way == "template"
        markers = markers_of(tokenizer, self.settings.tool_call_parser) if template else NONE
        found = {
            "completion": True,
            "tools": markers.calls is not None,
            "thinking": markers.think_end is not None or markers.channels is not None,
            "insert": infill_of(tokenizer) is not None,
        }
        capabilities = tuple(name for name, present in found.items() if present)
        target = self.pair.target
        return Facts(self.longest, capabilities, template, target.family, self.pair.dtype)

    @property
    def longest(self) -> int:
        """Largest number of tokens of a prompt and its completion together, or of each of them in
        an encoder-decoder."""
        bounds = [self.pair.target.max_length, self.settings.limits.context]
        return min((bound for bound in bounds if bound is not None), default=ENDLESS)

    @property
    def most_characters(self) -> int:
        """Largest number of characters of a prompt."""
        return MOST_CHARACTERS_PER_TOKEN * self.longest

    def check_ids(self, ids: Sequence[int], field: str) -> None:
        """Raise Problem, which names the field, for ids that are not in the vocabulary."""
        size = self.pair.vocabulary
        if ids and not (min(ids) >= 0 and max(ids) < size):
            at = next(place for place, id in enumerate(ids) if not 0 <= id < size)
            raise invalid(f"{field}[{at}] must be a token id below {size}, not {ids[at]}", field)

    def chat(self, body: Body) -> ParsedRequest:
        """Parse a checked body for /v1/chat/completions. Raises Problem."""
        top = body.get("top_logprobs", 0) if body.get("logprobs") else None
        tools, speaking = chat.tools_of(body), self._speaking(body)
        markers = self._markers(tools)
        if markers.channels is not None and markers.calls is not None:
            end = markers.calls.end.ids[0]
            if end not in self.pair.eos_token_ids:
                speaking = speaking._ending(str(end))
        parsed = speaking._parsed(body, [speaking.chat_ids(body)], top, tools, markers)
        answers = not body.get("continue_final_message")
        requests = [replace(request, answers=answers) for request in parsed.requests]
        return replace(parsed, requests=requests)

    def completions(self, body: Body) -> ParsedRequest:
        """Parse a checked body for /v1/completions. Raises Problem."""
        prompts = several(body["prompt"])
        top = body.get("logprobs", False)
        speaking, suffix = self._speaking(body), body.get("suffix")
        if suffix:
            if not all(isinstance(prompt, str) for prompt in prompts):
                raise invalid("suffix needs a prompt of text, not of token ids", "suffix")
            speaking = speaking._filling("suffix")
        read = functools.partial(speaking.infill_ids, after=suffix) if suffix else speaking.text_ids
        for prompt in prompts:
            if not isinstance(prompt, str):
                self.check_ids(prompt, "prompt")
        ids = [read(prompt) if isinstance(prompt, str) else prompt for prompt in prompts]
        parsed = speaking._parsed(body, ids, None if top is False else top, Tools(), NONE)
        if not body.get("echo"):
            return parsed
        if top is not False:
            if self.pair.target.kind == "encoder-decoder":
                message = "this model reads the prompt with an encoder, which gives no logprobs"
                raise invalid(f"echo with logprobs is impossible: {message}", "echo")
            scored = [replace(request, scores_prompt=True) for request in parsed.requests]
            parsed = replace(parsed, requests=scored)
        decode = self.pair.tokenizer.decode
        texts = [prompt if isinstance(prompt, str) else decode(prompt) for prompt in prompts]
        choices = len(parsed.requests) // len(prompts)
        return replace(parsed, echoed=tuple(text for text in texts for _ in range(choices)))

    def infill(self, body: Body) -> ParsedRequest:
        """Parse a checked body for /infill. Raises Problem."""
        parser = self._filling("input_suffix")
        before = body.get("input_prefix", "") + body.get("prompt", "")
        after, extra = body.get("input_suffix", ""), body.get("input_extra", [])
        files = [(file.get("filename", "tmp"), file["text"]) for file in extra]
        # Editors send the text around the cursor, however long it is.
        wanted, most = body.get("max_tokens", self.options.max_tokens), self.longest // 4
        room = self.longest - (max(1, min(wanted, most)) if wanted >= 0 else most)
        prompt = parser.infill_ids(before, after, files, room)
        return parser._parsed(body, [prompt], None, Tools(), NONE)

    def infill_ids(
        self,
        before: str,
        after: str,
        files: Sequence[tuple[str, str]] = (),
        room: int | None = None,
    ) -> list[int]:
        """Return the token ids, at most `room`, of a prompt for the text between two texts. Raises
        Problem."""
        self.check_characters([before, after, files], "prompt")
        infill = infill_of(self.pair.tokenizer)
        assert infill is not None, "_filling has found it"
        return infill.prompt(before, after, files, room)

    def _filling(self, field: str) -> Self:
        """Return a parser whose completions end before a suffix. Raises Problem if the model cannot
        fill in."""
        infill = infill_of(self.pair.tokenizer)
        if infill is None:
            raise unsupported(field, "this model has no tokens that mark prefix and suffix")
        return self._ending(*infill.ends)

    def _ending(self, *tokens: str | int) -> Self:
        """Return a parser whose completions also end at these tokens."""
        extra = cast(tuple[str | int, ...], self.options.extra_eos_token)
        return replace(self, options=replace(self.options, extra_eos_token=(*extra, *tokens)))

    def _speaking(self, body: Body) -> Self:
        """Return a parser with the languages that a body names."""
        named = {name: body[name] for name in LANGUAGES if name in body}
        return replace(self, options=replace(self.options, **named)) if named else self

    def chat_ids(self, body: Body) -> list[int]:
        """Return the token ids of a checked body's messages and tools. Raises Problem."""
        sent, reads = body["messages"], chat_format(self.pair, self.options)
        try:
            messages = messages_of(without_volatile(sent))
        except PromptError as error:
            raise invalid(str(error), "messages") from None
        # An image in the history has more characters than the note in its place.
        self.check_characters([messages, *map(body.get, TEMPLATE_FIELDS)], "messages")
        variables = chat.template_settings(body)
        ending = chat.ending_of(body, messages)
        if ending != "answer" and reads.way == "single user message":
            raise unsupported("continue_final_message", "this model cannot continue a message")
        try:
            ids = reads.ids(messages, variables, ending)
        except PromptError as error:
            raise invalid(str(error), "messages") from None
        tools = chat.tools_of(body).listed
        if not tools:
            return ids
        variables["tools"] = in_order(list(tools))
        with_tools = reads.ids(messages, variables, ending)
        calls = markers_of(self.pair.tokenizer, self.settings.tool_call_parser).calls
        if with_tools == ids and calls is not None and calls.name == "phi4_mini_json":
            system = self.options.system_prompt
            messages = with_tools_in_message(messages, variables["tools"], system)
            return reads.ids(messages, variables, ending)
        if with_tools == ids:
            raise unsupported("tools", "this model's chat template does not support tools")
        return with_tools

    def text_ids(self, text: str) -> list[int]:
        """Return the token ids of a text without a chat template. Raises Problem."""
        options = replace(self.options, system_prompt=None, chat_template_config={})
        single = chat_format(self.pair, options).way == "single user message"
        self.check_characters(text, "prompt")
        plain = replace(options, chat_template=options.chat_template and single)
        return encode(self.pair, text, plain)

    def _parsed(
        self, body: Body, prompts: list[list[int]], top: int | None, tools: Tools, markers: Markers
    ) -> ParsedRequest:
        """Parse the fields that chats and text completions share.

        Args:
            prompts: The token ids of each prompt.
            top: Number of alternatives with their logprobs, or None for no logprobs at all.
            tools: The tools of a chat.
            markers: The markers of reasoning and tool calls in the completions of a chat.
        """
        count, most = body.get("n", 1), self.settings.limits.choices
        if len(prompts) * count > most:
            param = "n" if count > most else "prompt"
            message = f"the number of prompts times n must be at most {most}: send several requests"
            raise invalid(message, param)
        if body.get("best_of", 1) not in (1, count):
            message = "best_of must be n or 1: this server does not choose between texts"
            raise invalid(message, "best_of")
        options = self._options(body)
        prompts = [ids[-body.get("truncate_prompt_tokens", 0) :] for ids in prompts]
        if tools.listed and not tools.must and isinstance(options.json_schema, str):
            tools = replace(tools, schema=options.json_schema)
        thought = self._thought(body, markers, prompts[0])
        if tools.must or tools.schema:
            calls = constraints.calls_constraint(
                tools, markers, self.pair, self.options, self.settings.limits, thought=thought
            )
            options = replace(options, json_schema=None, **calls)
        else:
            options = constraints.after_thought(options, markers, thought)
        bounded = [self._with_room(ids, options, body) for ids in prompts]
        tokenizer = self.pair.tokenizer
        content = text_of(body["prediction"]["content"]) if "prediction" in body else ""
        self.check_characters(content, "prediction")
        special, predicted = tokenizer.special_ids, tokenizer.encode(content) if content else []
        predicted = [id for id in predicted if id not in special]
        ignore_eos = body.get("ignore_eos", False)
        more = (tuple(predicted), top, markers.special, ignore_eos, self.tenant)
        requests = [
            Request(
                ids,
                replace(options, seed=options.seed + choice),
                *more,
                thoughts=self._thoughts(body, markers, ids, options),
                # The model decides by itself whether another call follows.
                open_end=bool(tools.must),
            )
            for ids, options in zip(prompts, bounded, strict=True)
            for choice in range(count)
        ]
        thinking = thought in ("open", "close")
        form = functools.partial(ChannelReader, header=markers.in_header(prompts[0]))
        reader = functools.partial(
            Reader if markers.channels is None else form,
            markers,
            tools.listed,
            thinking=thinking,
            most_calls=tools.most_calls,
        )
        return ParsedRequest(requests, sum(map(len, prompts)), reader)

    def _thoughts(
        self, body: Body, markers: Markers, prompt: list[int], options: Options
    ) -> Thoughts | None:
        """Return the thoughts at the end of a prompt, with their budget. Raises Problem."""
        budget, default = chat.thinking_budget(body), self.settings.thinking_budget
        thoughts = markers.thoughts(prompt, default if budget is None else budget)
        ends = () if thoughts is None or thoughts.budget is None else thoughts.end
        if any(options.logit_bias.get(id, 0) == -math.inf for id in ends):
            message = "logit_bias excludes the mark that ends a thought, which a budget needs"
            raise invalid(message, "logit_bias")
        return thoughts

    def _thought(self, body: Body, markers: Markers, prompt: list[int]) -> Thought:
        """Return the kind of thought that precedes the answer to a prompt."""
        unwanted = chat.wants_no_thought(body, self.options)
        if markers.thinks_after(prompt):
            return "close" if unwanted else "open"
        tokenizer, begun = self.pair.tokenizer, body.get("continue_final_message", False)
        if begun:
            return "begun"
        return "none" if unwanted or markers.has_thought(prompt, tokenizer) else "optional"

    def _options(self, body: Body) -> Options:
        """Return the options of a request. Raises Problem, OptionError."""
        changes: dict[str, Any] = {name: body[name] for name in OPTION_FIELDS if name in body}
        if body.get("top_p") == 0:
            changes["top_p"] = LEAST_TOP_P  # only the likeliest token remains
        if body.get("repeat_last_n") == 0:
            changes |= PENALTIES
        changes["top_k"] = max(0, body.get("top_k", self.options.top_k))
        if "stop" in body:
            stop = body["stop"]
            stops = [stop] if isinstance(stop, str) else stop
            changes["stop"] = (*self.options.stop, *filter(None, stops))
        if "logit_bias" in body:
            # Ids outside of the vocabulary have no logits.
            biases = ((int(token), bias) for token, bias in body["logit_bias"].items())
            changes["logit_bias"] = {
                token: -math.inf if bias < -LARGEST_BIAS else bias
                for token, bias in biases
                if token < self.pair.vocabulary
            }
        drawn = self.settings.drawn_seeds
        changes["seed"] = body.get("seed", secrets.randbits(32) if drawn else self.options.seed)
        speculative = body.get("speculative", True)
        if speculative is False:
            changes["regular"] = True
        elif speculative is not True and "max" in speculative:
            changes["num_draft"] = speculative["max"]
        limits = self.settings.limits
        changes |= constraints.constraint_of(body, self.pair, self.options, limits)
        # The prompts are token ids, so these options have had their effect.
        return replace(self.options, system_prompt=None, chat_template_config={}, **changes)

    def _markers(self, tools: Tools) -> Markers:
        """Return the markers of reasoning and tool calls. Raises Problem if the request has tools
        and the model cannot call them."""
        template = chat_format(self.pair, self.options).way == "template"
        parser = self.settings.tool_call_parser
        markers = markers_of(self.pair.tokenizer, parser) if template else NONE
        if not tools.listed:
            return markers.without_calls()
        if not template:
            raise unsupported("tools", "tools need a chat template, and this model has none")
        if markers.calls is None:
            raise unsupported(
                "tools",
                "tools are unsupported for this model: the format of its calls is unknown; name it "
                "by --tool-call-parser",
            )
        return markers

    def check_characters(self, value: object, field: str) -> None:
        """Raise Problem if a text, or a JSON value, has too many characters for the context."""
        text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
        if len(text) > self.most_characters:
            about = f"about {len(text) // USUAL_CHARACTERS}"
            raise too_long(field, about, self.longest - 1, self.longest)

    def _with_room(self, ids: list[int], options: Options, body: Body) -> Options:
        """Return the options with max_tokens limited by the context and the memory budget. Raises
        Problem, PromptError and OptionError."""
        longest = self.longest
        prompt = "messages" if "messages" in body else "prompt"
        if len(ids) >= longest:
            raise too_long(prompt, len(ids), longest - 1, longest)
        room = longest - len(beginning(self.pair, ids, options))
        wanted = body.get("max_tokens", options.max_tokens)
        most = min(wanted, room) if wanted >= 0 else room
        if self.budget is not None:
            try:
                fits = self.budget.room(len(ids), most)
            except PromptError as error:
                fits = self.budget.longest_prompt(longest - 1)
                raise too_long(prompt, len(ids), fits, fits + 1, str(error)) from None
            if fits < most == body.get("max_tokens"):
                advice = f"ask for at most {fits} tokens, or raise memory-budget"
                raise too_many(len(ids), most, len(ids) + fits, advice)
            most = fits
        options = replace(options, max_tokens=most)
        prepared(self.pair, ids, options)
        return options


def several(texts: Any) -> Sequence[str | list[int]]:
    """Return the texts of a field that has a text, token ids, or a list of either."""
    single = isinstance(texts, str) or isinstance(texts[0], int)
    return [texts] if single else texts
