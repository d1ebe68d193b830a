"""Streamed text: the steps add up to the text of the tokens, and no character is ever broken."""

import random
from collections.abc import Iterable, Sequence
from dataclasses import replace
from itertools import islice, takewhile
from typing import Any

import pytest
from tokenizers import Tokenizer

from mlx_specdec import Options, Proposal, Proposer, load, stream_generate

from ..support import tiny
from ..support.checkpoints import write_t5
from ..support.tokenizers import TEXT, byte_level, sentence_piece, unigram
from .support import ROOT

BYT5 = ROOT / "tests" / "fixtures" / "t5-text" / "byt5"


class Dictated(Proposer):
    """Proposes tokens in rounds of given sizes. With delta 1 all are accepted. After each round the
    target writes a token of its own."""

    def __init__(self, tokens: Iterable[int], sizes: Iterable[int]) -> None:
        self._tokens, self._sizes = iter(tokens), iter(sizes)

    def propose(self, committed: Any, limit: int, noise: Any) -> Proposal:
        size = min(next(self._sizes, 8), limit)
        return Proposal.one_hot([[*islice(self._tokens, size)]])


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    root = tmp_path_factory.mktemp("models")
    made = {}
    for name, write in {"bytes": byte_level, "unigram": unigram}.items():
        size = Tokenizer.from_file(str(write(root / name) / "tokenizer.json")).get_vocab_size()
        made[name] = tiny.write("llama", root / name, vocab_size=size)
    made["pieces"] = write_t5(sentence_piece(root / "pieces"), {"vocab_size": 512}, tokenizer=False)
    made["byt5"] = write_t5(root / "byt5", {"vocab_size": 384}, tokenizer=False)
    for file in BYT5.iterdir():
        (made["byt5"] / file.name).write_bytes(file.read_bytes())
    return {name: load(directory, dtype="float32") for name, directory in made.items()}


def streamed(
    pair: Any, prompt: list[int], tokens: list[int], sizes: list[int], **options: Any
) -> tuple[list[str], Any]:
    """Return the text of each step of a completion that has these tokens, and its result."""
    settings = Options(max_tokens=len(tokens), delta=1.0, num_draft=8, chat_template=False)
    dictated = Dictated(tokens, sizes)
    run = stream_generate(pair, prompt, replace(settings, **options), proposer=dictated)
    texts = [step.text for step in run]
    return texts, run.result()


def continuation(pair: Any, prompt: list[int], tokens: Sequence[int]) -> str:
    """Return what tokens add to the text of a prompt, which may end within a character."""
    ended = tokens[:-1] if tokens and tokens[-1] in pair.eos_token_ids else tokens
    before, whole = (pair.tokenizer.decode(ids) for ids in (prompt, [*prompt, *ended]))
    pairs = zip(before, whole, strict=False)
    return whole[sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], pairs)) :]


@pytest.mark.parametrize("name", ["bytes", "unigram", "pieces", "byt5"])
def test_steps_add_up_to_the_text_of_the_tokens(models: dict[str, Any], name: str) -> None:
    """Random tokens, and texts of several scripts, in rounds of random sizes."""
    pair, draw = models[name], random.Random(name)
    size = pair.tokenizer.size
    texts = [pair.tokenizer.encode(text) for text in ["\n".join(TEXT[:5]), *TEXT[:5]]]
    for tokens in [*texts, *(draw.choices(range(size), k=40) for _ in range(12))]:
        kept = [token for token in tokens if token not in pair.eos_token_ids]
        prompt = draw.choices(range(2, size), k=6)
        if name in ("pieces", "byt5"):
            pieces, result = streamed(pair, [3, 1], kept, draw.choices(range(8), k=40))
            expected = continuation(pair, [], result.tokens)
        else:
            pieces, result = streamed(pair, prompt, kept, draw.choices(range(8), k=40))
            expected = continuation(pair, prompt, result.tokens)
        assert "".join(pieces) == result.text == expected
        assert result.stats.accepted > len(result.tokens) / 3


@pytest.mark.parametrize("name", ["bytes", "unigram", "pieces", "byt5"])
def test_a_stop_string_cuts_at_its_first_occurrence_wherever_rounds_begin(
    models: dict[str, Any], name: str
) -> None:
    pair, draw = models[name], random.Random(name)
    for _ in range(8):
        tokens = draw.choices(pair.tokenizer.encode(TEXT[0])[:-1], k=60)
        sizes = draw.choices(range(8), k=40)
        prompt = pair.tokenizer.encode("Les")[:-1]
        _, whole = streamed(pair, prompt, tokens, sizes)
        begin = draw.randrange(len(whole.text) // 2)
        stops = [whole.text[at : at + draw.choice([1, 2, 5])] for at in (begin, begin + 9)]
        stops = [stop for stop in stops if stop]
        pieces, result = streamed(pair, prompt, tokens, sizes, stop=stops)
        places = [whole.text.index(stop) for stop in stops]
        assert "".join(pieces) == result.text == whole.text[: min(places)]
        assert result.finish_reason == "stop"
