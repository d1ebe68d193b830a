"""Small real tokenizers, trained on the spot."""

import functools
import json
from pathlib import Path

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers

TEXT = [
    "def read_lines(path):",
    "    return open(path).read().split('\\n')",
    "Les élèves mangent des pâtes à midi, n'est-ce pas ?",
    "naïve café — déjà vu; 12 345,67 €",
    "日本語のテキスト and emoji 🙂🙃👩‍👩‍👧",
] * 4


def byte_level(directory: Path, **settings: object) -> Path:
    """Byte-level BPE with <|start|> 0 before every text and <|end|> 1."""
    return _write(_trained(), directory, {"eos_token": "<|end|>", **settings})


@functools.cache
def _trained() -> Tokenizer:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.train_from_iterator(
        TEXT,
        trainers.BpeTrainer(
            vocab_size=320,
            special_tokens=["<|start|>", "<|end|>"],
            initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
            show_progress=False,
        ),
    )
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<|start|> $A", special_tokens=[("<|start|>", 0)]
    )
    return tokenizer


def unigram(directory: Path, *, extra: tuple[str, ...] = (), **settings: object) -> Path:
    """Metaspace unigram pieces with byte fallback, as T5 and Llama 2 have them."""
    special = ["<pad>", "</s>", "<unk>"]
    pieces = [(token, 0.0) for token in special]
    pieces += [(f"<0x{value:02X}>", -20.0) for value in range(256)]
    letters = sorted({letter for text in TEXT for letter in text if letter.isascii()} - {" "})
    words = sorted({f"▁{word}" for text in TEXT for word in text.split() if word.isascii()})
    pieces += [(piece, -5.0 - index / 1000) for index, piece in enumerate([*words, *letters])]
    pieces += [("▁", -4.0), *((piece, -9.0) for piece in extra)]
    tokenizer = Tokenizer(models.Unigram(pieces, unk_id=2, byte_fallback=True))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    tokenizer.decoder = decoders.Sequence(
        [
            decoders.ByteFallback(),
            decoders.Replace("▁", " "),
            decoders.Fuse(),
            decoders.Strip(" ", 1, 0),
        ]
    )
    tokenizer.add_special_tokens(special)
    tokenizer.post_processor = processors.TemplateProcessing(
        single="$A </s>", special_tokens=[("</s>", 1)]
    )
    return _write(tokenizer, directory, {"eos_token": {"content": "</s>"}, **settings})


def sentence_piece(directory: Path, **settings: object) -> Path:
    """spiece.model alone, with T5's special ids and byte fallback."""
    import sentencepiece

    directory.mkdir(parents=True, exist_ok=True)
    usual = {"pad_id": 0, "eos_id": 1, "unk_id": 2, "bos_id": -1}
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(TEXT),
        model_prefix=str(directory / "spiece"),
        vocab_size=380,
        byte_fallback=True,
        hard_vocab_limit=False,
        minloglevel=2,
        **{**usual, **settings},
    )
    (directory / "spiece.vocab").unlink()
    return directory


def _write(tokenizer: Tokenizer, directory: Path, settings: dict[str, object]) -> Path:
    directory.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(directory / "tokenizer.json"))
    (directory / "tokenizer_config.json").write_text(json.dumps(settings), encoding="utf-8")
    return directory
