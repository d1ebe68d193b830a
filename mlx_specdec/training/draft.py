"""Training of a draft model on its target's distribution. A batch holds sequences of similar
length, and the logits of one batch are in memory. Source of the loss: DistillSpec (Zhou et
al., arXiv 2310.08461, sections 3 and 4)."""

import json
import shutil
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
from mlx.utils import tree_flatten, tree_unflatten

from .. import OptionError, VocabularyError
from ..checkpoints import files
from ..checkpoints.files import Weights
from ..checkpoints.source import as_directory, resolve
from ..checkpoints.tensors import Tensor, dtype_name
from ..checkpoints.writer import ResultTensor, write_config, write_weights
from ..conversion.report import PROVENANCE, combined, digests_of, maker
from ..engine.pair import Pair
from ..models.base import Base, Trainable
from ..models.cpu_layers import lighten
from ..models.encoder_decoder.family import EncoderDecoderFamily
from ..models.loading import family_of_config, family_of_network, trainable
from ..models.number_format import dequantized
from ..system import default_shard_bytes
from .config import TrainConfig
from .fit import STORED_DTYPE, Task, Training, Watcher, stored_type, work_directory

_FLOOR = -80.0
"""Smallest log-probability. The probability of a much smaller one is 0 in float32."""


def log_probabilities(logits: mx.array) -> mx.array:
    """Return float32 log-probabilities at temperature 1 of logits (..., vocabulary)."""
    wide = logits.astype(mx.float32)
    return mx.maximum(wide - mx.logsumexp(wide, axis=-1, keepdims=True), _FLOOR)


@dataclass(frozen=True)
class Closeness:
    """Averages over the tokens of the held-out sequences.

    Attributes:
        loss: The divergence that training minimizes.
        acceptance: The acceptance rate at temperature 1, sum min(p, q) (Leviathan et al., arXiv
            2211.17192, corollary 3.6).
        agreement: The acceptance rate at temperature 0: the share of equal most likely tokens.
    """

    loss: float
    acceptance: float
    agreement: float

    @property
    def score(self) -> float:
        return 1 - self.acceptance

    def describe(self) -> str:
        """Return the two acceptance rates in words."""
        first, second = self.acceptance, self.agreement
        return f"acceptance at temperature 1 {first:.1%}, same first choice {second:.1%}"


class DraftTask(Task):
    """The training task of a draft model."""

    def __init__(self, draft: Trainable, training: Training, config: TrainConfig) -> None:
        super().__init__(draft.network, training, config)
        self._draft = draft
        self._texts = training.rows.texts()

    def ordered(self, examples: np.ndarray) -> np.ndarray:
        lengths = [len(self._prompts[s]) + len(self._texts[s]) for s in examples]
        return examples[np.argsort(lengths, kind="stable")]

    def count(self, examples: np.ndarray) -> int:
        return sum(len(self._texts[sample]) for sample in examples)

    def take(self, examples: np.ndarray, chance: np.random.Generator) -> tuple[mx.array, ...]:
        """Return the target's logits (tokens, vocabulary), and the draft model's inputs."""
        texts = [self._texts[sample] for sample in examples]
        spans = zip(self._rows.starts[examples], texts, strict=True)
        rows = np.concatenate([np.arange(start, start + len(text)) for start, text in spans])
        logits = self._base.head(self._rows.states(rows)[None])[0, :, : self._vocabulary]
        return logits, *self._draft.inputs([self._prompts[sample] for sample in examples], texts)

    def loss(self, *batch: mx.array) -> mx.array:
        """Return the mean divergence of the tokens, KL(target || draft). It is large if the draft
        misses tokens of the target."""
        target, draft = map(log_probabilities, self._logits(*batch))
        return nn.losses.kl_div_loss(draft, target, reduction="mean")

    def sums(self, *batch: mx.array) -> mx.array:
        """Return sums over tokens, shape (4,): the divergence, the acceptance rates at temperatures
        1 and 0, and the number of tokens."""
        target, draft = self._logits(*batch)
        p, q = log_probabilities(target), log_probabilities(draft)
        accepted = mx.exp(mx.minimum(p, q)).sum()
        agreeing = (mx.argmax(target, axis=-1) == mx.argmax(draft, axis=-1)).sum()
        divergence = nn.losses.kl_div_loss(q, p, reduction="sum")
        return mx.stack([divergence, accepted, agreeing, mx.array(len(target))])

    def figures(self, total: mx.array) -> Closeness:
        return Closeness(*(np.array(total[:3]) / total[3].item()).tolist())

    def _logits(self, target: mx.array, *inputs: mx.array) -> tuple[mx.array, mx.array]:
        return target, self._draft.logits(*inputs)[:, : self._vocabulary]


def short_name(model: str) -> str:
    """Return the last part of a directory's path, or a Hub name unchanged."""
    path = Path(model).expanduser()
    return path.resolve().name if path.exists() else model


