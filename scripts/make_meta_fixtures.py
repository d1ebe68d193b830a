"""Write tests/fixtures/meta: tiny Llamas and what they compute.

    python scripts/make_meta_fixtures.py tests/fixtures

Needs torch, sentencepiece and tiktoken; the tests that read the fixtures need none of them but
sentencepiece. The reference below rotates neighbouring pairs, as Meta's own code does and Hugging
Face's does not, and shares nothing with the package.
"""

from __future__ import annotations

import base64
import json
import math
import sys
from collections import Counter
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

import numpy as np
import regex
import sentencepiece
import tiktoken
import torch

TEXT = """Once upon a time there was a little girl named Lily, who had 3 cats and 14 dogs.
She didn't know what to do, so she went to the park and played with her friends all day.
The cats were there too; the dogs weren't. "Where are they?" she asked. They had gone home.
    for index in range(10):
        print(index, "times")
"""
TRIALS = [
    "Once upon a time",
    " Lily's  cats\n\n  went home, 12345 times!",
    "naïve 漢字 🙂",
    "x = range(10)\n\tprint(x)",
    "",
]
LLAMA3_PATTERN = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
Weights = dict[str, torch.Tensor]


@dataclass
class Shape:
    """Sizes of one model and what its rotation needs."""

    vocabulary: int
    inner: int
    width: int = 32
    layers: int = 2
    heads: int = 4
    kv_heads: int = 4
    epsilon: float = 1e-5
    theta: float = 10000.0
    scaled: bool = False


def random_weights(shape: Shape, dtype: torch.dtype, seed: int) -> Weights:
    """Meta's names, weights large enough for logits that differ."""
    generator = torch.Generator().manual_seed(seed)

    def matrix(rows: int, columns: int) -> torch.Tensor:
        values = torch.randn(rows, columns, generator=generator)
        return (values * 1.5 / math.sqrt(columns)).to(dtype)

    def norm() -> torch.Tensor:
        return (1 + 0.3 * torch.randn(shape.width, generator=generator)).to(dtype)

    keys = shape.width // shape.heads * shape.kv_heads
    found = {"tok_embeddings.weight": matrix(shape.vocabulary, shape.width) * 4}
    for layer in range(shape.layers):
        sizes = {
            "attention.wq": (shape.width, shape.width),
            "attention.wk": (keys, shape.width),
            "attention.wv": (keys, shape.width),
            "attention.wo": (shape.width, shape.width),
            "feed_forward.w1": (shape.inner, shape.width),
            "feed_forward.w2": (shape.width, shape.inner),
            "feed_forward.w3": (shape.inner, shape.width),
        }
        for name, size in sizes.items():
            found[f"layers.{layer}.{name}.weight"] = matrix(*size)
        for name in ("attention_norm", "ffn_norm"):
            found[f"layers.{layer}.{name}.weight"] = norm()
    found["norm.weight"] = norm()
    found["output.weight"] = matrix(shape.vocabulary, shape.width) * 2
    return found


