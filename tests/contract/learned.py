"""A tiny model that has learned answers by heart, so that a real server writes any text.

The weights are made by hand. The answer follows from the last token of the prompt alone: each
answer has a cue, which is a token, and each token of an answer has one successor."""

from collections.abc import Mapping, Sequence
from pathlib import Path

import mlx.core as mx
import numpy as np
from tokenizers import AddedToken, Tokenizer

from ..support import tiny
from ..support.tokenizers import byte_level

WIDTH = 128
"""Size of the hidden states. Each token has a code of this many random signs, so that the codes of
two tokens are nearly orthogonal."""
END = 1
"""The token that ends a sequence."""


def pieces_of(answer: str, taken: set[str], least: int) -> list[str]:
    """Split an answer into pieces of at least some characters that differ from each other and from
    all taken ones. Add them to the taken ones."""
    pieces, begin = list[str](), 0
    for end in range(1, len(answer) + 1):
        if end - begin >= least and answer[begin:end] not in taken:
            pieces.append(answer[begin:end])
            taken.add(answer[begin:end])
            begin = end
    rest = answer[begin:]
    while rest in taken:
        rest = pieces.pop() + rest
    if rest:
        pieces.append(rest)
        taken.add(rest)
    return pieces


def learned(
    directory: Path,
    answers: Mapping[str, str],
    template: str,
    *,
    tokens: Sequence[str] = (),
    least: int = 4,
    **settings: object,
) -> Path:
    """Write a model that gives each of these answers to its cue, whatever else is in the prompt.

    Args:
        answers: The answers by their cues, in ASCII. Each cue becomes a token. The first answer is
            given to all prompts that do not end with a cue.
        template: The chat template. Its output must end with the cue.
        tokens: Further special tokens.
        least: Smallest number of characters of a token of an answer.
        settings: Further entries of tokenizer_config.json.
    """
    byte_level(directory, chat_template=template, **settings)
    file = str(directory / "tokenizer.json")
    tokenizer = Tokenizer.from_file(file)
    tokenizer.add_special_tokens([AddedToken(token, normalized=False) for token in tokens])
    taken = {*tokenizer.get_vocab(), *answers}
    chains = {cue: pieces_of(answer, taken, least) for cue, answer in answers.items()}
    added = [*answers, *(piece for chain in chains.values() for piece in chain)]
    tokenizer.add_tokens([AddedToken(piece, normalized=False) for piece in added])
    tokenizer.save(file)
    size = tokenizer.get_vocab_size()
    tiny.write("llama", directory, vocab_size=size, hidden_size=WIDTH, num_hidden_layers=1)
    weights = mx.load(str(directory / "model.safetensors"))
    codes = np.random.default_rng(7).choice(np.float32([-1, 1]), (size, WIDTH))
    # All tokens that neither are cues nor belong to an answer have one code, and so do all last
    # tokens of answers.
    ids = {piece: tokenizer.token_to_id(piece) for piece in added}
    rows = np.repeat(codes[:1], size, axis=0)
    rows[[*ids.values()]] = codes[[*ids.values()]]
    heads = np.zeros((size, WIDTH), np.float32)
    for place, (cue, chain) in enumerate(chains.items()):
        rows[ids[chain[-1]]] = codes[END]
        before = [rows[ids[cue]], *(rows[ids[piece]] for piece in chain[:-1])]
        for piece, code in zip(chain, before, strict=True):
            heads[ids[piece]] = code
        if not place:
            heads[ids[chain[0]]] += codes[0]
    heads[END] = codes[END]
    for name, weight in weights.items():
        if "o_proj" in name or "down_proj" in name:
            weights[name] = mx.zeros_like(weight)
        elif "norm" in name:
            weights[name] = mx.ones_like(weight)
        elif "embed_tokens" in name:
            weights[name] = mx.array(rows)
        elif "lm_head" in name:
            weights[name] = mx.array(heads)
    mx.save_safetensors(str(directory / "model.safetensors"), weights, {"format": "mlx"})
    return directory
