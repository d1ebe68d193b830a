"""BART, mBART, Marian, M2M100, NLLB and Pegasus; see `families.Family`."""

import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar

from ...checkpoints import files
from ...checkpoints.disk import read_json
from ...checkpoints.quantization import PARTS
from ...checkpoints.tensors import same
from ...errors import CheckpointError
from ...text.languages import Encode, Languages, Tags
from ...text.tokenizer import Tokenizer
from ..encoder_decoder.context import Network
from ..encoder_decoder.family import EncoderDecoderFamily
from .network import Bart, BartConfig

Config = Mapping[str, Any]
GENERATION = ("decoder_start_token_id", "forced_bos_token_id", "bad_words_ids")
"""Entries that old checkpoints have in config.json, and newer ones in generation_config.json."""
BIAS = "final_logits_bias"
TABLES = ("model.encoder.embed_tokens", "model.decoder.embed_tokens", "lm_head")
_PARTS = ("weight", *PARTS)
_CODE = re.compile(r"__(\w+)__|([a-z]{2,3}_[A-Z][A-Za-z]{1,3})", re.ASCII)
ENGLISH = ("en", "eng_Latn", "en_XX")
"""The default language of sources is the first of these codes that the model has."""
MBART_50 = 26
"""A model with at least this many languages is an mBART-50. mBART has 25."""


class Codes(Languages):
    """The languages of a model that has a token for each. The language token begins a completion,
    after the decoder's start token or in place of it. In a source, it is the first or last token.

    Args:
        tokens: The token of each language, by language code.
        config: The model's configuration.
        first: Whether the language token is the first token of a source. Otherwise it is the last.
    """

    def __init__(self, tokens: Mapping[str, int], config: BartConfig, *, first: bool) -> None:
        super().__init__(tokens)
        self.required = config.needs_language
        self._config, self._first = config, first
        self._default = next(code for code in (*ENGLISH, *tokens) if code in tokens)

    def source(
        self, text: str, encode: Encode, source: str | None, target: str | None
    ) -> list[int]:
        # Remove the language token that the tokenizer may have added.
        ids, end, codes = encode(text), self._config.end, {*self.known.values()}
        while ids and ids[-1] in {end, *codes}:
            ids.pop()
        while ids and ids[0] in codes:
            ids.pop(0)
        code = self.known[source or self._default]
        return [code, *ids, end] if self._first else [*ids, end, code]

    def prefix(self, start: Sequence[int], target: str | None) -> list[int]:
        if target is None:
            return [*start]
        return [*([] if self._config.in_place else start[:1]), self.known[target]]

    def find(self, option: str, name: str | None) -> str | None:
        return super().find(option, name and name.strip("_"))


class BartFamily(EncoderDecoderFamily):
    copies: ClassVar[Mapping[str, str]] = {
        f"{table}.{part}": f"model.shared.{part}" for table in TABLES for part in _PARTS
    }

    def load(self, directory: Path, config: Config, *rest: Any, **named: Any) -> Any:
        file = directory / "generation_config.json"
        stored = read_json(file) if file.is_file() else {}
        generation = {name: stored[name] for name in GENERATION if stored.get(name) is not None}
        return super().load(directory, {**config, **generation}, *rest, **named)

    def network(self, config: Config, tensors: Collection[str] | None) -> Network:
        shape = BartConfig.from_dict(config)
        return Bart(shape, has_bias=shape.switches.bias if tensors is None else BIAS in tensors)

    def names(self, config: Config, stored: Iterable[str]) -> dict[str, str]:
        """See `EncoderDecoderFamily`. Checkpoints without a head omit the prefix "model.". A shared
        embedding may be stored under the name of any of its copies."""
        shape = BartConfig.from_dict(config)
        inside = ("encoder.", "decoder.", "shared.")
        places = {f"model.{name}" if name.startswith(inside) else name: name for name in stored}
        wanted = "model.shared" if shape.shared else "model.decoder.embed_tokens"
        copies = TABLES if shape.shared else TABLES[2:]
        for part in _PARTS:
            found = [places.pop(f"{table}.{part}", None) for table in copies]
            first = next((place for place in found if place is not None), None)
            if first is not None:
                places.setdefault(f"{wanted}.{part}", first)
        learned = shape.switches.positions == "learned"
        return {n: place for n, place in places.items() if learned or "embed_positions." not in n}

    def places(self, directory: Path, config: Config, weights: files.Weights) -> dict[str, str]:
        places = super().places(directory, config, weights)
        head, table = "lm_head.weight", places.get("model.shared.weight")
        table = table or places.get("model.decoder.embed_tokens.weight")
        both = [weights.tensor(name) for name in (head, table or "") if name in weights.infos]
        if len(both) == 2 and not same(*both):
            raise CheckpointError(f"{directory} has a head that is not its embedding")
        return places

    def unused(self, name: str) -> str:
        if "embed_positions" in name:
            return "sines and cosines, which are computed"
        return "no copy, but one table embeds the words of both halves"

    def languages(self, network: Bart, tokenizer: Tokenizer) -> Languages | None:
        kind = network.config.switches.positions
        if kind == "marian":
            return Tags.of(tokenizer, ">>{}<<")
        pieces = tokenizer.pieces()
        matches = ((id, _CODE.fullmatch(pieces[id] or "")) for id in tokenizer.special_ids)
        codes = {match[1] or match[2]: id for id, match in matches if match}
        if len(codes) < 2:
            return None
        first = not tokenizer.legacy if kind == "m2m" else len(codes) >= MBART_50
        return Codes(codes, network.config, first=first)


family = BartFamily()
