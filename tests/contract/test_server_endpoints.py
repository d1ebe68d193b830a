"""Which models a server has, what it tells about them, and the bodies that it reads."""

import contextlib
import json
import re
from typing import Any

import pytest

from .several import PROMPT, Several
from .support import post

COMPLETIONS, CHATS = "/v1/completions", "/v1/chat/completions"
USER = {"role": "user", "content": "x"}


def test_a_model_has_other_names_and_unknown_names_are_not_found(several: Several) -> None:
    server = several.server
    for name in ("tiny", "my/tiny", "tiny:latest"):
        assert server.ok(COMPLETIONS, model=name, prompt="x", max_tokens=1)["model"] == "tiny"
    assert server.get("/v1/models/my/tiny").json["id"] == "tiny"
    assert server.get("/props?model=my/tiny").json["model_alias"] == "tiny"
    # The first model answers requests that name none.
    assert server.ok(COMPLETIONS, prompt="x", max_tokens=1)["model"] == "tiny"
    bodies: dict[str, dict[str, Any]] = {
        COMPLETIONS: {"prompt": "x"},
        CHATS: {"messages": []},
        "/v1/messages": {"messages": []},
        "/tokenize": {"prompt": "x"},
    }
    for path, body in bodies.items():
        for unknown in ("../../etc", "other/tiny"):
            assert server.ask(path, {**body, "model": unknown}).status == 404
    for refused in (
        server.ask(COMPLETIONS, {"prompt": "x", "model": 5}),
        server.ask(COMPLETIONS, {"prompt": "x", "model": "other"}),
        server.get("/v1/models/other"),
    ):
        assert refused.status == 404 and refused.json["error"]["code"] == "model_not_found"
        assert "ask for tiny, counted, chat, " in refused.json["error"]["message"]


def test_the_page_is_one_file_and_asks_this_server_alone(several: Several) -> None:
    answer = several.server.get("/")
    assert answer.status == 200 and answer.headers["content-type"].startswith("text/html")
    assert "connect-src 'self'" in answer.headers["content-security-policy"]
    assert b"://" not in answer.body


def test_what_is_described_is_there(several: Several) -> None:
    server = several.server
    answer = server.get("/openapi.json").json
    for described, operations in answer["paths"].items():
        for path in {described, described.removeprefix("/v1")}:
            for method in operations:
                body = b"{" if method == "post" else None
                found = server.ask(re.sub(r"{\w+}", "x", path), body, method=method.upper())
                assert b"this path" not in found.body, (method, path)
    references = re.findall(r'"\$ref": "#/components/schemas/(\w+)"', json.dumps(answer))
    schemas = answer["components"]["schemas"]
    assert {*references} == schemas.keys()
    # Unsupported fields are described by the values that change nothing.
    fields = schemas["TextRequest"]["properties"]
    assert fields["min_tokens"] == {"enum": [0, None]} and fields["adapters"] == {"enum": [None]}
    assert fields["n"]["anyOf"][0] == {"type": "integer", "minimum": 1}
    assert schemas["Speculative"]["additionalProperties"] is False
    assert "prompt" in schemas["TextRequest"]["required"]
    for path, media in (
        ("/v1/completions", "text/event-stream"),
        ("/api/chat", "application/x-ndjson"),
    ):
        described = answer["paths"][path]["post"]["responses"]["200"]["content"]
        assert described.keys() == {"application/json", media}


def test_every_answer_has_an_id_and_errors_say_what_to_do(several: Several) -> None:
    server = several.server
    answers = [
        server.get("/health"),
        server.get("/nothing"),
        server.ask(CHATS, {}),
        server.get(CHATS),
    ]
    ids = {answer.headers["x-request-id"] for answer in answers}
    assert len(ids) == 4 and {answer.headers["request-id"] for answer in answers} == ids
    assert [answer.status for answer in answers] == [200, 404, 400, 405]
    for answer in answers[1:]:
        assert answer.json["error"]["type"] == "invalid_request_error"
    said = server.ask("/", b"", method="PUT").json["error"]["message"]
    assert said == "this path does not take PUT: use GET, HEAD, POST"
    assert answers[0].json["status"] == "ok"
    assert server.ask("/health", method="HEAD").status == 200


def test_a_model_is_listed_as_clients_read_it(several: Several) -> None:
    server = several.server
    server.ok(COMPLETIONS, model="tiny", prompt="x", max_tokens=1)
    listed = server.get("/v1/models").json
    one, other = listed["data"][0], listed["models"][0]
    assert one["id"] == one["display_name"] == other["slug"] == "tiny"
    size = one["context_length"]
    assert size == one["max_model_len"] == one["meta"]["n_ctx_train"] == other["context_window"]
    assert one["status"]["value"] == "loaded" and one["meta"]["size"] > 0
    # One missing field drops Codex's complete catalogue.
    assert {"display_name", "shell_type", "visibility", "supported_in_api", "priority"} <= {*other}
    assert {"truncation_policy", "base_instructions", "supported_reasoning_levels"} <= {*other}
    props = server.get("/props").json
    defaults = props["default_generation_settings"]
    assert (defaults["n_ctx"], defaults["max_tokens"]) == (size, 24)
    assert props["modalities"] == {"vision": False, "audio": False}
    assert props["chat"] == "role prefixes" and "/" not in props["model_alias"]
    assert (props["total_slots"], props["n_ctx"], props["rule"]) == (4, 4096, "coupled")
    assert (props["num_draft"], props["has_draft_model"]) == (2, True)


