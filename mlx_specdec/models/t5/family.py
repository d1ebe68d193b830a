"""T5, mT5, UMT5, ByT5 and MADLAD-400; see `families.Family`."""

import re
from collections.abc import Collection, Iterable, Mapping
from pathlib import Path
from typing import Any, ClassVar

from ...checkpoints import files
from ...checkpoints.quantization import PARTS
from ...checkpoints.tensors import same
from ...text.languages import Languages, Tags
from ...text.tokenizer import Tokenizer
from ..encoder_decoder.context import Network
from ..encoder_decoder.family import EncoderDecoderFamily
from ..sharding import check_even
from .network import T5, T5Config, scales_output

Config = Mapping[str, Any]
_PARTS = ("weight", *PARTS)
SHARED, HEAD = "shared.weight", "lm_head.weight"
TWINS = ("encoder.embed_tokens.weight", "decoder.embed_tokens.weight")
# Tensors that are not read: copies of shared.weight, and a bias in old checkpoints that is unused.
_DROPPED = re.compile(
    r"(encoder|decoder)\.embed_tokens\.weight"
    r"|decoder\.block\.\d+\.layer\.1\.EncDecAttention\.relative_attention_bias\.weight"
)
UNUSED = "no T5 has positions in its cross-attention"
"""The reason why the cross-attention's bias is not read."""


class T5Family(EncoderDecoderFamily):
    # T5 was trained in bfloat16, and some hidden states exceed float16's maximum of 65,504.
    overflows = True
    # If config.json lacks num_decoder_layers, the decoder has as many layers as the encoder.
    depths = ("num_layers", "num_decoder_layers")
    copies: ClassVar[Mapping[str, str]] = {
        **dict.fromkeys(TWINS, SHARED),
        **{f"lm_head.{part}": f"shared.{part}" for part in _PARTS},
    }

    def network(self, config: Config, tensors: Collection[str] | None) -> Network:
        if tensors is None:
            # Without weights, the configuration has to show whether the head is tied. A T5 whose
            # head is not tied does not scale the decoder's output.
            scales = scales_output(config)
            own_head = not scales or config.get("tie_word_embeddings") is False
        else:
            own_head = HEAD in tensors
        return T5(T5Config.from_dict(config, own_head=own_head))

    def check_shares(self, config: Config, ranks: int) -> None:
        shape = T5Config.from_dict(config, own_head=False)
        parts = {"attention heads": shape.num_heads, "feed-forward columns": shape.d_ff}
        check_even(parts, ranks)

    def names(self, config: Config, stored: Iterable[str]) -> dict[str, str]:
        """See `EncoderDecoderFamily`. `shared` may be stored only under the name of a copy."""
        stored = list(stored)
        read = {name: name for name in stored if not _DROPPED.fullmatch(name)}
        twins = [name for name in TWINS if name in stored]
        if SHARED not in read and twins:
            read[SHARED] = twins[0]
        return read

    def places(self, directory: Path, config: Config, weights: files.Weights) -> dict[str, str]:
        """See `EncoderDecoderFamily`. A head that repeats `shared` is left out."""
        places = super().places(directory, config, weights)
        table = {f"lm_head.{part}": places.get(f"shared.{part}") for part in _PARTS}
        repeats = all(
            shared is not None and same(weights.tensor(places[head]), weights.tensor(shared))
            for head, shared in table.items()
            if head in places
        )
        return {n: place for n, place in places.items() if n not in table or not repeats}

    def unused(self, name: str) -> str:
        if name in TWINS:
            return "no copy, but T5 reads the words of both its halves from one table"
        return UNUSED

    def written_config(self, config: Config, tensors: Collection[str]) -> dict[str, Any]:
        return {
            **config,
            "tie_word_embeddings": HEAD not in tensors,
            "scale_decoder_outputs": scales_output(config),
        }

    def languages(self, network: Network, tokenizer: Tokenizer) -> Languages | None:
        """See `families.Family`. MADLAD-400 has a tag for every language (Kudugunta et al., arXiv
        2309.04662)."""
        return Tags.of(tokenizer, "<2{}>")

    def with_width(self, config: Config, width: int) -> dict[str, Any]:
        share = width / config["d_model"]
        heads, inner = (max(1, round(config[name] * share)) for name in ("num_heads", "d_ff"))
        return {**config, "d_model": width, "d_ff": inner, "num_heads": heads}


family = T5Family()
