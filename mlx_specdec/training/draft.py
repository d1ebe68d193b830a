"""A draft and the texts that it learns its target's distribution on, as a task to fit. A batch
holds texts of about one length; memory holds one batch of logits. Source of the divergences:
DistillSpec (Zhou et al., arXiv 2310.08461, sections 3 and 4)."""

import json
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
from mlx.utils import tree_flatten, tree_unflatten

from ..checkpoints import files
from ..checkpoints.disk import default_shard_bytes
from ..checkpoints.files import Weights
from ..checkpoints.source import as_directory, resolve
from ..checkpoints.tensors import Tensor
from ..checkpoints.writer import TensorChange, write_config, write_weights
from ..conversion.report import PROVENANCE, combined, digests_of, maker
from ..engine.pair import Pair
from ..errors import OptionError, VocabularyError
from ..models import families
from ..models.base import Base
from ..models.encoder_decoder.family import EncoderDecoderFamily
from ..models.loading import trainable
from ..models.number_format import dequantize, twin_of
from ..models.self_draft import evenly
from ..models.t5.family import SHARED
from ..models.trainable import Trainable
from ..options import own_layers
from .config import DataConfig, DistillConfig, DraftConfig
from .fit import STORED, TextTask, Trained, Training, Watcher, stored_type, work_directory

_FLOOR = -80.0
"""Smallest log-probability: less is no number in float32 once it is a probability."""


def log_probabilities(logits: mx.array) -> mx.array:
    """(..., vocabulary) logits of any type -> float32 log-probabilities at temperature 1."""
    wide = logits.astype(mx.float32)
    return mx.maximum(wide - mx.logsumexp(wide, axis=-1, keepdims=True), _FLOOR)


def forward(target: mx.array, draft: mx.array) -> mx.array:
    """KL(target || draft): the draft covers whatever the target may say."""
    return (mx.exp(target) * (target - draft)).sum(axis=-1)


def jensen_shannon(target: mx.array, draft: mx.array) -> mx.array:
    """The mean of both distributions' KL to the distribution between them."""
    middle = mx.logaddexp(target, draft) - mx.log(mx.array(2.0))
    return (forward(target, middle) + forward(draft, middle)) / 2


def total_variation(target: mx.array, draft: mx.array) -> mx.array:
    """Half of sum |p - q|: the share that speculative sampling rejects."""
    return mx.abs(mx.exp(target) - mx.exp(draft)).sum(axis=-1) / 2


DIVERGENCES: dict[str, Callable[[mx.array, mx.array], mx.array]] = {
    "forward": forward,
    # The draft says nothing that the target would not.
    "reverse": lambda target, draft: forward(draft, target),
    "jsd": jensen_shannon,
    "tvd": total_variation,
}
"""By the names of DistillConfig; each takes (rows, vocabulary) log p, gives (rows,)."""


@dataclass(frozen=True)
class Closeness:
    """On texts that were held out, averaged over their tokens. loss: the divergence that is
    minimized. acceptance: probability that a token drafted at temperature 1 is accepted, sum min(p,
    q) (Leviathan et al., arXiv 2211.17192, corollary 3.6). agreement: share of rows with the same
    likeliest token, accepted at temperature 0."""

    loss: float
    acceptance: float
    agreement: float

    @property
    def score(self) -> float:
        return 1 - self.acceptance


