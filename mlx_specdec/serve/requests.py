"""From the fields of a request to options: how its text is drawn, bound, and drafted."""

from __future__ import annotations

import contextlib
import functools
import json
import math
import secrets
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

from ..engine.many import Request
from ..engine.memory import MemoryBudget
from ..engine.pair import Pair
from ..engine.prepare import encode, prepared
from ..errors import PromptError, SpecdecError
from ..options import Options
from ..sampling.settings import LARGEST
from ..text.chat import Ending
from ..text.markers import NONE, Markers, markers_of
from ..text.tokenizer import Tokenizer
from . import fields, formats
from .body import Body, Schema, characters, read
from .call_grammar import grammar_of
from .chat import Message, ending_of, ids_of, messages_of, template_settings, text_of, way_of
from .formats import Tools, tools_of
from .limits import Limits
from .problems import CONTEXT, Problem, busy, too_long, unsupported, wrong
from .reading import Reader

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


ENDLESS = 4096
"""Tokens of a model whose positions have no end: what it takes grows with their square."""
LONG = 1 << 20
"""Characters above which a prompt counts as long. Only four long prompts are tokenized at once, as
each character takes some 130 bytes of memory meanwhile."""
_long = threading.BoundedSemaphore(4)
READ = ("messages", "tools", "functions", "chat_template_kwargs", "reasoning_effort")
"""Fields that chat templates read."""


@dataclass(frozen=True)
class Asked:
    """A request of a client, read and checked.

    requests: one for each choice; those of the first prompt come first. prompt_tokens: of all
    prompts, each counted once. include_drafted: chunks of a stream say whether drafts wrote them.
    echoed: the text to put before each choice; empty unless echo is set. reader: makes a reader of
    a choice's text, which may have thoughts or calls in it.
    """

    requests: list[Request]
    prompt_tokens: int
    stream: bool
    include_usage: bool
    include_drafted: bool = False
    echoed: tuple[str, ...] = ()
    reader: Callable[[], Reader] | None = None


