"""The fields of requests: one table, by which bodies are checked and /openapi.json is written.

Fields that are not named here are ignored, and so is an optional field that is null.
"x-unsupported" marks a field that this server cannot honour: only values that change nothing are
accepted. "x-same-as" is the name under which the program reads a field. "x-context" is the size of
the context in tokens, for the error about a longer prompt.
"x-rules": what must hold between fields as "allOf" says it, where generators of test cases give up
on that many cases.
"""

from __future__ import annotations

import functools
from typing import Any

from ..options import MOST_DRAFTED
from ..sampling.settings import LARGEST, LEAST_TOP_P, REPETITION_PENALTIES, TEMPERATURES
from ..text.chat import RESERVED
from .body import Schema
from .settings import Limits

ROLES = ("system", "developer", "user", "assistant", "tool")
UNNAMED = ("", "default_model", "dummy", "tgi")
"""Names that clients of mlx_lm.server and of Hugging Face's servers send for "no model named"."""
TEXT: Schema = {"type": "string"}
WHOLE: Schema = {"type": "integer"}
NUMBER: Schema = {"type": "number"}
TRUTH: Schema = {"type": "boolean"}
OBJECT: Schema = {"type": "object"}
NULL: Schema = {"type": "null"}
WRITTEN: Schema = {**TEXT, "pattern": r"\S", "description": "a non-blank string"}
TOP_LOGPROBS = 20
MOST_CHARACTERS = 32
"""Maximum characters of a prompt per token of the context. A longer prompt is refused before it is
tokenized, which takes a second for a million characters; usual texts have 3 to 5 characters per
token. White space that the tokenizer would drop counts as well. A list of token ids may have as
many entries, since `truncate_prompt_tokens` may make it fit."""


def either(*each: Schema, **more: Any) -> Schema:
    """Return the schema of a value that fits any of these schemas."""
    return {"anyOf": list(each), **more}


def within(least: float, most: float | None = None, kind: Schema = NUMBER) -> Schema:
    """Return the schema of a number between two bounds, both included."""
    return {**kind, "minimum": least} | ({} if most is None else {"maximum": most})


def several(of: Schema, least: int = 0, most: int | None = None) -> Schema:
    """Return the schema of a list. least, most: numbers of entries."""
    bounds = {"minItems": least} if least else {}
    return {"type": "array", "items": of, **bounds} | ({} if most is None else {"maxItems": most})


def fields(required: tuple[str, ...] = (), /, **properties: Schema) -> Schema:
    """Return the schema of an object, whose optional fields may be null."""
    own = {name: each if name in required else _or_null(each) for name, each in properties.items()}
    return {"type": "object", "properties": own, "required": list(required)}


def off(*harmless: object) -> Schema:
    """Return the schema of an unsupported field. harmless: values that change nothing."""
    return {"enum": [*harmless, None], "x-unsupported": True}


def same_as(name: str, schema: Schema) -> Schema:
    """Return the schema of an alias. name: of the field that the program reads."""
    return {**schema, "x-same-as": name}


def _or_null(schema: Schema) -> Schema:
    if "anyOf" in schema:
        return {**schema, "anyOf": [*schema["anyOf"], NULL]}
    if "enum" in schema:
        values = schema["enum"]
        return schema if None in values else {**schema, "enum": [*values, None]}
    return either(schema, NULL, **{name: schema[name] for name in schema if name[:2] == "x-"})


def rule(param: str, message: str, *cases: Schema) -> Schema:
    """Return a rule between fields: one of these cases must hold. Aliases are resolved before.

    param: the field that the error names."""
    return {"anyOf": list(cases), "description": message, "x-param": param}


def without(*names: str) -> Schema:
    """Return the schema of an object in which these fields have no effect."""
    return {"properties": {name: NOTHING.get(name, NULL) for name in names}}


def having(**properties: Schema) -> Schema:
    """Return the schema of an object that has all of these fields."""
    return {"required": list(properties), "properties": properties}


def one_of(**kinds: Schema) -> list[Schema]:
    """Return the cases in which exactly one of these fields is given."""
    return [
        {"required": [name], "properties": {**dict.fromkeys(kinds, NULL), name: kind}}
        for name, kind in kinds.items()
    ]


