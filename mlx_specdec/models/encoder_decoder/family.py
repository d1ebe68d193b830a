"""The base class of encoder-decoder families: loading, training, and the languages of translation
models. See `loading.Family`."""

import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, ClassVar, Self

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_flatten

from ...checkpoints import files
from ...checkpoints.quantization import MIXED, MODES, Quantization, stored_quantization
from ...checkpoints.tensors import DTYPES, check_weights, dtype_name
from ...errors import CheckpointError, OptionError, first_line
from ...text.tokenizer import Tokenizer
from ...types import rectangle
from .. import foreign, number_format
from ..base import Base, Ids, LoadSettings, Trainable, identity_of, places
from ..cache_settings import OWN_CACHES
from .context import EncoderDecoderModel, Network

Config = Mapping[str, Any]
Encode = Callable[[str], list[int]]
# The embedding and the head get at least WIDER_BITS, because no other matrix reduces the error as
# much. On an English-French T5 of 8 M weights, 4 bits for all cost a KL divergence of 0.054 nats
# per token, and 0.030 with 8 bits for the tied embedding, for 11 % more bytes.
_WIDER = re.compile(r"(.*\.)?(shared|embed_tokens|lm_head)\.weight")
WIDER_BITS = 8
# Tables of positions are never quantized: they are small, and affect every attention score.
_NEVER = re.compile(r"relative_attention_bias|embed_positions")
_SENSITIVE = re.compile(r"(encoder|decoder)\.block\.(\d+)\..*\.(v|wo)\.weight")


class Languages:
    """The languages of a model. A tag of the target language begins the source text. Subclasses of
    model families put languages into prompts in other ways.

    Attributes:
        known: Token ids by the codes that users write.
        required: Whether a request needs a target language.

    Args:
        form: A tag with {} in place of the code.
    """

    required = False

    def __init__(self, ids: Mapping[str, int], form: str = "") -> None:
        self.known = ids
        self._form = form

    @classmethod
    def of(cls, tokenizer: Tokenizer, form: str) -> Self | None:
        """Return the languages that have tags of this form among the tokens, or None if there are
        fewer than two."""
        before, after = map(re.escape, form.split("{}"))
        tag = re.compile(rf"{before}(\w{{2,}}){after}", re.ASCII)
        found = ((tag.fullmatch(piece or ""), id) for id, piece in enumerate(tokenizer.pieces))
        ids = {match[1]: id for match, id in found if match}
        return cls(ids, form) if len(ids) > 1 else None

    def source(
        self, text: str, encode: Encode, source: str | None, target: str | None
    ) -> list[int]:
        """Return the token ids of a source text. source, target: Codes of the languages."""
        return encode(text if target is None else f"{self._form.format(target)} {text}")

    def prefix(self, start: Sequence[int], target: str | None) -> list[int]:
        """Return the first tokens of a completion. start: The first tokens without a target
        language. The result has as many."""
        return [*start]

    def find(self, option: str, name: str | None) -> str | None:
        """Return the code that a user means: a code, or the part of a code before "_" if no other
        code begins with it. Raises OptionError, which lists all codes, for any other name."""
        if name is None or name in self.known:
            return name
        begun = [code for code in self.known if code.partition("_")[0] == name]
        if len(begun) != 1:
            raise OptionError(
                f"{option} must be a language that the model knows, not {name!a:.40}: "
                + ", ".join(begun or sorted(self.known))
            )
        return begun[0]


