"""Write tests/fixtures/t5-text: tokenizers of the T5 family that have no tokenizer.json.

    python scripts/make_t5_text_fixtures.py tests/fixtures/t5-text

Each directory holds a tokenizer's files as checkpoints have them, and expected.json: what
transformers makes of some texts. Needs transformers (extra `train`) and no network.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer, models, pre_tokenizers, trainers
from transformers import AutoTokenizer, ByT5Tokenizer

TEXTS = [
    "translate English to German: That is good.",
    "def add(a, b):\n    return a + b  # élan",
    "The <extra_id_0> walks in <extra_id_1> park",
    "naïve café – déjà vu; 12 345,67 €",
    "日本語 🙂👩‍👧",
    "it ends </s> here",
    "<extra_id_2>x<extra_id_0>",
    " two  spaces ",
    "",
]
SPECIAL = ["<pad>", "<s>", "</s>", "<unk>", "<mask>"]
NAMED = ["<s>", "</s>", "</s>", "<s>", "<unk>", "<pad>"]
EXTRA = 5


def expected(tokenizer: Any, texts: list[str]) -> list[dict[str, Any]]:
    """Ids of each text, and what those ids are as text again."""
    found = []
    for text in texts:
        ids = tokenizer(text).input_ids
        decoded = tokenizer.decode(
            ids, skip_special_tokens=True, clean_up_tokenization_spaces=False
        )
        found.append({"text": text, "ids": ids, "decoded": decoded})
    return found


def write_json(file: Path, content: Any) -> None:
    """Readable, one entry a line."""
    file.write_text(json.dumps(content, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")


def byt5(directory: Path) -> None:
    """As transformers saves it; the class alone says what it is."""
    tokenizer = ByT5Tokenizer()
    tokenizer.save_pretrained(directory)
    found = expected(AutoTokenizer.from_pretrained(directory), TEXTS)
    broken = [229 + 3, 107, 300, 195 + 3, 169 + 3, 0, 228 + 3, 1]
    decoded = tokenizer.decode(broken, skip_special_tokens=True)
    found.append({"text": None, "ids": broken, "decoded": decoded})
    write_json(directory / "expected.json", found)


def codet5(directory: Path) -> None:
    """The files of Salesforce/codet5-base, smaller: sentinels count down behind the vocabulary."""
    directory.mkdir(parents=True, exist_ok=True)
    trained = Tokenizer(models.BPE())
    trained.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    trained.train_from_iterator(
        [text for text in TEXTS if "<" not in text] * 4,
        trainers.BpeTrainer(
            vocab_size=330,
            special_tokens=SPECIAL,
            initial_alphabet=alphabet,
            show_progress=False,
        ),
    )
    trained.model.save(str(directory))
    size = trained.get_vocab_size()
    extra = [f"<extra_id_{index}>" for index in range(EXTRA)]
    last = size + EXTRA - 1
    write_json(directory / "added_tokens.json", {t: last - i for i, t in enumerate(extra)})
    named = zip(("bos", "eos", "sep", "cls", "unk", "pad"), NAMED, strict=True)
    special: dict[str, Any] = {f"{key}_token": _added(token) for key, token in named}
    special["mask_token"] = {**_added("<mask>"), "lstrip": True}
    special["additional_special_tokens"] = extra[::-1]
    write_json(directory / "special_tokens_map.json", special)
    settings = {
        "add_prefix_space": False,
        "additional_special_tokens": extra[::-1],
        "tokenizer_class": "RobertaTokenizer",
    }
    write_json(directory / "tokenizer_config.json", settings)
    found = expected(AutoTokenizer.from_pretrained(directory), [*TEXTS, "a <mask> b"])
    write_json(directory / "expected.json", found)


def _added(token: str) -> dict[str, Any]:
    flags = dict.fromkeys(("lstrip", "rstrip", "single_word"), False)
    return {"content": token, **flags, "normalized": True}


if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit("usage: python scripts/make_t5_text_fixtures.py DIRECTORY")
    for make in (byt5, codet5):
        make(Path(sys.argv[1]) / make.__name__)
