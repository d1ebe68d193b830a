"""How models mark thoughts and calls, read from real tokenizers."""

from pathlib import Path

import pytest
from tokenizers import AddedToken
from tokenizers import Tokenizer as Loaded

from mlx_specdec.text.markers import NONE, Markers, markers_of
from mlx_specdec.text.stream import TextStream
from mlx_specdec.text.tokenizer import Tokenizer, load_tokenizer
from mlx_specdec.text.tool_formats import parser_names

from ..support.tokenizers import byte_level

QWEN = "<tool_call>{{ tool_call.name }}"


def tokenizer_of(
    directory: Path, added: tuple[str, ...], template: str = QWEN, special: bool = True
) -> Tokenizer:
    byte_level(directory, chat_template=template)
    file = str(directory / "tokenizer.json")
    tokenizer = Loaded.from_file(file)
    tokens = [AddedToken(each, special=special, normalized=False) for each in added]
    (tokenizer.add_special_tokens if special else tokenizer.add_tokens)(tokens)
    tokenizer.save(file)
    return load_tokenizer(directory, kind="decoder-only")


def texts(markers: Markers) -> tuple[str | None, ...]:
    calls = markers.calls
    own = (markers.think_begin, markers.think_end, calls and calls.begin, calls and calls.end)
    return tuple(None if each is None else each.text for each in own)


THINK = ("<think>", "</think>")
CALL = ("<tool_call>", "</tool_call>")


@pytest.mark.parametrize(
    ("added", "template", "expected", "name"),
    [
        ((*THINK, *CALL), QWEN, (*THINK, *CALL), "json_tools"),
        (CALL, "no tools", (None,) * 4, None),
        (THINK, "", (*THINK, None, None), None),
        (("<|channel>", "<channel|>"), "", ("<|channel>thought", "<channel|>", None, None), None),
        (("[TOOL_CALLS]", "[ARGS]"), "[TOOL_CALLS]", (None, None, "[TOOL_CALLS]", ""), "mistral"),
        (("<|open|>", "<|close|>", "<|sep|>", "<|end_of_msg|>"), "", (None,) * 4, None),
    ],
    ids=lambda each: str(each)[:30],
)
def test_marks_are_distinguished_from_template_and_vocabulary(
    tmp_path: Path,
    added: tuple[str, ...],
    template: str,
    expected: tuple[str | None, ...],
    name: str | None,
) -> None:
    tokenizer = tokenizer_of(tmp_path, added, template or "{{ messages }}")
    markers = markers_of(tokenizer)
    assert texts(markers) == expected
    assert (markers.calls and markers.calls.name) == name
    known = any(expected)
    assert {*markers.special.values()} == ({*added} if known else set())
    assert markers_of(tokenizer) is markers
    without = markers.without_calls()
    assert texts(without) == (*expected[:2], None, None)
    assert {*without.special.values()} == (
        {*added} - {*CALL, "[TOOL_CALLS]", "[ARGS]"} if expected[0] else set()
    )


DEEPSEEK = ("<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>")
FENCED = f"{{{{ '{DEEPSEEK[0]}<｜tool▁call▁begin｜>' + tool.type + '\\n' + '```json' + '\\n' }}}}"
LLAMA = 'Respond as {"name": function name, "parameters": dictionary of argument name and value}.'
GRANITE = "respond only with <|tool_call|> followed by a JSON list of tools used."
PHI = "{{ '<|tool|>' + message['tools'] + '<|/tool|>' }}"
SEED = "<seed:tool_call>\\n<function=f>\\n<parameter=p>v</parameter>\\n"


@pytest.mark.parametrize(
    ("template", "name", "begin", "end"),
    [
        (FENCED, "deepseek_v3", *DEEPSEEK),
        (f"{{{{ '{DEEPSEEK[0]}<｜tool▁call▁begin｜>' + name }}}}", "deepseek_v31", *DEEPSEEK),
        (LLAMA, "llama3_json", "<|python_tag|>", ""),
        (GRANITE, "granite", "<|tool_call|>", ""),
        (PHI, "phi4_mini_json", "<|tool_call|>", "<|/tool_call|>"),
        ("formatted as functools[{}]", "phi4_mini_json", "<|tool_call|>", "<|/tool_call|>"),
        (f"{{{{ '{SEED}' }}}}", "seed_oss", "<seed:tool_call>", "</seed:tool_call>"),
    ],
    ids=lambda each: str(each)[:20],
)
def test_formats_that_mlx_lm_does_not_know_are_known_by_their_templates(
    tmp_path: Path, template: str, name: str, begin: str, end: str
) -> None:
    seed = ("<seed:think>", "</seed:think>")
    markers = markers_of(tokenizer_of(tmp_path, (begin, *seed), template))
    assert texts(markers) == (*seed, begin, end)
    assert markers.calls and markers.calls.name == name
    assert {begin, *seed} == {*markers.special.values()}


def test_a_format_may_be_named(tmp_path: Path) -> None:
    tokenizer = tokenizer_of(tmp_path, CALL)
    for parser, name in (("granite", "granite"), ("hermes", "json_tools"), ("glm47", "glm47")):
        calls = markers_of(tokenizer, parser).calls
        assert parser in parser_names() and calls is not None and calls.name == name
    calls = markers_of(tokenizer).calls
    assert calls is not None and calls.name == "json_tools"
    assert "kimi_k3" not in parser_names() and parser_names() == sorted(parser_names())


def test_a_prompt_may_leave_a_thought_open(tmp_path: Path) -> None:
    tokenizer = tokenizer_of(tmp_path, THINK, special=False)
    markers = markers_of(tokenizer)
    assert markers.special == {}
    for prompt, opened in (("a", False), ("<think>a", True), ("<think>a</think>b", False)):
        assert markers.thinks_after(tokenizer.encode(prompt)) is opened
    assert not NONE.thinks_after([1, 2])


def test_special_tokens_are_printed_where_they_are_part_of_the_text(tmp_path: Path) -> None:
    tokenizer = tokenizer_of(tmp_path, THINK)
    text = "é<think>naïve café</think> — déjà"
    ids = tokenizer.encode(text)
    shown = markers_of(tokenizer).special
    for size in (1, 2, 5, len(ids)):
        stream = TextStream(tokenizer, shown)
        pieces = [stream.push(ids[at : at + size]) for at in range(0, len(ids), size)]
        assert "".join([*pieces, stream.finish()]) == text
    plain = TextStream(tokenizer)
    assert plain.push(ids) + plain.finish() == text.replace("<think>", "").replace("</think>", "")