def write(
    directory: Path,
    facts: Mapping[str, Any],
    network: nn.Module,
    config: Mapping[str, Any],
    source: Path,
) -> None:
    """Write all files of the model. The tokenizer files come from the directory `source`. Raises
    OSError."""
    for file in files.tokenizer_files(source):
        shutil.copyfile(file, directory / file.name)
    left = ("quantization", "torch_dtype")
    changed = {key: value for key, value in config.items() if not key.startswith(left)}
    family = family_of_config(config)
    if isinstance(family, EncoderDecoderFamily):
        changed = family.written_config(changed, dict(tree_flatten(network.parameters())))
    write_trained(directory, facts, network, changed)


def write_trained(
    directory: Path, facts: Mapping[str, Any], network: nn.Module, config: Mapping[str, Any]
) -> None:
    """Write weights, config.json, and provenance.json with `facts`. Raises OSError."""
    outputs = [
        ResultTensor(name, Tensor.of(array.astype(stored_type(network, name, array))), array.size)
        for name, array in sorted(tree_flatten(network.parameters()))
    ]
    write_weights(directory, outputs, shard_bytes=default_shard_bytes())
    write_config(directory, {**config, "dtype": dtype_name(STORED_DTYPE)})
    digests = digests_of([*sorted(directory.glob("model*")), directory / "config.json"])
    written = {name: {"nbytes": d["bytes"], "sha256": d["sha256"]} for name, d in digests.items()}
    text = json.dumps({**maker(), **facts, "files": written}, indent=2, ensure_ascii=False)
    (directory / PROVENANCE).write_text(text + "\n", encoding="utf-8")


def train(
    pair: Pair,
    file: Path,
    output: Path,
    config: TrainConfig,
    watcher: Watcher,
) -> str:
    """Train a draft model for the target of `pair`, write it to the directory `output`, and return
    a report in one line.

    Training begins with the draft model of `pair`, or with `config.layers` of the target's layers.
    The best model on held-out sequences is written, which may be the initial one.

    Raises:
        PromptError: If the data has too few usable texts.
        OptionError: If the pair has a drafter that reads hidden states.
        VocabularyError: If the draft model lacks tokens of the target.
        CheckpointError: If the files of the initial model cannot be loaded.
        OutputError: If `output` exists or cannot be written.
    """
    name, model = pair.draft_name or pair.name, pair.draft
    with work_directory(output) as directory, as_directory(resolve(name)) as source:
        if pair.drafter_network is not None and pair.draft_name is not None:
            raise OptionError(
                f"{name} reads hidden states and is no draft model: name a draft model to begin "
                "with, or give layers"
            )
        if model is not None and (pair.translation or model.vocabulary < pair.vocabulary):
            raise VocabularyError(
                f"{name} has {model.vocabulary} of the target's {pair.vocabulary} tokens, and a "
                "draft learns to predict all of them: take another, or give layers"
            )
        described, start = files.read_config(source), short_name(name)
        if model is None:
            layers = config.layers or 1
            model, described = shaped(pair.target, described, layers)
            start = f"{layers} layer{'' if layers == 1 else 's'} of {start}"
        student = trainable(model)
        training = Training(pair, file, directory, config, watcher)
        weights = [*Weights(source).paths, source / "config.json"]
        origin = {
            "target": short_name(pair.name),
            "start": start,
            "start_digest": combined(digests_of(weights)),
            "data_digest": training.digest,
        }
        task = DraftTask(student, training, config)
        finish = partial(write, network=student.network, config=described, source=source)
        return training.improve(task, output, origin, finish)


def shaped(model: Base, config: Mapping[str, Any], layers: int) -> tuple[Base, dict[str, Any]]:
    """Copy a model with fewer decoder layers, which are evenly spaced and include the first and the
    last, and return the copy with its config.json. Raises OptionError if the family cannot have
    this number of layers. config: The target's config.json."""
    family, network = family_of_network(model.network), model.network
    depth = len(network.layers)
    if layers > depth:
        raise OptionError(f"layers must be 1 to the target's {depth}, not {layers}")
    chosen = [round(at * (depth - 1) / max(1, layers - 1)) for at in range(layers)]
    plain = {k: v for k, v in config.items() if not k.startswith("quantization")}
    shape = family.with_layers(plain, chosen)
    model = family.empty(shape, network)
    small = model.network
    weights = _copied(network, network.layers, small, chosen)
    small.update(tree_unflatten(list(weights)))
    mx.eval(small.parameters())
    lighten(small)
    return model, shape


def _copied(
    network: nn.Module, layers: Sequence[nn.Module], small: nn.Module, chosen: Sequence[int]
) -> Iterator[tuple[str, mx.array]]:
    """Yield the arrays of the small network, from the layers of the target that it copies."""
    path = next((path for path, module in network.named_modules() if module is layers[0]), "")
    before = path.removesuffix("0")
    arrays = dict(tree_flatten(dequantized(network).parameters()))
    for name, array in tree_flatten(small.parameters()):
        source = name
        if before and name.startswith(before):
            number, _, rest = name.removeprefix(before).partition(".")
            source = f"{before}{chosen[int(number)]}.{rest}"
        if source not in arrays or arrays[source].shape != array.shape:
            raise OptionError(
                "the target's layers are not alike, and a few of them are no model: give a draft "
                "model to begin with"
            )
        yield name, arrays[source]
