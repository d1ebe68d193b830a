"""Networks of layers for multi-token prediction. mlx-lm runs each as a model of one layer.

The first layer reads the target's hidden state of a token and the token after it, and predicts the
token after that. With several layers, layer k reads the output of layer k - 1 at the same position
and the token k positions later. Once the last layer has drafted a token, it drafts all
further tokens, and reads its previous output as the hidden state.

Source: arXiv 2412.19437, section 2.2 (DeepSeek-V3)."""

import re
from collections.abc import Sequence
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_flatten

from ...checkpoints.tensors import check_weights
from ...errors import CheckpointError
from ...types import Reusable, after
from ..base import Base
from ..number_format import NumberFormat, evaluate
from ..rows import Rows
from .files import IN_16_BITS, DrafterFiles
from .mtp_files import HIDDEN_FIRST, RAW, RENAMED, MtpFiles, read, recognizes
from .network import Chain, ChainContext, DrafterContext, DrafterKind


class Mtp(Chain):
    """The network of a layer for multi-token prediction. The first layer's contains the later ones.

    Attributes:
        later: The networks of the later layers. If there are any, rows do not share passes.
    """

    def __init__(self, files: MtpFiles) -> None:
        from mlx_lm.models.cache import make_prompt_cache

        from ..mlx_lm.caches import BatchedCache, batched, leaves
        from ..mlx_lm.family import network_of
        from ..mlx_lm.network import inner_of

        self.normed = "norm.weight" in files.tensors
        super().__init__(files)
        family = files.block["model_type"]
        self._reads_raw, self._hidden_first = family in RAW, family in HIDDEN_FIRST
        self.pre_fc_norm_embedding = nn.RMSNorm(files.sizes.width, files.sizes.eps)
        self.pre_fc_norm_hidden = nn.RMSNorm(files.sizes.width, files.sizes.eps)
        model: Any = network_of(files.block, str(files.directory))
        self._renamed = model.sanitize
        self._own_bits = getattr(model, "quant_predicate", None)
        self.cast_predicate = getattr(model, "cast_predicate", lambda path: True)
        self.block: Any = inner_of(model)
        self._path = "backbone" if "backbone" in model else "model"
        self._makers = list(map(batched, make_prompt_cache(model)))
        if not all(isinstance(cache, BatchedCache) for cache in leaves(self.caches(Rows(1)))):
            raise CheckpointError(f"{files.directory}: a layer keeps a state that is not supported")
        # `step` embeds the tokens and applies the norm, so that the layer must do neither.
        for name in {"embed_tokens", "embeddings", "norm", "norm_f"} & self.block.keys():
            self.block[name] = nn.Identity()
        self.later = [Mtp(layer) for layer in files.later]
        self.batched = not self.later

    def bind(self, files: DrafterFiles, target: Base) -> None:
        from ..mlx_lm.network import inner_of

        assert isinstance(files, MtpFiles)
        super().bind(files, target)
        if self._reads_raw:
            self.hidden = (after(target.layers - 1),)
        # A function, because a module would count as a part of the drafter.
        norm = None if self.normed else inner_of(target.network).norm
        self._last = self.norm if norm is None else lambda states: norm(states)
        for layer, stored in zip(self.later, files.later, strict=True):
            layer.bind(stored, target)

    def open(self, count: int = 1) -> DrafterContext:
        return MtpContext(self, count)

    def caches(self, rows: Rows) -> list[Any]:
        return [make(rows) for make in self._makers]

    def cache_nbytes(self, source: int, positions: int) -> int:
        return (1 + len(self.later)) * super().cache_nbytes(source, positions)

    def step(
        self, tokens: mx.array, states: mx.array, caches: list[Any]
    ) -> tuple[mx.array, mx.array]:
        """See `ChainContext._step`."""
        both = [self.pre_fc_norm_embedding(self.embed(tokens)), self.pre_fc_norm_hidden(states)]
        if self._hidden_first:
            both.reverse()
        # mlx-lm's Nemotron-H also reads the cache of a Mamba layer, which does not exist here.
        raw = self.block(self.fc(mx.concatenate(both, axis=-1)), cache=[*caches, None])
        normed = self._last(raw)
        return normed, raw if self._reads_raw else normed

    def load(self, files: DrafterFiles, numbers: NumberFormat) -> None:
        from ..mlx_lm.attention import expanding, intercept, replace_in
        from ..mlx_lm.family import with_numbers
        from ..mlx_lm.loader import cannot_build

        assert isinstance(files, MtpFiles)
        layers = [self, *self.later]
        try:
            for layer, stored in zip(layers, (files, *files.later), strict=True):
                layer.fill(stored)
            # Building a pass raises if mlx-lm cannot run the configuration.
            rows = 2 + len(self.later)
            context = self.open()
            context.add(mx.zeros((1, rows, files.sizes.width)), [rows])
            context.feed([[0] * rows])
        except CheckpointError as problem:
            raise CheckpointError(f"{files.directory}: {problem}") from None
        except Exception as problem:  # mlx-lm's classes do not check, and may raise anything
            raise CheckpointError(f"{files.directory}: {cannot_build(problem)}") from problem
        with_numbers(self, str(files.directory), numbers)
        evaluate(self)
        # After a round the layer reads several rows at once. It needs no trial of its own: the
        # target's layers were tried, and a wrong draft token does not change the output.
        for layer in layers:
            replace_in(layer.block)
            intercept(expanding(layer.block))

    def fill(self, files: MtpFiles) -> None:
        """Load the weights of this layer alone. Raises CheckpointError."""
        from mlx_lm.utils import infer_quant_config

        def stored_bits(path: str, module: nn.Module) -> Any:
            able = hasattr(module, "to_quantized") and f"{path}.scales" in weights
            return able and infer_quant_config(path, module, weights)

        # mlx-lm's `sanitize` converts tensors as if they belonged to a model's first layer.
        inside, prefix = re.compile(r"layers\.\d+\."), f"{self._path}."
        weights = {name: files.tensors[name] for name in files.tensors if not inside.match(name)}
        layer = {prefix + n: files.tensors[n] for n in files.tensors if inside.match(n)}
        renamed = layer if files.block["model_type"] in RENAMED else self._renamed(layer)
        weights |= {name.replace(prefix, "block.", 1): array for name, array in renamed.items()}
        nn.quantize(self, class_predicate=stored_bits)
        own = ((name, array) for name, array in tree_flatten(self.parameters()))
        shapes = {name: array.shape for name, array in own if not name.startswith("later.")}
        check_weights(shapes, {name: array.shape for name, array in weights.items()})
        self.load_weights(list(weights.items()), strict=False)  # without the later layers

    def quant_predicate(self, path: str, module: nn.Module) -> Any:
        path = re.sub(r"^later\.\d+\.", "", path)
        return path not in IN_16_BITS and (self._own_bits is None or self._own_bits(path, module))


