"""Tokenizers of the demo models: carried over from a checkpoint, or built from the data."""

import json
import shutil
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, processors
from tokenizers import trainers as tokenizer_trainers

EOS = 1
PIECES = 4096
END_OF_TEXT = "<|end|>"


def carry_tokenizer(source: Path, output: Path) -> Tokenizer:
    """Copy a checkpoint's tokenizer files to `output` and load them."""
    output.mkdir(parents=True, exist_ok=True)
    for file in (*source.glob("tokenizer*"), *source.glob("spiece.model")):
        if file.resolve() != (output / file.name).resolve():
            shutil.copy(file, output / file.name)
    return Tokenizer.from_file(str(source / "tokenizer.json"))


def kept_or_built(
    build: Callable[[Iterable[str], Path], Tokenizer], texts: Iterable[str], output: Path
) -> Tokenizer:
    """The tokenizer a cut-off run left in `output`, else a new one: a resumed run's ids must not
    depend on whether building it twice gives the same."""
    if (output / "training-state.pt").exists():
        return Tokenizer.from_file(str(output / "tokenizer.json"))
    return build(texts, output)


def build_unigram(texts: Iterable[str], output: Path) -> Tokenizer:
    """A unigram model with T5's special ids (pad 0, </s> 1, <unk> 2), written to `output`."""
    tokenizer = Tokenizer(models.Unigram())
    tokenizer.normalizer = normalizers.NFC()
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    tokenizer.decoder = decoders.Metaspace()
    special = ["<pad>", "</s>", "<unk>"]
    tokenizer.train_from_iterator(
        texts,
        tokenizer_trainers.UnigramTrainer(
            vocab_size=PIECES, special_tokens=special, unk_token="<unk>", show_progress=False
        ),
    )
    tokenizer.post_processor = processors.TemplateProcessing(
        single="$A </s>", special_tokens=[("</s>", EOS)]
    )
    names = {"eos_token": "</s>", "pad_token": "<pad>", "unk_token": "<unk>"}
    _write(tokenizer, output, {"tokenizer_class": "T5Tokenizer", **names})
    return tokenizer


def build_byte_level(texts: Iterable[str], output: Path) -> Tokenizer:
    """Byte-level BPE whose id 0 is <|start|> and 1 is <|end|>, written to `output`."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.train_from_iterator(
        texts,
        tokenizer_trainers.BpeTrainer(
            vocab_size=PIECES,
            special_tokens=["<|start|>", END_OF_TEXT],
            initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
            show_progress=False,
        ),
    )
    _write(
        tokenizer,
        output,
        {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": END_OF_TEXT},
    )
    return tokenizer


def encode_all(tokenizer: Tokenizer, texts: Sequence[str]) -> list[list[int]]:
    """Ids of each text, ending with </s>."""
    rows: list[list[int]] = []
    for first in range(0, len(texts), 20_000):
        rows += [row.ids for row in tokenizer.encode_batch(texts[first : first + 20_000])]
    return [row if row and row[-1] == EOS else [*row, EOS] for row in rows]


def _write(tokenizer: Tokenizer, output: Path, config: dict[str, str]) -> None:
    output.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(output / "tokenizer.json"))
    (output / "tokenizer_config.json").write_text(json.dumps(config, indent=2) + "\n")