def frequencies(shape: Shape) -> torch.Tensor:
    """Turns per position of each pair of a head; stretched as Llama 3.1's where asked."""
    width = shape.width // shape.heads
    plain = [shape.theta ** (-2 * pair / width) for pair in range(width // 2)]
    if not shape.scaled:
        return torch.tensor(plain)
    found = []
    for frequency in plain:
        turns = 8192 * frequency / (2 * math.pi)
        if turns < 1:
            found.append(frequency / 8)
        elif turns > 4:
            found.append(frequency)
        else:
            share = (turns - 1) / 3
            found.append((1 - share) * frequency / 8 + share * frequency)
    return torch.tensor(found)


def rotate(heads: torch.Tensor, turns: torch.Tensor) -> torch.Tensor:
    """heads: positions x heads x width; rows 2i and 2i + 1 are one point in the plane."""
    first, second = heads[..., 0::2], heads[..., 1::2]
    cosine, sine = turns.cos()[:, None], turns.sin()[:, None]
    result = torch.empty_like(heads)
    result[..., 0::2] = first * cosine - second * sine
    result[..., 1::2] = first * sine + second * cosine
    return result


def normed(values: torch.Tensor, weight: torch.Tensor, epsilon: float) -> torch.Tensor:
    """Divided by the root of the mean square."""
    return values / (values.square().mean(-1, keepdim=True) + epsilon).sqrt() * weight


def log_probabilities(shape: Shape, weights: Weights, tokens: torch.Tensor) -> torch.Tensor:
    """Of a whole text, position by position, in float64."""
    of = {name: value.double() for name, value in weights.items()}
    count, width = len(tokens), shape.width // shape.heads
    turns = torch.arange(count).double()[:, None] * frequencies(shape).double()
    hidden = of["tok_embeddings.weight"][tokens]
    for layer in range(shape.layers):
        part = {n.split(".", 2)[2]: v for n, v in of.items() if n.startswith(f"layers.{layer}.")}
        near = normed(hidden, part["attention_norm.weight"], shape.epsilon)
        q, k, v = (
            (near @ part[f"attention.w{letter}.weight"].T).reshape(count, -1, width)
            for letter in "qkv"
        )
        q, k = rotate(q, turns), rotate(k, turns)
        attended = torch.zeros(count, shape.heads, width, dtype=torch.float64)
        for head in range(shape.heads):
            shared = head * shape.kv_heads // shape.heads
            scores = q[:, head] @ k[:, shared].T / math.sqrt(width)
            scores += torch.full((count, count), -math.inf).triu(1)
            attended[:, head] = scores.softmax(-1) @ v[:, shared]
        hidden = hidden + attended.reshape(count, -1) @ part["attention.wo.weight"].T
        near = normed(hidden, part["ffn_norm.weight"], shape.epsilon)
        gate = near @ part["feed_forward.w1.weight"].T
        up = near @ part["feed_forward.w3.weight"].T
        hidden = hidden + (gate * gate.sigmoid() * up) @ part["feed_forward.w2.weight"].T
    rows = normed(hidden, of["norm.weight"], shape.epsilon) @ of["output.weight"].T
    return rows.log_softmax(-1)


def write_expected(file: Path, shape: Shape, weights: Weights) -> None:
    """Tokens, many positions of them, and log-probabilities after each."""
    tokens = torch.arange(24) * 37 % shape.vocabulary
    log_p = log_probabilities(shape, weights, tokens).float()
    np.savez_compressed(file, tokens=tokens.int().numpy(), log_p=log_p.numpy())


def cut(name: str, value: torch.Tensor, parts: int, embedding: int) -> list[torch.Tensor]:
    """One tensor's parts, as tensor-parallel layers of Meta's have them."""
    if value.ndim == 1:
        return [value] * parts
    axis = 0
    if name.endswith(("wo.weight", "w2.weight")):
        axis = 1
    if name == "tok_embeddings.weight":
        axis = embedding
    return [each.contiguous() for each in value.chunk(parts, dim=axis)]


def write_meta(
    target: Path, shape: Shape, weights: Weights, params: dict, parts: int, embedding: int
) -> None:
    """consolidated.NN.pth, params.json and what is to be computed."""
    target.mkdir(parents=True, exist_ok=True)
    for number in range(parts):
        part = {n: cut(n, v, parts, embedding)[number].clone() for n, v in weights.items()}
        part["rope.freqs"] = frequencies(shape).to(torch.bfloat16)
        torch.save(part, target / f"consolidated.{number:02d}.pth")
    (target / "params.json").write_text(json.dumps(params), encoding="utf-8")
    write_expected(target / "expected.npz", shape, weights)


def sentencepiece_model(file: Path) -> sentencepiece.SentencePieceProcessor:
    """A model with the settings of Llama's own."""
    with file.open("wb") as stream:
        sentencepiece.SentencePieceTrainer.train(
            sentence_iterator=iter(TEXT.splitlines() * 4),
            model_writer=stream,
            model_type="bpe",
            vocab_size=340,
            byte_fallback=True,
            normalization_rule_name="identity",
            remove_extra_whitespaces=False,
            split_digits=True,
            allow_whitespace_only_pieces=True,
            minloglevel=2,
        )
    return sentencepiece.SentencePieceProcessor(model_file=str(file))


def tiktoken_model(file: Path) -> tiktoken.Encoding:
    """All bytes and the pairs that are most frequent in the text, with Llama 3's special tokens."""
    ranks = {bytes([byte]): byte for byte in range(256)}
    words = [[bytes([b]) for b in word.encode()] for word in regex.findall(LLAMA3_PATTERN, TEXT)]
    while len(ranks) < 320:
        pairs = Counter(pair for word in words for pair in pairwise(word))
        best = max(pairs, key=lambda pair: (pairs[pair], pair))
        ranks[best[0] + best[1]] = len(ranks)
        for word in words:
            for place in range(len(word) - 2, -1, -1):
                if tuple(word[place : place + 2]) == best:
                    word[place : place + 2] = [best[0] + best[1]]
    lines = [f"{base64.b64encode(token).decode()} {rank}" for token, rank in ranks.items()]
    file.write_text("\n".join(lines) + "\n", encoding="ascii")
    special = {"<|begin_of_text|>": len(ranks), "<|end_of_text|>": len(ranks) + 1}
    return tiktoken.Encoding(
        "llama3", pat_str=LLAMA3_PATTERN, mergeable_ranks=ranks, special_tokens=special
    )


@torch.no_grad()
def main(target: Path) -> None:
    """Write everything."""
    meta = target / "meta"
    (meta / "llama3").mkdir(parents=True, exist_ok=True)
    pieces = sentencepiece_model(meta / "tokenizer.model")
    ranked = tiktoken_model(meta / "llama3" / "tokenizer.model")
    ids = {
        "sentencepiece": {text: pieces.encode(text) for text in TRIALS},
        "tiktoken": {text: ranked.encode(text) for text in TRIALS},
    }
    text = json.dumps(ids, indent=1, ensure_ascii=True)
    (meta / "expected_ids.json").write_text(text + "\n", encoding="ascii")

    first = Shape(pieces.get_piece_size(), 88, epsilon=1e-6)
    params = {"dim": 32, "multiple_of": 8, "n_heads": 4, "n_layers": 2}
    write_meta(
        meta / "llama1",
        first,
        random_weights(first, torch.float16, 1),
        {**params, "norm_eps": 1e-6, "vocab_size": -1},
        parts=1,
        embedding=1,
    )
    second = Shape(pieces.get_piece_size(), 112, kv_heads=2)
    params |= {"ffn_dim_multiplier": 1.3, "n_kv_heads": 2, "norm_eps": 1e-5}
    write_meta(
        meta / "llama2",
        second,
        random_weights(second, torch.float16, 2),
        {**params, "multiple_of": 16, "vocab_size": -1},
        parts=2,
        embedding=1,
    )
    third = Shape(ranked.max_token_value + 255, 112, kv_heads=2, theta=500000.0, scaled=True)
    params |= {"vocab_size": third.vocabulary, "rope_theta": 500000.0, "use_scaled_rope": True}
    write_meta(
        meta / "llama3",
        third,
        random_weights(third, torch.bfloat16, 3),
        {**params, "multiple_of": 16},
        parts=2,
        embedding=0,
    )


if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit("usage: python scripts/make_meta_fixtures.py DIRECTORY")
    main(Path(sys.argv[1]))
