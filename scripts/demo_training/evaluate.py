"""How good a pair is: BLEU, a sample, held-out loss, and alpha at temperature 0.

alpha: share of the positions of the target's own greedy text at which the draft, given the same
text before, would have proposed the same token.
"""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer
from transformers import LlamaForCausalLM, T5ForConditionalGeneration

from .batches import IGNORED, padded
from .python_code import stream_of
from .texts import PREFIX, library_files, read_pairs, read_texts, split
from .tokenizer_files import encode_all
from .translation import greedy

MAX_TOKENS = 100
SAMPLE = "Let's go to the store and buy some groceries including eggs, avocadoes, and bread."


def sampled(items: list[str], limit: int) -> list[str]:
    """At most `limit` of the items, always the same ones from all over the list: such files are
    often sorted by length, and their first lines are the easy ones."""
    if limit >= len(items):
        return items
    return random.Random(0).sample(items, limit)


@torch.no_grad()
def translation(model_path: Path, draft_path: Path | None, dev: Path, limit: int) -> dict[str, Any]:
    """BLEU (sacrebleu, greedy, the first reference of each sentence), the sample, and alpha."""
    import sacrebleu

    tokenizer = Tokenizer.from_file(str(model_path / "tokenizer.json"))
    model = T5ForConditionalGeneration.from_pretrained(model_path).eval()
    references: dict[str, str] = {}
    for source, target in read_pairs(dev):
        references.setdefault(source, target)
    sources = sampled(list(references), limit)
    ids = encode_all(tokenizer, [PREFIX + source for source in sources])
    texts: list[list[int]] = []
    for first in range(0, len(ids), 128):
        texts += greedy(model, ids[first : first + 128], MAX_TOKENS)
    bleu = sacrebleu.corpus_bleu(
        tokenizer.decode_batch(texts), [[references[source] for source in sources]]
    )
    sample = greedy(model, encode_all(tokenizer, [PREFIX + SAMPLE]), MAX_TOKENS)[0]
    figures: dict[str, Any] = {
        "sentences": len(sources),
        "bleu": round(bleu.score, 2),
        "sample": tokenizer.decode(sample),
    }
    if draft_path is not None:
        draft = T5ForConditionalGeneration.from_pretrained(draft_path).eval()
        figures["alpha"] = round(_translation_alpha(draft, ids, texts), 4)
    return figures


@torch.no_grad()
def python_code(
    model_path: Path, draft_path: Path | None, library: Path | None, limit: int
) -> dict[str, Any]:
    """Held-out loss in nats per token, and alpha on greedy continuations of held-out files."""
    tokenizer = Tokenizer.from_file(str(model_path / "tokenizer.json"))
    model = LlamaForCausalLM.from_pretrained(model_path).eval()
    held_out = read_texts(split(library_files(library))[1])
    stream = stream_of(held_out, tokenizer)
    rows = stream[: len(stream) // 257 * 257].reshape(-1, 257)[:200]
    logits = model(input_ids=rows[:, :-1]).logits
    loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), rows[:, 1:].flatten())
    figures: dict[str, Any] = {"loss": round(loss.item(), 3)}
    if draft_path is not None:
        draft = LlamaForCausalLM.from_pretrained(draft_path).eval()
        prompts = rows[:limit, :64]
        texts = model.generate(
            input_ids=prompts, max_new_tokens=64, do_sample=False, eos_token_id=-1, pad_token_id=1
        )
        guesses = draft(input_ids=texts).logits.argmax(-1)[:, 63:-1]
        figures["alpha"] = round((guesses == texts[:, 64:]).float().mean().item(), 4)
    return figures


def _translation_alpha(
    draft: T5ForConditionalGeneration, sources: list[list[int]], texts: list[list[int]]
) -> float:
    equal = total = 0
    for first in range(0, len(sources), 64):
        pairs = list(zip(sources, texts, strict=True))[first : first + 64]
        batch = padded(pairs, max(len(s) for s, _ in pairs), max(1, max(len(t) for _, t in pairs)))
        guesses = draft(
            input_ids=batch.source, attention_mask=batch.mask, labels=batch.labels
        ).logits.argmax(-1)
        here = batch.labels != IGNORED
        equal += int((guesses == batch.labels)[here].sum())
        total += int(here.sum())
    return equal / max(total, 1)