def test_tokens_and_texts(several: Several) -> None:
    server, ids = several.server, several.ids("déjà vu")
    for body in ({"content": "déjà vu"}, {"prompt": "déjà vu"}):
        answer = server.ok("/tokenize", **body)
        assert (answer["tokens"], answer["count"], answer["max_model_len"]) == (ids, len(ids), 4096)
    answer = server.ok("/tokenize", messages=[USER])
    assert answer["tokens"] == several.ids("USER: x\nASSISTANT:")
    assert server.ok("/detokenize", tokens=ids)["content"] == "déjà vu"
    for wrong in ({}, {"content": "a", "prompt": "a"}, {"messages": [USER], "content": 5}):
        assert server.ask("/tokenize", wrong).status == 400
    for tokens in (None, "x", [1.5], [-1], [10**9]):
        assert server.ask("/detokenize", {"tokens": tokens}).status == 400
    assert server.ask("/apply-template", {}).status == 400
    for messages in (None, [], [{"role": "x"}]):
        assert server.ask("/apply-template", {"messages": messages}).status == 400


def test_each_model_has_its_own_figures(several: Several) -> None:
    server, body = several.server, {"model": "counted", "prompt": PROMPT}
    reply = [server.ok(COMPLETIONS, **body, max_tokens=10 + more) for more in range(3)]
    answer = server.get("/metrics")
    assert answer.headers["content-type"] == "text/plain; version=0.0.4; charset=utf-8"
    lines = answer.body.decode().splitlines()
    heads = [line for line in lines if line.startswith("# TYPE")]
    assert len({*heads}) == len(heads)
    values = server.metrics()
    assert all(re.fullmatch(r"[a-z0-9_:]+(\{[^}]*\})?", name) for name in values)
    drafted = sum(one["timings"]["draft_n"] for one in reply)
    accepted = sum(one["timings"]["draft_n_accepted"] for one in reply)
    assert drafted > accepted > 0
    labels = '{model_name="counted"}'
    for name, value in {
        f"vllm:prompt_tokens_total{labels}": sum(one["usage"]["prompt_tokens"] for one in reply),
        f"vllm:generation_tokens_total{labels}": 33,
        f"vllm:spec_decode_num_draft_tokens_total{labels}": drafted,
        f"vllm:spec_decode_num_accepted_tokens_total{labels}": accepted,
        f"vllm:request_success_total{labels}": 3,
        'mlx_specdec:model_loaded{model_name="counted"}': 1,
        'mlx_specdec:model_requests_running{model_name="counted"}': 0,
        'mlx_specdec:model_requests_waiting{model_name="counted"}': 0,
    }.items():
        assert values[name] == value, name
    listed = {one["id"]: one["meta"]["size"] for one in server.get("/v1/models").json["data"]}
    assert values['mlx_specdec:model_bytes{model_name="counted"}'] == listed["counted"]


UNREAD: list[tuple[bytes, str]] = [
    (b"", "the body: Field required"),
    (b"{", "cannot be read as JSON"),
    ('{"a": "∀"}'.encode("utf-16"), "invalid start byte"),
    (b'{"a": ' + b"1" * 5000 + b"}", "too many digits"),
    (b"[" * 50_000, "nested too deeply"),
    (b'{"a": NaN}', "NaN is no number"),
    (b"[1]", "must be a JSON object"),
]


def test_a_body_that_is_no_json_is_refused(several: Several) -> None:
    for body, words in UNREAD:
        answer = several.server.ask("/tokenize", body)
        assert answer.status == 400 and words in answer.json["error"]["message"], body[:20]
    plain = b'\xef\xbb\xbf{"content": "\\u00e9\\ud83d\\ude42"}'
    assert several.server.ask("/tokenize", plain).json["tokens"] == several.ids("é🙂")
    packed = several.server.ask("/tokenize", b"{}", Content_Encoding="gzip")
    assert packed.status == 415
    # A number beyond the range of floats is read as the largest float.
    large = several.server.ask(COMPLETIONS, b'{"prompt": "x", "temperature": 1e999}')
    assert large.status == 400 and "temperature: " in large.json["error"]["message"]


def test_requests_cannot_replace_the_chat_template(several: Several) -> None:
    for name in ("chat_template", "tools", "documents", "messages", "continue_final_message"):
        body = {"messages": [USER], "chat_template_kwargs": {name: "{{ a }}"}}
        answer = several.server.ask(CHATS, {"model": "in-place", **body})
        said = answer.json["error"]["message"]
        assert answer.status == 400
        assert said.startswith(f"{name} is not supported")


def test_a_body_has_a_bound(several: Several) -> None:
    server, most = several.server, 16 << 20
    large = json.dumps({"model": "short", "prompt": "x" * (most - 40)}).encode()
    large += b" " * (most - len(large))
    assert server.ask(COMPLETIONS, large + b" ").status == 413
    assert server.ask(COMPLETIONS, large).status == 400


@pytest.mark.parametrize(
    ("sent", "status"),
    [
        (b"GET / HTTP/1.1\r\nHost: localhost\r\n" + b"X-Many: a\r\n" * 20_000 + b"\r\n", 400),
        (post("/v1/completions%0d%0aX-Bad:%201", {}), 404),
        (b"nonsense\r\n\r\n", 400),
    ],
    ids=["headers", "path", "nonsense"],
)
def test_nonsense_is_refused(several: Several, sent: bytes, status: int) -> None:
    with several.server.connect() as connection:
        with contextlib.suppress(ConnectionError):
            connection.sendall(sent)
        assert f"HTTP/1.1 {status}".encode() in connection.recv(65536)
    assert several.server.get("/health").status == 200
