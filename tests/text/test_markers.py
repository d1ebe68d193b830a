"""How models mark thoughts and calls, read from real tokenizers."""

from pathlib import Path

import pytest
from tokenizers import AddedToken
from tokenizers import Tokenizer as Loaded

from mlx_specdec.text.markers import Markers, markers_of
from mlx_specdec.text.tokenizer import Tokenizer, load_tokenizer

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
    thoughts = markers.think or (None, None)
    around = (calls and calls.begin, calls and calls.end)
    return (*thoughts, *around)


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