NOTHING: dict[str, Schema] = {
    # Also null, of which `properties` says nothing.
    "response_format": {"properties": {"type": {"const": "text"}}},
    "continue_final_message": {"enum": [False, None]},
    "ignore_eos": {"enum": [False, None]},
    "echo": {"enum": [False, None]},
    "logprobs": {"enum": [False, None]},
    "top_logprobs": {"enum": [0, None]},
    "best_of": {"enum": [1, None]},
    "tool_choice": {"enum": ["none", "auto", None]},
    "function_call": {"enum": ["none", "auto", None]},
}
"""Values, besides null, with which a field has no effect."""
PART = {
    **fields(
        ("type", "text"),
        type={"const": "text", "description": '"text", which is all that this server reads'},
        text=TEXT,
    ),
    "description": '{"type": "text", "text": ...}',
}
CONTENT = either(TEXT, several(PART))
NAME: Schema = {
    **TEXT,
    "pattern": "^[A-Za-z0-9_.-]{1,64}$",
    "description": "a name of at most 64 letters, digits, underscores, dots and dashes",
}
JSON_SCHEMA: Schema = {**OBJECT, "description": "a JSON schema, an object"}
PARAMETERS: Schema = {
    **fields(
        properties={**OBJECT, "additionalProperties": either(OBJECT, TRUTH)},
        required=several(TEXT),
    ),
    "description": "a JSON schema, an object",
}
FUNCTION = fields(("name",), name=NAME, description=TEXT, parameters=PARAMETERS)
TOOL = fields(("function",), type={"const": "function"}, function=FUNCTION)
CALL = fields(("function",), function=fields(("name",), name=TEXT, arguments=either(TEXT, OBJECT)))
MESSAGE: Schema = {
    **fields(
        ("role",),
        role={"enum": list(ROLES)},
        content=CONTENT,
        name=TEXT,
        tool_call_id=TEXT,
        reasoning_content=TEXT,
        tool_calls=several(CALL),
    ),
    "allOf": [
        rule(
            "messages",
            "all messages but those of the assistant must have a content",
            having(role={"const": "assistant"}),
            having(content=CONTENT),
        )
    ],
    "description": '{"role": ..., "content": ...}',
}
BLOCKS_MESSAGE = fields(
    ("role", "content"),
    role={"enum": list(ROLES)},
    content=either(
        TEXT,
        several(
            either(
                PART,
                fields(
                    ("type", "name"),
                    type={"const": "tool_use"},
                    id=TEXT,
                    name=TEXT,
                    input=OBJECT,
                ),
                fields(
                    ("type",),
                    type={"const": "tool_result"},
                    tool_use_id=TEXT,
                    content=CONTENT,
                ),
                fields(("type",), type={"const": "thinking"}, thinking=TEXT),
                fields(("type",), type={"const": "redacted_thinking"}),
                description="a block of text, thinking, tool_use or tool_result",
            )
        ),
    ),
)
ANTHROPIC_TOOL = either(
    fields(
        ("name",), type={"enum": ["custom"]}, name=NAME, description=TEXT, input_schema=PARAMETERS
    ),
    # Of Anthropic's servers, as web_search_20250305.
    fields(("type",), type={**TEXT, "pattern": "_[0-9]{8}$"}),
    description='{"name": ..., "input_schema": ...} with a name of at most 64 letters, digits, '
    "underscores, dots and dashes",
)
ANTHROPIC_FORMAT = fields(("type", "schema"), type={"const": "json_schema"}, schema=JSON_SCHEMA)
THINKING = {
    **fields(("type",), type={"enum": ["enabled", "disabled", "adaptive"]}),
    "description": 'of the type "enabled", "disabled" or "adaptive"',
}
TGI_GRAMMAR = either(
    fields(("type", "value"), type={"const": "regex"}, value=WRITTEN),
    fields(("type", "value"), type={"const": "json"}, value=either(WRITTEN, JSON_SCHEMA)),
    fields(
        ("type", "value"),
        type={"const": "json_schema"},
        value=fields(("schema",), schema=JSON_SCHEMA),
    ),
    description='{"type": "json" or "regex", "value": ...}',
)
CHOICE = several(TEXT, 1)
BINDINGS: dict[str, Schema] = {
    "response_format": either(
        fields(("type",), type={"const": "text"}),
        fields(("type",), type={"const": "json_object"}, schema=JSON_SCHEMA, value=JSON_SCHEMA),
        fields(
            ("type", "json_schema"),
            type={"const": "json_schema"},
            json_schema=fields(("schema",), schema=JSON_SCHEMA),
        ),
        fields(("type", "schema"), type={"const": "json_schema"}, schema=JSON_SCHEMA),
        description='{"type": "text"}, {"type": "json_object"} or {"type": "json_schema", '
        '"json_schema": {"schema": {...}}}',
    ),
    "structured_outputs": {
        **fields(json=either(WRITTEN, JSON_SCHEMA), regex=WRITTEN, grammar=WRITTEN, choice=CHOICE),
        "additionalProperties": off(),
        "allOf": [
            rule(
                "structured_outputs",
                "structured_outputs must have exactly one of json, regex, grammar and choice",
                *one_of(json=either(TEXT, OBJECT), regex=TEXT, grammar=TEXT, choice=CHOICE),
            )
        ],
    },
    "regex": WRITTEN,
    "grammar": WRITTEN,
    "guided_json": either(WRITTEN, JSON_SCHEMA),
    "guided_regex": WRITTEN,
    "guided_grammar": WRITTEN,
    "guided_choice": CHOICE,
}
"""Fields that constrain the text. At most one may be given."""
FREE = without(*BINDINGS)["properties"]
REFUSED: dict[str, Schema] = {
    "adapters": off(),
    "allowed_token_ids": off(),
    "audio": off(),
    "bad_words": off([]),
    "chat_template": off(),
    "documents": off([]),
    "dry_multiplier": off(0),
    "dynatemp_range": off(0),
    "frequency_context_size": off(),
    "include_stop_str_in_output": off(False),
    "json_schema": off(),
    "min_tokens": off(0),
    "mirostat": off(0),
    "modalities": off(["text"]),
    "n_predict": off(-1),
    "presence_context_size": off(),
    "repetition_context_size": off(),
    "role_mapping": off(),
    "skip_special_tokens": off(True),
    "stop_token_ids": off([]),
    "suffix": off(""),
    "typical_p": off(1),
    "use_beam_search": off(False),
    "web_search_options": off(),
}
"""Fields of chats and completions that are not supported."""
REPETITION = within(*REPETITION_PENALTIES)
MAX_TOKENS = {
    **within(-1, kind=WHOLE),
    "description": "a whole number from 0 on, or -1 for no limit",
}
DRAWN: dict[str, Schema] = {
    "stream": TRUTH,
    "seed": within(-(2**63), 2**63 - 1, WHOLE),
    "max_tokens": MAX_TOKENS,
    "temperature": either({**NUMBER, "const": 0}, within(*TEMPERATURES)),
    "top_p": within(LEAST_TOP_P, 1),
    "top_k": {
        **within(-1, kind=WHOLE),
        "description": "a whole number from 1 on, or 0 or -1 for all tokens",
    },
    "speculative": either(
        TRUTH,
        {**fields(max=within(0, MOST_DRAFTED, WHOLE)), "additionalProperties": off()},
        description=f'true, false, or {{"max": 4}} with at most {MOST_DRAFTED}',
    ),
}
"""Fields that all requests for a text have in common."""


