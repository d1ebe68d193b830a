"""The Python pair: Llama on the running Python's standard library, and a one-layer draft."""

import random
from collections.abc import Iterator, Sequence
from pathlib import Path

import torch
from tokenizers import Tokenizer
from transformers import LlamaConfig, LlamaForCausalLM

from .optimise import Budget, train
from .texts import library_files, read_texts, split
from .tokenizer_files import END_OF_TEXT, EOS, build_byte_level, carry_tokenizer, kept_or_built
from .translation import divergence, finish

WINDOW = 256
BATCH_WINDOWS = 10


def stream_of(texts: Sequence[str], tokenizer: Tokenizer) -> torch.Tensor:
    """(tokens,) int64: all texts, each closed by the end-of-text token."""
    ids: list[int] = []
    for row in tokenizer.encode_batch(list(texts), add_special_tokens=False):
        ids += [*row.ids, EOS]
    return torch.tensor(ids)


def windows(stream: torch.Tensor, seed: str) -> Iterator[torch.Tensor]:
    """(BATCH_WINDOWS, WINDOW + 1) int64 pieces of the stream at shuffled places."""
    if len(stream) <= WINDOW + 1:
        raise SystemExit(f"{len(stream)} tokens are too few: at least {WINDOW + 2} are needed")
    dice = random.Random(seed)
    starts = list(range(dice.randrange(WINDOW), len(stream) - WINDOW - 1, WINDOW)) or [0]
    dice.shuffle(starts)
    for first in range(0, len(starts), BATCH_WINDOWS):
        group = starts[first : first + BATCH_WINDOWS]
        yield torch.stack([stream[start : start + WINDOW + 1] for start in group])


def train_target(
    *,
    library: Path | None,
    start: Path | None,
    output: Path,
    width: int,
    layers: int,
    rate: float,
    budget: Budget,
    seed: int,
) -> None:
    """Train a Llama from `start` or from scratch."""
    texts = read_texts(split(library_files(library))[0])
    if start is None:
        tokenizer = kept_or_built(build_byte_level, texts, output)
        model = LlamaForCausalLM(_config(tokenizer, width, layers))
    else:
        tokenizer = carry_tokenizer(start, output)
        model = LlamaForCausalLM.from_pretrained(start)
    stream = stream_of(texts, tokenizer)
    model.train()

    def loss(batch: torch.Tensor) -> torch.Tensor:
        logits = model(input_ids=batch[:, :-1]).logits
        return torch.nn.functional.cross_entropy(
            logits.flatten(0, 1).float(), batch[:, 1:].flatten()
        )

    train(
        model,
        lambda number: windows(stream, f"{seed} {number}"),
        loss,
        rate=rate,
        budget=budget,
        state=output / "training-state.pt",
    )
    finish(model, output)


def train_draft(
    *,
    library: Path | None,
    teacher_path: Path,
    start: Path | None,
    output: Path,
    rate: float,
    budget: Budget,
    seed: int,
) -> None:
    """Distil a one-layer Llama: 0.8 KL(teacher, draft) + 0.2 cross-entropy."""
    tokenizer = carry_tokenizer(teacher_path, output)
    teacher = LlamaForCausalLM.from_pretrained(teacher_path).eval()
    draft = LlamaForCausalLM.from_pretrained(start) if start else one_layer_draft(teacher)
    stream = stream_of(read_texts(split(library_files(library))[0]), tokenizer)
    draft.train()

    def loss(batch: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            wanted = teacher(input_ids=batch[:, :-1]).logits
        got = draft(input_ids=batch[:, :-1]).logits
        labels = batch[:, 1:]
        truth = torch.nn.functional.cross_entropy(got.flatten(0, 1).float(), labels.flatten())
        return 0.8 * divergence(wanted, got, labels) + 0.2 * truth

    train(
        draft,
        lambda number: windows(stream, f"{seed} {number}"),
        loss,
        rate=rate,
        budget=budget,
        state=output / "training-state.pt",
    )
    finish(draft, output)


def one_layer_draft(teacher: LlamaForCausalLM) -> LlamaForCausalLM:
    """The teacher with its first layer alone, to start from."""
    config = LlamaConfig.from_dict({**teacher.config.to_dict(), "num_hidden_layers": 1})
    draft = LlamaForCausalLM(config)
    weights = {
        key: value
        for key, value in teacher.state_dict().items()
        if not key.startswith("model.layers.") or key.startswith("model.layers.0.")
    }
    draft.load_state_dict(weights)
    draft.generation_config = teacher.generation_config
    return draft


def _config(tokenizer: Tokenizer, width: int, layers: int) -> LlamaConfig:
    heads = max(1, width // 64)
    return LlamaConfig(
        vocab_size=tokenizer.get_vocab_size(),
        hidden_size=width,
        intermediate_size=11 * width // 4,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=max(1, heads // 2),
        max_position_embeddings=2048,
        rms_norm_eps=1e-5,
        tie_word_embeddings=True,
        bos_token_id=0,
        eos_token_id=tokenizer.token_to_id(END_OF_TEXT),
        pad_token_id=EOS,
    )