class DraftTask(TextTask):
    """Task of a draft."""

    def __init__(self, draft: Trainable, training: Training, config: DistillConfig) -> None:
        super().__init__(draft.network, training, config)
        self._draft = draft
        self._divergence = DIVERGENCES[config.divergence]
        self._texts = training.rows.texts()

    def ordered(self, examples: np.ndarray) -> np.ndarray:
        lengths = [len(self._prompts[s]) + len(self._texts[s]) for s in examples]
        return examples[np.argsort(lengths, kind="stable")]

    def count(self, examples: np.ndarray) -> int:
        return sum(len(self._texts[sample]) for sample in examples)

    def take(self, examples: np.ndarray, chance: np.random.Generator) -> tuple[mx.array, ...]:
        """The target's logits (tokens, vocabulary), and what the draft is given."""
        texts = [self._texts[sample] for sample in examples]
        spans = zip(self._rows.starts[examples], texts, strict=True)
        rows = np.concatenate([np.arange(start, start + len(text)) for start, text in spans])
        logits = self._base.head(self._rows.states(rows)[None])[0, :, : self._vocabulary]
        return logits, *self._draft.inputs([self._prompts[sample] for sample in examples], texts)

    def loss(self, *batch: mx.array) -> mx.array:
        """The divergence, averaged over tokens."""
        return self._divergence(*map(log_probabilities, self._logits(*batch))).mean()

    def sums(self, *batch: mx.array) -> mx.array:
        """(4,): the divergence, the accepted share, equal first choices, and how many tokens."""
        target, draft = self._logits(*batch)
        p, q = log_probabilities(target), log_probabilities(draft)
        accepted = mx.exp(mx.minimum(p, q)).sum()
        agreeing = (mx.argmax(target, axis=-1) == mx.argmax(draft, axis=-1)).sum()
        return mx.stack([self._divergence(p, q).sum(), accepted, agreeing, mx.array(len(target))])

    def figures(self, total: mx.array) -> Closeness:
        return Closeness(*(np.array(total[:3]) / total[3].item()).tolist())

    def _logits(self, target: mx.array, *inputs: mx.array) -> tuple[mx.array, mx.array]:
        return target, self._draft.logits(*inputs)[:, : self._vocabulary]


@dataclass(frozen=True)
class Initial:
    """model: before its first step. config: its config.json. directory: where its tokenizer files
    are. origin: in words, where it comes from."""

    model: Base
    config: Mapping[str, Any]
    directory: Path
    origin: str


@contextmanager
def initial(pair: Pair, shape: DraftConfig | None, seed: int) -> Iterator[Initial]:
    """Return the pair's own draft or, where it has none, a new one of a shape; its files exist
    during the block. Raises OptionError for a target that is heads, VocabularyError for a draft
    that lacks tokens of the target, CheckpointError as loading does."""
    if pair.heads is not None:
        raise OptionError(f"{pair.name} is Medusa heads: give the base model that they name")
    if pair.drafter_network is not None and pair.draft_name is not None:
        raise OptionError(
            f"{pair.draft_name} reads hidden states and is no draft model: name a draft model to "
            "begin with, or give layers"
        )
    if own_layers(pair.draft_name) is not None:
        raise OptionError("the draft self has no weights of its own: give layers instead")
    if pair.draft is not None and (pair.translation or pair.draft.vocabulary < pair.vocabulary):
        raise VocabularyError(
            f"{pair.draft_name} knows {pair.draft.vocabulary} of the target's {pair.vocabulary} "
            "tokens, and a draft learns to predict all of them: take another, or give layers"
        )
    with as_directory(resolve(pair.draft_name or pair.name)) as directory:
        config = files.read_config(directory)
        name = short_name(pair.draft_name or pair.name)
        if pair.draft is not None:
            yield Initial(pair.draft, config, directory, name)
        elif shape is not None:
            model, changed = shaped(pair.target, config, shape.layers, shape.width, seed)
            layers = f"{shape.layers} layer{'' if shape.layers == 1 else 's'}"
            width = "" if shape.width is None else f", {shape.width} wide, random weights"
            yield Initial(model, changed, directory, f"{layers} of {name}{width}")


def short_name(model: str) -> str:
    """A directory's own name, a Hub name as it is."""
    path = Path(model).expanduser()
    return path.resolve().name if path.exists() else model


def write(directory: Path, facts: Mapping[str, Any], network: nn.Module, initial: Initial) -> None:
    """Write all files of the model; facts: of provenance.json, besides digests. Raises OSError."""
    tensors = {
        name: array.astype(stored_type(network, name, array))
        for name, array in tree_flatten(network.parameters())
    }
    for file in files.tokenizer_files(initial.directory):
        shutil.copyfile(file, directory / file.name)
    write_trained(directory, tensors, _config(network, initial.config), facts)


def write_trained(
    directory: Path,
    tensors: Mapping[str, mx.array],
    config: Mapping[str, Any],
    facts: Mapping[str, Any],
) -> None:
    """Weights, config.json and provenance.json, as `write` says."""
    named = [(name, Tensor.of(array)) for name, array in sorted(tensors.items())]
    shard_bytes = default_shard_bytes()
    write_weights(directory, named, lambda name, tensor: TensorChange(), shard_bytes=shard_bytes)
    write_config(directory, config, None)
    digests = digests_of([*sorted(directory.glob("model*")), directory / "config.json"])
    written = {name: {"nbytes": d["bytes"], "sha256": d["sha256"]} for name, d in digests.items()}
    text = json.dumps({**maker(), **facts, "files": written}, indent=2, ensure_ascii=False)
    (directory / PROVENANCE).write_text(text + "\n", encoding="utf-8")