class MtpContext(ChainContext):
    """The rows of a group in an Mtp; with later layers only one row. Positions are counted from the
    first that was processed.

    A later layer needs a later token, so that it has processed fewer positions. `_outputs` has, for
    each later layer, the output of the layer before it at the next position to process."""

    _network: Mtp
    _drafted: list[mx.array]

    def __init__(self, network: Mtp, count: int) -> None:
        from ..mlx_lm.caches import leaves

        super().__init__(network, count)
        self._caches = leaves(self._entries)
        self._later = [MtpContext(layer, 1) for layer in network.later]
        self._processed = [layer.lengths for layer in self._later]
        self._outputs: list[mx.array] = []

    def _process(
        self, hidden: mx.array, following: Sequence[Sequence[int]]
    ) -> tuple[mx.array, mx.array]:
        head, states = super()._process(hidden, following)
        outputs = states
        for number, layer in enumerate(self._later):
            if number < len(self._outputs):
                outputs = mx.concatenate([self._outputs[number], outputs], axis=1)
            self._outputs[number:] = [outputs[:, -1:], *self._outputs[number + 1 :]]
            outputs = outputs[:, :-1]
            if not (rows := outputs.shape[1]):
                break
            _, outputs = layer._step(layer._advance([following[0][-rows:]]), outputs)
        self._processed = [layer.lengths for layer in self._later]
        return head, states

    def _begin(self, hidden: mx.array, following: Sequence[Sequence[int]], count: int) -> mx.array:
        logits = super()._begin(hidden, following, count)
        self._drafted, self._inputs = [], self._fed_back[:, :0]
        return logits

    def next_logits(self, tokens: mx.array) -> mx.array:
        number = len(self._drafted)
        self._drafted.append(tokens)
        if not self._later:
            return super().next_logits(tokens)
        if number >= len(self._outputs):
            layer = self._later[-1]
            layer._rows.advance(tokens, 1)
            head, self._fed_back = layer._step(tokens, self._fed_back)
            return layer._logits(head)
        # The layer also reads the positions that had to wait for these draft tokens.
        layer, tokens = self._later[number], mx.concatenate(self._drafted, axis=1)
        states = mx.concatenate([self._outputs[number], self._inputs], axis=1)
        layer._rows.advance(tokens, tokens.shape[1])
        head, self._inputs = layer._step(tokens, states)
        self._fed_back = self._inputs[:, -1:]
        return layer._logits(head[:, -1:])

    def _step(self, tokens: mx.array, states: mx.array) -> tuple[mx.array, mx.array]:
        return self._network.step(tokens, states, self._entries)

    def rewind(self, lengths: tuple[int, ...]) -> None:
        for layer, processed in zip(self._later, self._processed, strict=True):
            layer.rewind(processed)
        super().rewind(lengths)

    def snapshot(self, sequence: int) -> Reusable:
        """See `RowsContext`. Only the first layer's positions are returned, and later layers begin
        without any. If a cache has a window, nothing is returned, because positions are missing."""
        return Reusable() if self._rows.windows else super().snapshot(sequence)

    def _state(self) -> list[list[mx.array]]:
        return super()._state() + [arrays for layer in self._later for arrays in layer._state()]


MTP = DrafterKind(
    recognizes,
    read,
    Mtp,
    described=False,
    missing="there is no such drafter to propose: the checkpoint carries no layers for multi-token "
    "prediction, which mlx-lm's conversions drop and draft-model mtp fetches, or another drafter "
    "was named with draft-model",
)