@dataclass(frozen=True)
class Asking:
    """What requests are read with. keep_billing: leave the billing lines of Claude Code in system
    prompts. strict_model: refuse requests that name another model, instead of answering them.
    budget: of memory; None knows none."""

    pair: Pair
    options: Options
    limits: Limits
    name: str
    drawn_seeds: bool = True
    keep_billing: bool = False
    strict_model: bool = False
    budget: MemoryBudget | None = None

    @property
    def longest(self) -> int:
        """Most tokens of a prompt and its answer together, or of each where an encoder reads the
        prompt."""
        own, limit = self.pair.target.max_length, self.limits.context
        bounds = [each for each in (own, limit) if each is not None]
        return min(bounds, default=ENDLESS)

    @property
    def schemas(self) -> dict[str, Schema]:
        """The schemas of all bodies, by name."""
        name = self.name if self.strict_model else None
        return fields.requests(name, self.limits, self.pair.vocabulary, self.longest)

    def read(self, kind: str, body: Body) -> Body:
        """Check a body against the schema of this name and return its canonical form. Raises
        Problem."""
        named = body.get("model", self.name)
        if self.strict_model and named not in (self.name, *fields.UNNAMED):
            raise unknown_model(str(named), self.name)
        return read(self.schemas[kind], body)

    def chat(self, body: Body) -> Asked:
        """What a body for /v1/chat/completions asks for. Raises Problem."""
        body = self.read("ChatRequest", body)
        top = body.get("top_logprobs", 0) if body.get("logprobs") else None
        return self._asked(body, lambda: [self.prompt(body)], top, tools_of(body))

    def prompt(self, body: Body) -> list[int]:
        """Token ids of the messages of a chat's body, with its tools. Raises Problem,
        SpecdecError."""
        with self._room_for([body.get(name) for name in READ], "messages"):
            messages = messages_of(body["messages"])
            settings = template_settings(body)
            ending = ending_of(body, messages)
            tools = tools_of(body)
            ids = self.chat_ids(messages, settings, ending)
            if not tools.given:
                return ids
            told = self.chat_ids(messages, {**settings, "tools": list(tools.given)}, ending)
        if told == ids:
            raise unsupported("tools", "this model's chat template does not support tools")
        return told

    def completions(self, body: Body) -> Asked:
        """What a body for /v1/completions asks for. Raises Problem."""
        body = self.read("TextRequest", body)
        given = body["prompt"]
        # A text, token ids, or a list of either.
        prompts = [given] if isinstance(given, str) or isinstance(given[0], int) else given
        top = body.get("logprobs", False)
        asked = self._asked(
            body, lambda: [self._ids(each) for each in prompts], None if top is False else top
        )
        if not body.get("echo"):
            return asked
        decode = self.pair.tokenizer.decode
        prompts = [each if isinstance(each, str) else decode(each) for each in prompts]
        choices = len(asked.requests) // len(prompts)
        return replace(asked, echoed=tuple(each for each in prompts for _ in range(choices)))

    def chat_ids(
        self, messages: Sequence[Message], settings: Body, ending: Ending = "answer"
    ) -> list[int]:
        """Token ids of messages. Raises Problem, SpecdecError."""
        return ids_of(self.pair, messages, self.options, settings, ending)

    def text_ids(self, text: str) -> list[int]:
        """Token ids of a text that no chat template is put around. Raises Problem, SpecdecError."""
        plain = replace(
            self.options,
            chat_template=self.options.chat_template
            and way_of(self.pair, self.options) == "single user message",
            system_prompt=None,
            chat_template_config={},
        )
        with self._room_for(text, "prompt"):
            return encode(self.pair, text, plain)

    def _asked(
        self,
        body: Body,
        read: Callable[[], list[list[int]]],
        top_logprobs: int | None,
        tools: Tools | None = None,
    ) -> Asked:
        """tools: of a chat; None for texts that nobody reads anything into."""
        choices, streaming = body.get("n", 1), body.get("stream_options", {})
        markers = NONE if tools is None else self.markers(tools)
        try:
            options = options_of(
                body, self.pair, self.options, self.limits, drawn_seed=self.drawn_seeds
            )
            keep = body.get("truncate_prompt_tokens", 0)
            prompts = [ids[-keep:] for ids in read()]
            # What is bound otherwise has no thought before it.
            thinking = options.constraint is None and markers.thinks_after(prompts[0])
            if tools is not None and tools.must:
                options = self._calling(options, tools, markers, thinking=thinking)
            each = [self._with_room(ids, options, body) for ids in prompts]
            with self._room_for(body.get("prediction"), "prediction"):
                expected = expected_ids(body, self.pair.tokenizer)
        except SpecdecError as problem:
            raise wrong(str(problem), _field(str(problem), body)) from None
        more = (expected, top_logprobs, markers.special, body.get("ignore_eos", False))
        requests = [
            Request(ids, replace(own, seed=own.seed + choice), *more)
            for ids, own in zip(prompts, each, strict=True)
            for choice in range(choices)
        ]
        reader = None
        if tools is not None and (markers.think_end is not None or tools.given):
            reader = functools.partial(
                Reader,
                markers,
                markers.calls,
                tools.given,
                thinking=thinking,
                most_calls=tools.most_calls,
            )
        return Asked(
            requests,
            sum(map(len, prompts)),
            body.get("stream", False),
            streaming.get("include_usage", False),
            streaming.get("include_drafted", False),
            (),
            reader,
        )

    def markers(self, tools: Tools) -> Markers:
        """How the model marks thoughts, and calls where there are tools. Raises Problem where there
        are and it calls none."""
        template = way_of(self.pair, self.options) == "template"
        markers = markers_of(self.pair.tokenizer) if template else NONE
        if not tools.given:
            return markers.without_calls()
        if not template:
            raise unsupported("tools", "tools need a chat template, and this model has none")
        if markers.calls is None:
            raise unsupported(
                "tools", "tools are unsupported for this model: the format of its calls is unknown"
            )
        return markers

    def _calling(
        self, options: Options, tools: Tools, markers: Markers, *, thinking: bool
    ) -> Options:
        """The options of a text that has to call a tool. Raises Problem."""
        formats.check_size("tools", {"json_schema": json.dumps(tools.given)}, self.limits)
        grammar = grammar_of(tools, markers, thinking=thinking)
        bound = formats.checked(self.pair, self.options, "tools", {"grammar": grammar}, self.limits)
        return replace(options, **bound)

    @contextlib.contextmanager
    def _room_for(self, value: object, field: str) -> Iterator[None]:
        """Tokenize the strings of a JSON value in this context. Raises Problem when they have too
        many characters to fit, or when four long texts are being tokenized already."""
        most, count = fields.MOST_CHARACTERS * self.longest, characters(value)
        if count > most:
            raise wrong(
                f"{field} has more than {most} characters, and prompt and answer together take at "
                f"most {self.longest} tokens: shorten it",
                field,
                CONTEXT,
            )
        if count > LONG and not _long.acquire(blocking=False):
            raise busy("too many long prompts are being read: try again", 429)
        try:
            yield
        finally:
            if count > LONG:
                _long.release()

    def _ids(self, prompt: str | list[int]) -> list[int]:
        return self.text_ids(prompt) if isinstance(prompt, str) else prompt

    def _with_room(self, ids: list[int], options: Options, body: Body) -> Options:
        """Return the options with max_tokens cut to what fits after the prompt. Raises Problem."""
        target, longest = self.pair.target, self.longest
        prompt = "messages" if "messages" in body else "prompt"
        if len(ids) >= longest:
            raise too_long(len(ids), longest, prompt)
        room = longest - len(target.prefix(ids))
        wanted = body.get("max_tokens", options.max_tokens)
        most = min(wanted, room) if wanted >= 0 else room
        if self.budget is not None:
            field = prompt
            try:
                fits = self.budget.room(len(ids), most)
                if most == body.get("max_tokens"):
                    field = "max_tokens"
                    self.budget.check(len(ids), most)
            except PromptError as problem:
                raise wrong(str(problem), field, CONTEXT) from None
            most = fits
        own = replace(options, max_tokens=most)
        prepared(self.pair, ids, own)
        return own


def unknown_model(named: str, served: str) -> Problem:
    """Return the error for a model that is not served."""
    told = f"the model {named:.80} is not served here: ask for {served}"
    return Problem(404, told, param="model", code="model_not_found")


def _field(message: str, body: Body) -> str | None:
    """The field that an error of the options is about; it begins with its name."""
    name = message.split(" ", 1)[0].replace("-", "_")
    return name if name in body else None
