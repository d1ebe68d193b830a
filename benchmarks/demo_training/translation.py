"""The English to French pair: T5, and a draft with the target's encoder and one decoder layer."""

import copy
import random
from collections.abc import Iterator, Sequence
from pathlib import Path

import torch
from tokenizers import Tokenizer
from transformers import (
    DynamicCache,
    EncoderDecoderCache,
    T5Config,
    T5ForConditionalGeneration,
)

from .batches import Batch, Example, bucketed, padded
from .optimise import Budget, train
from .texts import PREFIX, read_pairs, with_joined, with_lists
from .tokenizer_files import EOS, build_unigram, carry_tokenizer, encode_all, kept_or_built

LONGEST = 120
BATCH_TOKENS = 2600


def examples_of(pairs: Sequence[tuple[str, str]], tokenizer: Tokenizer) -> list[Example]:
    """Token ids, both sides ending with </s>; what is too long is left out."""
    sources = encode_all(tokenizer, [PREFIX + source for source, _ in pairs])
    targets = encode_all(tokenizer, [target for _, target in pairs])
    both = zip(sources, targets, strict=True)
    return [(s, t) for s, t in both if len(s) <= LONGEST and len(t) <= LONGEST]


def train_target(
    *,
    data: Path,
    start: Path | None,
    output: Path,
    decoder_layers: int,
    width: int,
    layers: int,
    rate: float,
    budget: Budget,
    seed: int,
) -> None:
    """Train a T5; from `start`, its decoder grown to `decoder_layers`, or from scratch."""
    pairs = read_pairs(data)
    if start is None:
        texts = [text for pair in pairs for text in pair]
        tokenizer = kept_or_built(build_unigram, texts, output)
        model = T5ForConditionalGeneration(_config(tokenizer, width, layers, decoder_layers))
    else:
        tokenizer = carry_tokenizer(start, output)
        model = grown(T5ForConditionalGeneration.from_pretrained(start), decoder_layers)
    model.train()

    def epochs(number: int) -> Iterator[Batch]:
        dice = random.Random(f"{seed} {number}")
        mixed = with_joined(with_lists(pairs, dice), dice)
        yield from bucketed(examples_of(mixed, tokenizer), BATCH_TOKENS, dice)

    def loss(batch: Batch) -> torch.Tensor:
        return model(input_ids=batch.source, attention_mask=batch.mask, labels=batch.labels).loss

    train(model, epochs, loss, rate=rate, budget=budget, state=output / "training-state.pt")
    finish(model, output)


def train_draft(
    *,
    data: Path,
    teacher_path: Path,
    start: Path | None,
    output: Path,
    rate: float,
    budget: Budget,
    seed: int,
    generated: int,
) -> None:
    """Distil a one-layer decoder on the teacher's own encoder, which stays as it is.

    start: an earlier draft whose decoder to go on from, maybe of an earlier teacher.
    generated: for how many sources the teacher's own greedy text is learnt from, besides the
    references. The loss is KL(teacher, draft) per token, as in DistillSpec (arXiv 2310.08461).
    """
    tokenizer = carry_tokenizer(teacher_path, output)
    teacher = T5ForConditionalGeneration.from_pretrained(teacher_path).eval()
    draft = one_layer_draft(teacher)
    if start is not None:
        take_decoder(draft, T5ForConditionalGeneration.from_pretrained(start))
    draft.train()
    pairs = with_lists(read_pairs(data), random.Random(seed))
    random.Random(seed).shuffle(pairs)
    own = generate(teacher, tokenizer, [source for source, _ in pairs[:generated]], output)
    examples = examples_of(pairs[generated : 2 * generated], tokenizer) + own

    def epochs(number: int) -> Iterator[Batch]:
        yield from bucketed(examples, BATCH_TOKENS, random.Random(f"{seed} {number}"))

    def loss(batch: Batch) -> torch.Tensor:
        with torch.no_grad():
            memory = teacher.encoder(input_ids=batch.source, attention_mask=batch.mask)
            wanted = teacher(
                encoder_outputs=memory, attention_mask=batch.mask, labels=batch.labels
            ).logits
        got = draft(encoder_outputs=memory, attention_mask=batch.mask, labels=batch.labels).logits
        return divergence(wanted, got, batch.labels)

    train(draft, epochs, loss, rate=rate, budget=budget, state=output / "training-state.pt")
    (output / "teacher-texts.pt").unlink(missing_ok=True)
    finish(draft, output)


def take_decoder(draft: T5ForConditionalGeneration, earlier: T5ForConditionalGeneration) -> None:
    """The decoder's layer of an earlier draft. Embeddings stay the teacher's, as the encoder that
    reads through them does."""
    weights = earlier.decoder.state_dict()
    weights["embed_tokens.weight"] = draft.shared.weight.detach()
    draft.decoder.load_state_dict(weights)


