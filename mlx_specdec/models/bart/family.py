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
"""What old checkpoints have in config.json, and newer ones in generation_config.json."""
BIAS = "final_logits_bias"
TABLES = ("model.encoder.embed_tokens", "model.decoder.embed_tokens", "lm_head")
_PARTS = ("weight", *PARTS)
_CODE = re.compile(r"__(\w+)__|([a-z]{2,3}_[A-Z][A-Za-z]{1,3})", re.ASCII)
ENGLISH = ("en", "eng_Latn", "en_XX")
"""Of which the first known one is a source's language where none is named."""
MBART_50 = 26
"""Languages from which on a model is mBART-50's kind."""


class Codes(Languages):
    """Languages with a token each, which a text begins with, after or in place of the decoder's
    start token. In a source it is the first token or the last.

    known: code -> id. config: of the model. first: whether a source begins with its language."""

    def __init__(self, known: Mapping[str, int], config: BartConfig, *, first: bool) -> None:
        super().__init__(known)
        self.required = config.needs_language
        self._config, self._first = config, first
        self._default = next(code for code in (*ENGLISH, *known) if code in known)

    def source(
        self, text: str, encode: Encode, source: str | None, target: str | None
    ) -> list[int]:
        # The tokenizer may have put another language there, or put it elsewhere.
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
        said = read_json(file) if file.is_file() else {}
        generation = {name: said[name] for name in GENERATION if said.get(name) is not None}
        return super().load(directory, {**config, **generation}, *rest, **named)

    def network(self, config: Config, tensors: Collection[str] | None) -> Network:
        shape = BartConfig.from_dict(config)
        return Bart(shape, has_bias=shape.switches.bias if tensors is None else BIAS in tensors)

    def names(self, config: Config, stored: Iterable[str]) -> dict[str, str]:
        """Checkpoints without a head leave "model." out; one table may have any of its names."""
        shape = BartConfig.from_dict(config)
        inside = ("encoder.", "decoder.", "shared.")
        places = {f"model.{name}" if name.startswith(inside) else name: name for name in stored}
        wanted = "model.shared" if shape.shared else "model.decoder.embed_tokens"
        others = TABLES if shape.shared else TABLES[2:]
        for part in _PARTS:
            found = [places.pop(f"{table}.{part}", None) for table in others]
            known = next((place for place in found if place is not None), None)
            if known is not None:
                places.setdefault(f"{wanted}.{part}", known)
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
        known = {match[1] or match[2]: id for id, match in matches if match}
        if len(known) < 2:
            return None
        first = not tokenizer.legacy if kind == "m2m" else len(known) >= MBART_50
        return Codes(known, network.config, first=first)


family = BartFamily()
