"""The fields of requests: one table, by which bodies are checked and /openapi.json is written. A
field that is not named here is ignored, and so is an optional field that is null."""

from ..options import MOST_DRAFTED
from ..sampling.settings import LARGEST, LEAST_TOP_P, REPETITION_PENALTIES, TEMPERATURES
from ..text.chat import RESERVED
from .body import (
    NULL,
    NUMBER,
    OBJECT,
    TEXT,
    TRUTH,
    WHOLE,
    Schema,
    described,
    either,
    fields,
    having,
    named,
    off,
    one_of,
    rule,
    same_as,
    several,
    typed,
    within,
)
from .settings import Limits

UNNAMED = ("", "default_model", "dummy", "tgi")
"""Names that clients of mlx_lm.server and of Hugging Face's servers send for "no model named"."""
TOP_LOGPROBS = 20
MOST_CHARACTERS = 32
"""Maximum characters of a prompt per token of the context, where usual texts have 3 to 5. A longer
prompt is refused before it is tokenized, which takes a second for a million characters. A list of
token ids may have as many entries, since `truncate_prompt_tokens` may make it fit."""
NOTHING: dict[str, Schema] = {
    # Also null, of which `properties` says nothing.
    "response_format": {"properties": {"type": {"const": "text"}}},
    "top_logprobs": {"enum": [0, None]},
    **named("continue_final_message ignore_eos echo logprobs", {"enum": [False, None]}),
    **named("tool_choice function_call", {"enum": ["none", "auto", None]}),
}
"""Values, besides null, with which a field has no effect."""


def without(*names: str) -> Schema:
    """Return the schema of an object in which these fields have no effect."""
    return {"properties": {name: NOTHING.get(name, NULL) for name in names}}


# What several fields have in common.
WRITTEN = described("a non-blank string", {**TEXT, "pattern": r"\S"})
NAME = described(
    "a name of at most 64 letters, digits, underscores, dots and dashes",
    {**TEXT, "pattern": "^[A-Za-z0-9_.-]{1,64}$"},
)
JSON_SCHEMA = described("a JSON schema, an object", OBJECT)
ROLE: Schema = {"enum": ["system", "developer", "user", "assistant", "tool"]}
ONLY_TEXT = described('"text", which is all that this server reads', {"const": "text"})
PART = described('{"type": "text", "text": ...}', fields("type text", type=ONLY_TEXT, text=TEXT))
CONTENT = either(TEXT, several(PART))
REPETITION = within(*REPETITION_PENALTIES)
MAX_TOKENS = described("a whole number from 0 on, or -1 for no limit", within(-1, kind=WHOLE))
THINKING = described(
    'of the type "enabled", "disabled" or "adaptive"',
    fields("type", type={"enum": ["enabled", "disabled", "adaptive"]}),
)