class EncoderDecoderFamily(ABC):
    """A `loading.Family` of encoder-decoder models. A new family defines the abstract methods.

    Attributes:
        overflows: Whether float16 is too small for the hidden states of some checkpoints.
        decoder_depth: The entry of config.json with the number of decoder layers.
    """

    overflows: ClassVar[bool] = False
    decoder_depth = "decoder_layers"

    @abstractmethod
    def network(self, config: Config, tensors: Collection[str]) -> Network:
        """Return the network of a configuration, whose weights are not computed. `tensors` are the
        names that `places` returns. Raises CheckpointError."""

    @abstractmethod
    def places(self, directory: Path, config: Config, weights: files.Weights) -> dict[str, str]:
        """Return the tensors to read: the network's name and the checkpoint's name of each. Raises
        CheckpointError."""

    def with_layers(self, config: Config, chosen: Sequence[int]) -> dict[str, Any]:
        return {**config, self.decoder_depth: len(chosen)}

    def check_shares(self, config: Config, ranks: int) -> None:
        """Raise OptionError if layers cannot be divided equally between ranks. Otherwise the
        network has a method `shard`."""
        raise OptionError(
            f"ranks cannot share a model of type {config.get('model_type')}: take one machine"
        )

    def written_config(self, config: Config, tensors: Collection[str]) -> dict[str, Any]:
        """Return the config.json to write with a model that has these tensors."""
        return dict(config)

    def languages(self, network: Network, tokenizer: Tokenizer) -> Languages | None:
        return None

    def opened(
        self, directory: Path, config: Config
    ) -> tuple[files.Weights, dict[str, str], Network]:
        """Open a checkpoint without reading values. Return its tensors, the result of `places`, and
        the network, whose layers are quantized as the tensors are. Raises CheckpointError."""
        weights = files.Weights(directory)
        try:
            stored = stored_quantization(config)
            places = self.places(directory, config, weights)
            network = self.network(config, places)
            if stored is not None:
                nn.quantize(network, class_predicate=partial(_stored, stored, places))
            shapes = {name: array.shape for name, array in tree_flatten(network.parameters())}
            check_weights(shapes, {n: weights.infos[place].shape for n, place in places.items()})
        except CheckpointError as problem:
            dtypes = (DTYPES[info.dtype] for info in weights.infos.values())
            message = foreign.explain(problem, foreign.entry_of(config, dtypes))
            raise CheckpointError(f"{directory}: {message}") from None
        except (ArithmeticError, AttributeError, LookupError, TypeError, ValueError) as problem:
            # Entries of config.json can have any type.
            raise CheckpointError(
                f"{directory}: config.json does not describe a model of this type "
                f"({first_line(problem):.200}): compare it with the original's"
            ) from problem
        return weights, places, network

    def load(
        self, directory: Path, config: Config, how: LoadSettings
    ) -> tuple[EncoderDecoderModel, tuple[int, ...], str]:
        numbers, group = how.numbers, how.group
        refused = {
            "kv-bits and max-kv-size": how.caches != OWN_CACHES,
            "adapter-path": how.adapter is not None,
            "distributed pipeline": how.pipeline,
        }
        if names := [name for name, is_given in refused.items() if is_given]:
            raise OptionError(
                f"{directory} is an encoder-decoder model, which cannot have {names[0]}: leave it "
                "out"
            )
        stored = stored_quantization(config)
        numbers.check_plain(directory, stored)
        if group is not None:
            self.check_shares(config, group.size())
        weights, places, network = self.opened(directory, config)
        # Use the widest stored dtype: some checkpoints store only those tensors in float32 that
        # half precision cannot hold.
        types = (DTYPES[weights.infos[place].dtype] for place in places.values())
        widest = mx.result_type(*filter(_is_float, types))
        floating = numbers.floating(widest, overflows=self.overflows)
        notes = [network.note, numbers.range_note(directory.name, widest, floating)]
        if numbers.q_bits is not None:
            default = Quantization(numbers.q_bits, numbers.q_group_size)
            chosen = self.quantized(network, config, default)
            by_path = {name.removesuffix(".weight"): of.as_dict() for name, of in chosen.items()}
            number_format.quantize(
                network, default.bits, default.group_size, lambda path, _: by_path.get(path, False)
            )
        modules = dict(network.named_modules())
        for name, place in places.items():
            parts = _in_numbers(modules, name, weights.read(place), floating)
            if not weights.lazy:
                mx.eval(parts)  # so that the source's array can be freed
            network.load_weights(parts, strict=False)
        network.note = "; ".join(filter(None, (*notes, weights.note())))
        if stored is not None and numbers.expands(number_format.count(network)):
            number_format.expand(network)
            stored = None
        if group is not None:
            network.shard(group)
        number_format.evaluate(network)
        words = dtype_name(network.dtype)
        bits = numbers.q_bits or (stored or {}).get("bits")
        words = words if bits is None else f"{bits}-bit, {words}"
        identity = None if group is not None else identity_of(config, words)
        return EncoderDecoderModel(network, identity), files.eos_token_ids(directory, config), words

    def trainable(self, network: Network) -> Trainable:
        """See `loading.Family`. The encoder reads prompts; the decoder predicts completions."""

        def inputs(prompts: Sequence[Ids], texts: Sequence[Ids]) -> tuple[mx.array, ...]:
            start = network.start
            sources, lengths = rectangle(prompts), mx.array([len(prompt) for prompt in prompts])
            mask = mx.arange(sources.shape[1]) < lengths[:, None, None, None]
            fed = rectangle([[*start, *text[:-1]] for text in texts])
            first = len(start) - 1
            wanted = places([(first, first + len(text)) for text in texts], fed.shape[1])
            return sources, mask, fed, mx.array(wanted)

        def logits(sources: mx.array, mask: mx.array, fed: mx.array, wanted: mx.array) -> mx.array:
            states = network.teach(sources, mask, fed)
            return network.head(states.reshape(-1, states.shape[-1])[wanted][None])[0]

        return Trainable(network, inputs, logits)

    def empty(self, config: Config, like: Network) -> Base:
        """See `loading.Family`. The network has tensors of the same names as `like`."""
        tensors = [name for name, _ in tree_flatten(like.parameters())]
        return EncoderDecoderModel(self.network(config, tensors))

    def quantized(
        self, network: Network, config: Config, default: Quantization, mixed: str = ""
    ) -> dict[str, Quantization]:
        """Return the quantization of each weight that is quantized, by name. The embedding and the
        head get at least 8 bits.

        `mixed` is a key of MIXED, or "". The wider bits of MIXED are for the matrices that mlx-lm
        chooses: value projections and the output projections of feed-forward networks, in some
        layers of a T5."""
        if mixed and "num_layers" not in config:
            raise OptionError("quant-predicate is for T5 and decoder-only models: leave it out")
        chosen: dict[str, Quantization] = {}
        for name, array in tree_flatten(network.parameters()):
            is_matrix, size = name.endswith(".weight") and array.ndim == 2, default.group_size
            if not is_matrix or array.shape[1] % size or _NEVER.search(name):
                continue
            chosen[name] = default
            if _WIDER.fullmatch(name):
                affine = Quantization(max(default.bits, WIDER_BITS), size)
                wider = affine if default.mode == "affine" else MODES["mxfp8"]
                chosen[name] = default if array.shape[1] % wider.group_size else wider
            elif mixed and _has_more_bits(config, name):
                chosen[name] = Quantization(MIXED[mixed][1], size)
        return chosen


