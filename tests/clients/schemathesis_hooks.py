"""For schemathesis: makes bodies sensible where the keywords of JSON Schema cannot ask for it.

What fits the schema of /openapi.json keeps what it asks for, but for texts in other languages
(expressions, grammars, schemas) and functions by their names. What does not fit stays.
"""

import json
import os
import urllib.request
from typing import Any

import jsonschema_rs
import schemathesis

GOOD: dict[str, Any] = {
    "response_format": {"type": "json_object"},
    "structured_outputs": {"choice": ["a", "b"]},
    "regex": "[ab]{3}",
    "grammar": 'root ::= "a" | "b"',
    "json": {"type": "integer"},
    "choice": ["a", "b"],
}
FORMAT = {"type": "json_schema", "schema": {"type": "boolean"}}
with urllib.request.urlopen(f"{os.environ['MLX_SPECDEC_ROOT']}/openapi.json") as answer:
    SCHEMAS = json.load(answer)["components"]["schemas"]
FITTING = {
    name: jsonschema_rs.Draft202012Validator(
        {"$ref": f"#/components/schemas/{name}", "components": {"schemas": SCHEMAS}}
    )
    for name in SCHEMAS
}


@schemathesis.hook
def before_call(context: Any, case: Any, **more: Any) -> None:
    """Changes what is sent."""
    content = case.operation.definition.raw.get("requestBody", {}).get("content")
    if content is None or not isinstance(case.body, dict):
        return
    name = content["application/json"]["schema"]["$ref"].rpartition("/")[2]
    if FITTING[name].is_valid(case.body):
        case.body = _sensible(name, case.body)


def _sensible(name: str, body: dict[str, Any]) -> dict[str, Any]:
    made = dict(body)
    bound = [each for each in GOOD if made.get(each) is not None]
    for each in bound:
        del made[each]
    if bound:
        made.pop("ignore_eos", None)
        made[bound[0]] = GOOD[bound[0]]
    made.pop("best_of", None)
    if made.get("tools"):
        # Arguments may be bound to their schemas.
        made["tools"] = [_plain(tool) for tool in made["tools"]]
    if (made.get("tool_choice") or {}) not in ("none", "auto", "required") or bound:
        made.pop("tool_choice", None)
    if isinstance(made.get("output_config"), dict) and made["output_config"].get("format"):
        made["output_config"] = {"format": FORMAT}
    if name == "GenerateRequest" and (made.get("parameters") or {}).get("grammar"):
        made["parameters"] = {**made["parameters"], "grammar": {"type": "regex", "value": "a*"}}
    made.pop("chat_template_kwargs", None)
    if name in ("ResponsesRequest", "InputTokensRequest"):
        # A choice needs a tool that can be called, and no format beside it.
        made.pop("tool_choice", None)
        if name == "ResponsesRequest":
            # Without a limit an answer goes on to the end of the context.
            made.setdefault("max_output_tokens", 16)
        if bound or made.get("text"):
            made["text"] = None if bound else {"format": FORMAT}
    return made


def _plain(tool: dict[str, Any]) -> dict[str, Any]:
    names = ("parameters", "input_schema")
    plain = {name: each for name, each in tool.items() if name not in names}
    return {**plain, "function": _plain(tool["function"])} if "function" in tool else plain