@functools.lru_cache(maxsize=8)
def requests(name: str | None, limits: Limits, ids: int, longest: int) -> dict[str, Schema]:
    """Return the schemas of all bodies by name.

    name: of the model; None where any name is taken. ids: number of token ids that prompts may
    have. longest: tokens of a prompt and its answer together.
    """
    stop = {**TEXT, "minLength": 1, "maxLength": limits.stop_length}
    stops = several(stop, 0, limits.stops)
    id_ = {**within(0, ids - 1, WHOLE), "description": f"a token id below {ids}"}
    prompt = {**several(id_, 1, MOST_CHARACTERS * longest), "x-context": longest}
    model: Schema = TEXT if name is None else {"enum": [name, *UNNAMED]}
    choices = range(1, limits.choices + 1)
    openai: dict[str, Schema] = {
        "model": model,
        **DRAWN,
        **REFUSED,
        **BINDINGS,
        "stream_options": fields(include_usage=TRUTH, include_drafted=TRUTH),
        "max_completion_tokens": same_as("max_tokens", MAX_TOKENS),
        "n": within(1, choices[-1], WHOLE),
        "best_of": within(1, choices[-1], WHOLE),
        "stop": either(stop, stops),
        "ignore_eos": TRUTH,
        "min_p": {**NUMBER, "minimum": 0, "exclusiveMaximum": 1},
        "presence_penalty": within(-LARGEST, LARGEST),
        "frequency_penalty": within(-LARGEST, LARGEST),
        "repetition_penalty": REPETITION,
        "repeat_penalty": same_as("repetition_penalty", REPETITION),
        "xtc_probability": within(0, 1),
        "xtc_threshold": within(0, 0.5),
        "logit_bias": {
            **OBJECT,
            "propertyNames": {"pattern": "^[0-9]{1,9}$"},
            # As far down as one likes, which bans a token.
            "additionalProperties": {**NUMBER, "maximum": LARGEST},
            "maxProperties": limits.biases,
            "description": f'at most {limits.biases} token ids with numbers, as in {{"42": -5}}',
        },
        "prediction": {
            **fields(("type", "content"), type={"const": "content"}, content=CONTENT),
            "description": '{"type": "content", "content": ...}',
        },
        "truncate_prompt_tokens": within(1, kind=WHOLE),
    }
    rules = [
        rule(
            "response_format",
            f"at most one of {', '.join(BINDINGS)} may be given: leave the others out",
            *(without(*(other for other in BINDINGS if other != each)) for each in BINDINGS),
        ),
        rule(
            "ignore_eos",
            "ignore_eos cannot be combined with a format or grammar, which ends the text",
            without("ignore_eos"),
            {"properties": FREE},
        ),
        rule(
            "best_of",
            "best_of must be n or 1: this server does not choose between texts",
            without("best_of"),
            *(having(best_of={"const": each}, n={"const": each}) for each in choices[1:]),
        ),
    ]
    chat = [
        rule(
            "top_logprobs",
            "top_logprobs needs logprobs to be true",
            without("top_logprobs"),
            having(logprobs={"const": True}),
        ),
        *(
            rule(
                choice,
                f"{choice} asks for a call: give {given}, and no format or grammar for the text",
                without(choice),
                {"required": [given], "properties": {**FREE, given: several({}, 1)}},
            )
            for choice, given in (("tool_choice", "tools"), ("function_call", "functions"))
        ),
    ]
    completions = [
        rule(
            "echo",
            "echo and logprobs cannot be combined: prompts have no logprobs here, leave one out",
            without("echo"),
            without("logprobs"),
        ),
        rule(
            "prompt",
            f"the number of prompts times n must be at most {choices[-1]}: send several requests",
            *(
                {
                    "properties": {
                        "n": either({**WHOLE, "maximum": choices[-1] // most}, NULL),
                        "prompt": either(TEXT, several(WHOLE), several({}, 0, most)),
                    }
                }
                for most in sorted({choices[-1] // each for each in choices})
            ),
        ),
    ]
    template = {
        "chat_template_kwargs": {**OBJECT, "properties": dict.fromkeys(sorted(RESERVED), off())},
        "thinking": THINKING,
        "reasoning_effort": TEXT,
        "enable_thinking": TRUTH,
        "add_generation_prompt": TRUTH,
        "continue_final_message": TRUTH,
    }
    ending = rule(
        "continue_final_message",
        "continue_final_message and add_generation_prompt cannot both be true: set one of them to "
        "false",
        without("continue_final_message"),
        {"properties": {"add_generation_prompt": {"enum": [False, None]}}},
    )
    called = fields(("name",), name=TEXT)
    calling = rule(
        "tool_choice",
        "tool_choice asks for a call: give tools, and no output format",
        {"properties": {"tool_choice": {"properties": {"type": {"enum": ["auto", "none"]}}}}},
        {
            "required": ["tools"],
            "properties": {
                "tools": several({}, 1),
                "output_format": NULL,
                "output_config": {"properties": {"format": NULL}},
            },
        },
    )
    anthropic = {
        "model": model,
        "system": CONTENT,
        "messages": several(BLOCKS_MESSAGE, 1),
        "tools": several(ANTHROPIC_TOOL, 0, limits.tools),
        "tool_choice": either(
            fields(
                ("type",),
                type={"enum": ["auto", "any", "none"]},
                disable_parallel_tool_use=TRUTH,
            ),
            fields(
                ("type", "name"),
                type={"const": "tool"},
                name=TEXT,
                disable_parallel_tool_use=TRUTH,
            ),
            description='of the type "auto", "any", "none", or "tool" with a name',
        ),
        "thinking": THINKING,
    }
    return {
        "ChatRequest": {
            **fields(
                ("messages",),
                **openai,
                logprobs=TRUTH,
                top_logprobs=within(0, TOP_LOGPROBS, WHOLE),
                tools=several(TOOL, 0, limits.tools),
                tool_choice=either(
                    {"enum": ["none", "auto", "required"]},
                    fields(("type", "function"), type={"const": "function"}, function=called),
                ),
                parallel_tool_calls=TRUTH,
                functions=several(FUNCTION, 0, limits.tools),
                function_call=either({"enum": ["none", "auto"]}, called),
                **template,
                messages=several(MESSAGE, 1),
            ),
            "allOf": [*chat, ending],
            "x-rules": rules,
        },
        "TextRequest": {
            **fields(
                ("prompt",),
                **openai,
                logprobs=either(within(0, TOP_LOGPROBS, WHOLE), {"const": False}),
                echo=TRUTH,
                add_special_tokens=off(True),
                add_generation_prompt=off(True),
                continue_final_message=off(False),
                tools=off([]),
                tool_choice=off("none", "auto"),
                functions=off([]),
                function_call=off("none", "auto"),
                prompt=either(
                    WRITTEN,
                    prompt,
                    several(WRITTEN, 1, choices[-1]),
                    several(prompt, 1, choices[-1]),
                    description="a string, a list of token ids, or a list of either",
                ),
            ),
            "allOf": completions,
            "x-rules": rules,
        },
        "MessagesRequest": {
            **fields(
                ("messages", "max_tokens"),
                **DRAWN,
                **anthropic,
                stop_sequences=same_as("stop", stops),
                container=off(),
                mcp_servers=off([]),
                output_config=fields(format=ANTHROPIC_FORMAT),
                output_format=ANTHROPIC_FORMAT,
            ),
            "allOf": [calling],
        },
        "CountRequest": {**fields(("messages",), **anthropic), "allOf": [calling]},
        "GenerateRequest": fields(
            ("inputs",),
            inputs=WRITTEN,
            stream=TRUTH,
            parameters=fields(
                max_new_tokens=same_as("max_tokens", MAX_TOKENS),
                **{name: DRAWN[name] for name in ("temperature", "top_p", "top_k", "seed")},
                repetition_penalty=REPETITION,
                frequency_penalty=openai["frequency_penalty"],
                stop=either(stop, stops),
                truncate=same_as("truncate_prompt_tokens", openai["truncate_prompt_tokens"]),
                details=TRUTH,
                do_sample=TRUTH,
                return_full_text=TRUTH,
                grammar=TGI_GRAMMAR,
                adapter_id=off(),
                best_of=off(1),
                decoder_input_details=off(False),
                top_n_tokens=off(0),
                typical_p=off(1),
                watermark=off(False),
            ),
        ),
        "TokenizeRequest": {
            **fields(
                model=model,
                content=WRITTEN,
                prompt=WRITTEN,
                tools=several(TOOL, 0, limits.tools),
                tool_choice=either({"enum": ["none", "auto"]}),
                **template,
                messages=several(MESSAGE, 1),
            ),
            "allOf": [
                ending,
                rule(
                    "content",
                    "give exactly one of messages, content and prompt",
                    *one_of(messages=several({}), content=TEXT, prompt=TEXT),
                ),
            ],
        },
        "DetokenizeRequest": fields(("tokens",), tokens=several(id_, 0, MOST_CHARACTERS * longest)),
    }