def _has_more_bits(config: Mapping[str, Any], name: str) -> bool:
    """Return whether a mixed quantization gives a weight of a T5 more bits. It does so for the
    first and the last eighth of a stack's layers, and for every third layer between them."""
    part = _SENSITIVE.fullmatch(name)
    if part is None:
        return False
    decoder_depth = config.get("num_decoder_layers") if part[1] == "decoder" else None
    depth = decoder_depth or config["num_layers"]
    block, eighth = int(part[2]), depth // 8
    return block < eighth or block >= 7 * depth // 8 or (block - eighth) % 3 == 2


def _in_numbers(
    modules: Mapping[str, Any], name: str, array: mx.array, floating: mx.Dtype
) -> list[tuple[str, mx.array]]:
    """Cast a tensor of floats to `floating`. If its layer is quantized and the file has a plain
    matrix, quantize it. Return the resulting arrays by name."""
    path, _, part = name.rpartition(".")
    array = array.astype(floating) if _is_float(array.dtype) else array
    layer: Any = modules.get(path)
    if part != "weight" or not _is_float(array.dtype) or not hasattr(layer, "bits"):
        return [(name, array)]
    how = Quantization(layer.bits, layer.group_size, layer.mode)
    return [(f"{path}.{part}", rows) for part, rows in how.quantize(array).items()]


def _is_float(dtype: mx.Dtype) -> bool:
    return mx.issubdtype(dtype, mx.floating)


def _stored(
    entry: Mapping[str, Any], places: Collection[str], path: str, module: nn.Module
) -> bool | dict[str, Any]:
    """Return the quantization of a module as config.json states it (`entry`), or False for a module
    without scales among the tensors, or whose rows do not divide into groups."""
    how, able = Quantization.of(entry, path), hasattr(module, "to_quantized")
    fits = able and module.weight.shape[-1] % how.group_size == 0
    return how.as_dict() if fits and f"{path}.scales" in places else False