# The tools and messages of a chat.
PARAMETERS = described(
    "a JSON schema, an object",
    fields(
        properties={**OBJECT, "additionalProperties": either(OBJECT, TRUTH)}, required=several(TEXT)
    ),
)
FUNCTION = fields("name", name=NAME, description=TEXT, parameters=PARAMETERS)
TOOL = fields("function", type={"const": "function"}, function=FUNCTION)
CALL = fields("function", function=fields("name", name=TEXT, arguments=either(TEXT, OBJECT)))
CALLED = fields("name", name=TEXT)
FUNCTION_CHOICE = typed("function", "function", function=CALLED)
ALLOWED = fields(
    "mode tools", mode={"enum": ["auto", "required"]}, tools=several(FUNCTION_CHOICE, 1)
)
MESSAGE = described(
    '{"role": ..., "content": ...}',
    fields(
        "role",
        role=ROLE,
        content=CONTENT,
        **named("name tool_call_id reasoning_content", TEXT),
        tool_calls=several(CALL),
    ),
    rule(
        "messages",
        "all messages but those of the assistant must have a content",
        having(role={"const": "assistant"}),
        having(content=CONTENT),
    ),
)
TEMPLATE: dict[str, Schema] = {
    "chat_template_kwargs": {**OBJECT, "properties": dict.fromkeys(sorted(RESERVED), off())},
    "thinking": THINKING,
    "reasoning_effort": TEXT,
    **named("enable_thinking add_generation_prompt continue_final_message", TRUTH),
    "messages": several(MESSAGE, 1),
}
"""Fields of a chat that decide its prompt."""
ENDING = rule(
    "continue_final_message",
    "continue_final_message and add_generation_prompt cannot both be true: set one of them to "
    "false",
    without("continue_final_message"),
    {"properties": {"add_generation_prompt": {"enum": [False, None]}}},
)
BLOCK = either(
    PART,
    typed(
        "document",
        "source",
        **named("title context", TEXT),
        source=either(
            typed("text", "data", data=TEXT), typed("content", "content", content=CONTENT)
        ),
    ),
    typed("tool_use", "name", id=TEXT, name=TEXT, input=OBJECT),
    typed("tool_result", "", tool_use_id=TEXT, content=CONTENT),
    typed("thinking", "", thinking=TEXT),
    typed("redacted_thinking"),
    description="a block of text, thinking, tool_use or tool_result, or a document of text",
)
BLOCKS_MESSAGE = fields("role content", role=ROLE, content=either(TEXT, several(BLOCK)))
ANTHROPIC_TOOL = either(
    fields("name", type={"enum": ["custom"]}, name=NAME, description=TEXT, input_schema=PARAMETERS),
    # Of Anthropic's servers, as web_search_20250305.
    fields("type", type={**TEXT, "pattern": "_[0-9]{8}$"}),
    description='{"name": ..., "input_schema": ...} with a name of at most 64 letters, digits, '
    "underscores, dots and dashes",
)
ANTHROPIC_CHOICE = either(
    fields("type", type={"enum": ["auto", "any", "none"]}, disable_parallel_tool_use=TRUTH),
    typed("tool", "name", name=TEXT, disable_parallel_tool_use=TRUTH),
    description='of the type "auto", "any", "none", or "tool" with a name',
)
# What constrains a text.
CHOICE = several(TEXT, 1)
ANTHROPIC_FORMAT = typed("json_schema", "schema", schema=JSON_SCHEMA)
TGI_GRAMMAR = either(
    typed("regex", "value", value=WRITTEN),
    typed("json", "value", value=either(WRITTEN, JSON_SCHEMA)),
    typed("json_schema", "value", value=fields("schema", schema=JSON_SCHEMA)),
    description='{"type": "json" or "regex", "value": ...}',
)
CONSTRAINTS: dict[str, Schema] = {
    "response_format": either(
        typed("text"),
        typed("json_object", "", schema=JSON_SCHEMA, value=JSON_SCHEMA),
        typed("json_schema", "json_schema", json_schema=fields("schema", schema=JSON_SCHEMA)),
        ANTHROPIC_FORMAT,
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
"""At most one of these fields may be given."""
UNCONSTRAINED = without(*CONSTRAINTS)["properties"]

# What is generated.
SAMPLED: dict[str, Schema] = {
    "seed": within(-(2**63), 2**63 - 1, WHOLE),
    "temperature": either({**NUMBER, "const": 0}, within(*TEMPERATURES)),
    "top_p": either({**NUMBER, "const": 0}, within(LEAST_TOP_P, 1)),
    "top_k": described(
        "a whole number from 1 on, or 0 or -1 for all tokens", within(-1, kind=WHOLE)
    ),
}
GENERATED: dict[str, Schema] = {
    **SAMPLED,
    "stream": TRUTH,
    "max_tokens": MAX_TOKENS,
    "speculative": either(
        TRUTH,
        {**fields(max=within(0, MOST_DRAFTED, WHOLE)), "additionalProperties": off()},
        description=f'true, false, or {{"max": 4}} with at most {MOST_DRAFTED}',
    ),
}
"""Fields of all requests for a text."""
COMPLETION: dict[str, Schema] = {
    **GENERATED,
    **CONSTRAINTS,
    "stream_options": fields(include_usage=TRUTH, include_drafted=TRUTH),
    "max_completion_tokens": same_as("max_tokens", MAX_TOKENS),
    "ignore_eos": TRUTH,
    "min_p": described(
        "a number from 0 to less than 1", {**NUMBER, "minimum": 0, "exclusiveMaximum": 1}
    ),
    **named("presence_penalty frequency_penalty", within(-LARGEST, LARGEST)),
    "repetition_penalty": REPETITION,
    "repeat_penalty": same_as("repetition_penalty", REPETITION),
    "xtc_probability": within(0, 1),
    "xtc_threshold": within(0, 0.5),
    "prediction": described(
        '{"type": "content", "content": ...}', typed("content", "content", content=CONTENT)
    ),
    "truncate_prompt_tokens": within(1, kind=WHOLE),
    **named("target_lang source_lang", TEXT),
    # What changes the text, and is not supported.
    **named("adapters allowed_token_ids audio chat_template frequency_context_size", off()),
    **named("json_schema presence_context_size repetition_context_size role_mapping", off()),
    **named("bad_words documents stop_token_ids", off([])),
    **named("dry_multiplier dynatemp_range min_tokens mirostat", off(0)),
    **named("include_stop_str_in_output use_beam_search", off(False)),
    "modalities": off(["text"]),
    "n_predict": off(-1),
    "skip_special_tokens": off(True),
    "typical_p": off(1),
    "web_search_options": off(),
}
"""Fields of chat and text completions that no limit of the server is about."""
COMPLETION_RULES = [
    rule(
        "response_format",
        f"at most one of {', '.join(CONSTRAINTS)} may be given: leave the others out",
        *(without(*(other for other in CONSTRAINTS if other != each)) for each in CONSTRAINTS),
    ),
    rule(
        "ignore_eos",
        "ignore_eos cannot be combined with a format or grammar, which ends the text",
        without("ignore_eos"),
        {"properties": UNCONSTRAINED},
    ),
]
CHAT_RULES = [
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
            {"required": [given], "properties": {**UNCONSTRAINED, given: several({}, 1)}},
        )
        for choice, given in (("tool_choice", "tools"), ("function_call", "functions"))
    ),
    ENDING,
]
ECHO = rule(
    "echo",
    "echo and logprobs cannot be combined: prompts have no logprobs here, leave one out",
    without("echo"),
    without("logprobs"),
)
ONE_TEXT = rule(
    "content",
    "give exactly one of messages, content and prompt",
    *one_of(messages=several({}), content=TEXT, prompt=TEXT),
)