def divergence(wanted: torch.Tensor, got: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """Mean KL(wanted, got) in nats over positions with a label."""
    here = labels >= 0
    log_p = wanted[here].float().log_softmax(-1)
    log_q = got[here].float().log_softmax(-1)
    return (log_p.exp() * (log_p - log_q)).sum(-1).mean()


def grown(model: T5ForConditionalGeneration, layers: int) -> T5ForConditionalGeneration:
    """The same function with more decoder layers: copies whose outputs are zeroed at first."""
    old = model.config.num_decoder_layers
    if layers % old:
        raise SystemExit(f"a decoder of {old} layers grows to a multiple of {old}, not {layers}")
    times = layers // old
    if times == 1:
        return model
    config = copy.deepcopy(model.config)
    config.num_decoder_layers = layers
    weights = {}
    for key, value in model.state_dict().items():
        if not key.startswith("decoder.block."):
            weights[key] = value
            continue
        number, rest = key.removeprefix("decoder.block.").split(".", 1)
        for copy_number in range(times):
            if copy_number and "relative_attention_bias" in rest:
                continue
            is_output = rest.endswith((".o.weight", ".wo.weight"))
            new = torch.zeros_like(value) if copy_number and is_output else value
            weights[f"decoder.block.{int(number) * times + copy_number}.{rest}"] = new
    bigger = T5ForConditionalGeneration(config)
    bigger.load_state_dict(weights)
    bigger.generation_config = model.generation_config
    return bigger


def one_layer_draft(teacher: T5ForConditionalGeneration) -> T5ForConditionalGeneration:
    """The teacher with its first decoder layer alone; only that layer will be trained."""
    config = copy.deepcopy(teacher.config)
    config.num_decoder_layers = 1
    draft = T5ForConditionalGeneration(config)
    weights = {
        key: value
        for key, value in teacher.state_dict().items()
        if not key.startswith("decoder.block.") or key.startswith("decoder.block.0.")
    }
    draft.load_state_dict(weights)
    draft.generation_config = teacher.generation_config
    for weight in draft.parameters():
        weight.requires_grad = False
    for weight in draft.decoder.block.parameters():
        weight.requires_grad = True
    draft.decoder.final_layer_norm.weight.requires_grad = True
    return draft


@torch.no_grad()
def generate(
    model: T5ForConditionalGeneration, tokenizer: Tokenizer, sources: Sequence[str], output: Path
) -> list[Example]:
    """The model's greedy texts, saved in a file so that a resumed run has the same."""
    saved = output / "teacher-texts.pt"
    if saved.exists():
        return torch.load(saved, weights_only=True)
    ids = sorted(encode_all(tokenizer, [PREFIX + text for text in sources]), key=len)
    result: list[Example] = []
    for first in range(0, len(ids), 256):
        group = ids[first : first + 256]
        result += zip(group, greedy(model, group), strict=True)
    torch.save(result, saved)
    return result


@torch.no_grad()
def greedy(model: T5ForConditionalGeneration, sources: Sequence[Sequence[int]]) -> list[list[int]]:
    """Return the greedy targets of one batch of sources, with at most about twice their tokens."""
    batch = padded([(ids, [0]) for ids in sources], max(map(len, sources)), 1)
    limit = min(LONGEST, 2 * batch.source.shape[1] + 16)
    with torch.autocast("cpu", torch.bfloat16):
        texts = model.generate(
            input_ids=batch.source,
            attention_mask=batch.mask,
            max_new_tokens=limit,
            do_sample=False,
            num_beams=1,
            # Left alone, transformers sizes this cache by the encoder's depth.
            past_key_values=EncoderDecoderCache(DynamicCache(), DynamicCache()),
        )
    rows = (row[1:].tolist() for row in texts)
    return [row[: row.index(EOS) + 1] if EOS in row else row for row in rows]


def finish(model: T5ForConditionalGeneration, output: Path) -> None:
    """Write the checkpoint; the training state is no longer needed."""
    model.save_pretrained(output)
    (output / "training-state.pt").unlink(missing_ok=True)


def _config(tokenizer: Tokenizer, width: int, layers: int, decoder_layers: int) -> T5Config:
    return T5Config(
        vocab_size=tokenizer.get_vocab_size(),
        d_model=width,
        d_kv=64,
        d_ff=4 * width,
        num_heads=max(1, width // 64),
        num_layers=layers,
        num_decoder_layers=decoder_layers,
        dropout_rate=0.0,
        feed_forward_proj="relu",
        decoder_start_token_id=0,
    )