def _config(network: nn.Module, config: Mapping[str, Any]) -> dict[str, Any]:
    left = ("quantization", "torch_dtype")
    changed = {key: value for key, value in config.items() if not key.startswith(left)}
    changed["dtype"] = str(STORED).rpartition(".")[2]
    family = families.of_config(config)
    if isinstance(family, EncoderDecoderFamily):
        return family.written_config(changed, dict(tree_flatten(network.parameters())))
    return changed


def train(
    pair: Pair,
    file: Path,
    output: Path,
    shape: DraftConfig | None,
    data: DataConfig,
    config: DistillConfig,
    watcher: Watcher,
) -> Trained:
    """Train a draft for `pair`'s target and write it as a directory that loads. pair: its draft is
    the start, unless a shape is given. The best draft on held-out texts is written, and that may be
    the start. Raises PromptError for data with nothing usable, OptionError and VocabularyError for
    models that cannot be trained so, OutputError where `output` exists or cannot be written."""
    with work_directory(output) as directory, initial(pair, shape, config.seed) as begun:
        student = trainable(begun.model)
        training = Training(pair, file, directory, data, watcher)
        weights = [*Weights(begun.directory).paths, begun.directory / "config.json"]
        origin = {
            "target": short_name(pair.name),
            "start": begun.origin,
            "start_digest": combined(digests_of(weights)),
            "data_digest": training.digest,
        }
        task = DraftTask(student, training, config)
        finish = partial(write, network=student.network, initial=begun)
        return training.improve(task, output, origin, finish)


EMBEDDING_SPREAD = 0.02


def shaped(
    model: Base, config: Mapping[str, Any], layers: int, width: int | None, seed: int
) -> tuple[Base, dict[str, Any]]:
    """A model with `layers` of the decoder's layers, and its config.json. config: the model's.
    width: of hidden states; None keeps it and takes the model's own layers, evenly chosen, with all
    that is around them. seed: of random weights. Raises OptionError for an impossible shape."""
    family, network = families.of_model(model), model.network
    depth = len(family.layers(network))
    chosen = evenly(layers, depth)
    plain = {k: v for k, v in config.items() if not k.startswith("quantization")}
    shape = family.with_layers(plain, chosen)
    if width is not None:
        shape = family.with_width(shape, width)
    model = family.empty(shape, network)
    small = model.network
    own = family.layers(network)
    weights = _copied(network, own, small, chosen) if width is None else _random(small, seed)
    small.update(tree_unflatten(list(weights)))
    mx.eval(small.parameters())
    return model, shape


def _copied(
    network: nn.Module, layers: Sequence[nn.Module], small: nn.Module, chosen: Sequence[int]
) -> Iterator[tuple[str, mx.array]]:
    """Each of the small network's arrays, from the layer that it stands for."""
    path = next((path for path, module in network.named_modules() if module is layers[0]), "")
    before = path.removesuffix("0")
    whole = twin_of(network)
    dequantize(whole)
    given = dict(tree_flatten(whole.parameters()))
    for name, array in tree_flatten(small.parameters()):
        source = name
        if before and name.startswith(before):
            number, _, rest = name.removeprefix(before).partition(".")
            source = f"{before}{chosen[int(number)]}.{rest}"
        if source not in given or given[source].shape != array.shape:
            raise OptionError(
                "the target's layers are not alike, and a few of them are no model: give a draft "
                "model to begin with"
            )
        yield name, given[source]


def _random(network: nn.Module, seed: int) -> Iterator[tuple[str, mx.array]]:
    """Matrices of variance 1 / inputs, embeddings as their families begin with; vectors stay."""
    tables = {
        f"{path}.weight" for path, m in network.named_modules() if isinstance(m, nn.Embedding)
    }
    leaves = sorted(tree_flatten(network.parameters()))
    draws = mx.random.split(mx.random.key(seed), len(leaves))
    for (name, array), draw in zip(leaves, draws, strict=True):
        if array.ndim < 2 or not mx.issubdtype(array.dtype, mx.floating):
            yield name, array
            continue
        spread = array.shape[-1] ** -0.5
        if name in tables:
            spread = 1.0 if name == SHARED else EMBEDDING_SPREAD
        yield name, spread * mx.random.normal(array.shape, key=draw)