def requests(name: str | None, limits: Limits, ids: int, longest: int) -> dict[str, Schema]:
    """Return the schemas of all bodies by name.

    name: of the model; None where any name is accepted. ids: number of token ids that prompts may
    have. longest: tokens of a prompt and its answer together."""
    stop = {**TEXT, "maxLength": limits.stop_length}
    stops = several(stop, 0, limits.stops)
    id_ = described(f"a token id below {ids}", within(0, ids - 1, WHOLE))
    prompt = several(id_, 1, MOST_CHARACTERS * longest)
    model: Schema = TEXT if name is None else {"enum": [name, *UNNAMED]}
    most = limits.choices
    choices = within(1, most, WHOLE)
    tools = several(TOOL, 0, limits.tools)
    completion: dict[str, Schema] = {
        **COMPLETION,
        "model": model,
        "n": choices,
        "best_of": choices,
        "stop": either(stop, stops),
        "logit_bias": {
            **OBJECT,
            "propertyNames": {"pattern": "^[0-9]{1,9}$"},
            # As far down as one likes, which bans a token.
            "additionalProperties": {**NUMBER, "maximum": LARGEST},
            "maxProperties": limits.biases,
            "description": f'at most {limits.biases} token ids with numbers, as in {{"42": -5}}',
        },
    }
    chat = fields(
        "messages",
        **completion,
        **TEMPLATE,
        logprobs=TRUTH,
        top_logprobs=within(0, TOP_LOGPROBS, WHOLE),
        tools=tools,
        tool_choice=either(
            {"enum": ["none", "auto", "required"]},
            FUNCTION_CHOICE,
            typed("allowed_tools", "allowed_tools", allowed_tools=ALLOWED),
        ),
        parallel_tool_calls=TRUTH,
        suffix=off(""),
        functions=several(FUNCTION, 0, limits.tools),
        function_call=either({"enum": ["none", "auto"]}, CALLED),
    )
    text = fields(
        "prompt",
        **completion,
        logprobs=either(within(0, TOP_LOGPROBS, WHOLE), {"const": False}),
        echo=TRUTH,
        **named("add_special_tokens add_generation_prompt", off(True)),
        suffix=TEXT,
        **named("tools functions", off([])),
        **named("tool_choice function_call", off("none", "auto")),
        continue_final_message=off(False),
        prompt=either(
            WRITTEN,
            prompt,
            several(WRITTEN, 1, most),
            several(prompt, 1, most),
            description="a string, a list of token ids, or a list of either",
        ),
    )
    prompts = rule(
        "prompt",
        f"the number of prompts times n must be at most {most}: send several requests",
        *(
            {
                "properties": {
                    "n": either({**WHOLE, "maximum": most // count}, NULL),
                    "prompt": either(TEXT, several(WHOLE), several({}, 0, count)),
                }
            }
            for count in sorted({most // n for n in range(1, most + 1)})
        ),
    )
    counted: dict[str, Schema] = {
        "model": model,
        "system": CONTENT,
        "messages": several(BLOCKS_MESSAGE, 1),
        "tools": several(ANTHROPIC_TOOL, 0, limits.tools),
        "tool_choice": ANTHROPIC_CHOICE,
        "thinking": THINKING,
    }
    messages = fields(
        "messages max_tokens",
        **GENERATED,
        **counted,
        stop_sequences=same_as("stop", stops),
        container=off(),
        mcp_servers=off([]),
        output_config=fields(format=ANTHROPIC_FORMAT),
        output_format=ANTHROPIC_FORMAT,
    )
    parameters = fields(
        **SAMPLED,
        max_new_tokens=same_as("max_tokens", MAX_TOKENS),
        repetition_penalty=REPETITION,
        frequency_penalty=COMPLETION["frequency_penalty"],
        stop=either(stop, stops),
        truncate=same_as("truncate_prompt_tokens", COMPLETION["truncate_prompt_tokens"]),
        **named("details do_sample return_full_text", TRUTH),
        grammar=TGI_GRAMMAR,
        adapter_id=off(),
        top_n_tokens=off(0),
        **named("best_of typical_p", off(1)),
        **named("decoder_input_details watermark", off(False)),
    )
    infill = fields(
        **SAMPLED,
        **named("input_prefix input_suffix prompt", TEXT),
        model=model,
        input_extra=several(fields("text", filename=TEXT, text=TEXT)),
        n_predict=same_as("max_tokens", MAX_TOKENS),
        stop=either(stop, stops),
        stream=TRUTH,
        response_fields=several(TEXT),
    )
    shown: dict[str, Schema] = {
        "model": model,
        "tools": tools,
        "tool_choice": {"enum": ["none", "auto"]},
        **TEMPLATE,
    }
    tokenized = fields(content=WRITTEN, prompt=WRITTEN, **shown)
    return {
        "ChatRequest": {**chat, "allOf": CHAT_RULES, "x-rules": COMPLETION_RULES},
        "TextRequest": {**text, "allOf": [ECHO, prompts], "x-rules": COMPLETION_RULES},
        "MessagesRequest": messages,
        "CountRequest": fields("messages", **counted),
        "GenerateRequest": fields("inputs", inputs=WRITTEN, stream=TRUTH, parameters=parameters),
        "TemplateRequest": {**fields("messages", **shown), "allOf": [ENDING]},
        "InfillRequest": infill,
        "TokenizeRequest": {**tokenized, "allOf": [ENDING, ONE_TEXT]},
        "DetokenizeRequest": fields("tokens", tokens=several(id_, 0, MOST_CHARACTERS * longest)),
    }
