"""Layers for multi-token prediction in a model's checkpoint, which mlx-lm drops. A conversion
copies them unchanged into a file that mlx-lm does not read. Other conversions lack them, so they
are downloaded alone from the repository of the original model, in requests for ranges of bytes."""

import json
import re
import shutil
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from itertools import filterfalse
from pathlib import Path
from typing import Any

import mlx.core as mx

from ... import system
from ...checkpoints import destination, disk, shards
from ...checkpoints.files import Weights, text_config
from ...checkpoints.formats import safetensors
from ...checkpoints.formats.safetensors import SafetensorsFile
from ...checkpoints.hub import CONFIG, Repository
from ...checkpoints.shards import MTP_LAYERS
from ...checkpoints.source import on_hub
from ...checkpoints.tensors import Tensor, TensorReader
from ...errors import CheckpointError, SourceError
from ...system import show_size
from ...types import Progress

QWEN = frozenset(("qwen3_next", "qwen3_5", "qwen3_5_text", "qwen3_5_moe", "qwen3_5_moe_text"))
"""Types of models with Qwen's layers."""
NUMBERED = frozenset(
    ("deepseek_v3", "deepseek_v32", "glm4_moe", "glm4_moe_lite", "glm_moe_dsa", "step3p5")
)
"""Types of models whose layers are numbered after the layers of the model."""
CENTERED = QWEN | {"step3p5"}
"""Types of models whose authors store norms as the difference from 1."""
SPLIT = frozenset(("qwen3_5_mtp", "glm4_moe_lite_mtp", "glm_moe_dsa_mtp"))
"""Types of the directories that mlx-vlm's `split_mtp` writes. They hold only such layers, in MLX's
layout, and have the type of the target in `text_config`."""
CONVOLUTION = "conv1d.weight"
_MTP = re.compile(r"(?:(?:language_)?model\.)*mtp\.")
_ERNIE = re.compile(r"model\.mtp_(?:block|emb_norm|hidden_norm|linear_proj)\.\d+\.")
_NAMED = {
    **dict.fromkeys((*QWEN, "nemotron_h"), _MTP),
    **dict.fromkeys(("ernie4_5", "ernie4_5_moe"), _ERNIE),
    "mimo": re.compile(r"model\.mtp_layers\.\d+\."),
}
"""Type of a model -> how the names of the layers' tensors begin."""
MTP_TYPES = NUMBERED | _NAMED.keys()
MTP_FAMILIES = MTP_TYPES - {"qwen3_5_text", "qwen3_5_moe_text"}
"""Types of models whose layers are supported, and the same as users read them."""
_NUMBERED = re.compile(r"model\.layers\.(\d+)\.")
MTP_NAME = re.compile(r"(?:.*\.)?(?:mtp\w*|eh_proj)\..*")
"""Matches the names of tensors that may belong to such layers, whatever the family of the model."""
COPY = re.compile(r"(?:.*\.)?(?:embed_tokens|shared_head\.head|lm_head)\.\w+")
"""Matches the names of the layers' copies of the target's embedding and head, which nobody reads.
"""
_ENCODING, _DELTA = "mtplx_mtp_norm_encoding", ("delta", "delta_plus_one", "mlx_delta")
"""Entry with which a pack of MTPLX says how norms are stored, and its values for the difference
from 1."""
_MENTIONS = re.compile(r".*(?:mtp|nextn).*")
CARD = "README.md"
GIVE = "name the original model's repository, as in --draft-model mtp:OWNER/NAME"
_REPOSITORY = re.compile(r"[\w-][\w.-]*/[\w-][\w.-]*")
_FORMAT = "__metadata__"
"""Entry of a safetensors header about the file, which names its writer."""


def family(config: Mapping[str, Any]) -> str:
    """Return the type of the model to which the layers belong."""
    return str(text_config(config).get("model_type") or config.get("model_type"))


def known(config: Mapping[str, Any]) -> Callable[[str], bool]:
    """Return a function that tests by a tensor's name whether it belongs to such layers. The
    function is always false for an unknown family."""
    if str(config.get("model_type")) in SPLIT:
        return lambda name: True
    if (named := _NAMED.get(family(config))) is not None:
        return lambda name: named.match(name) is not None
    layers = text_config(config).get("num_hidden_layers")
    if family(config) in NUMBERED and type(layers) is int:
        # The layers of the model itself have smaller numbers.
        return lambda name: (layer := _NUMBERED.match(name)) is not None and int(layer[1]) >= layers
    return lambda name: False


def carried(directory: Path, config: Mapping[str, Any]) -> tuple[dict[str, mx.array], bool] | None:
    """Return the lazy tensors of the layers in a directory, and whether they have the layout of the
    model's authors; None without any. Raises CheckpointError, also for an unknown family."""
    if family(config) not in MTP_TYPES:
        mentioned = any(_MENTIONS.fullmatch(key) for key in (*config, *text_config(config)))
        infos = Weights(directory).infos if mentioned and shards.format_of(directory) else ()
        if any(map(MTP_NAME.fullmatch, infos)):
            raise CheckpointError(
                f"layers for multi-token prediction of the type {family(config)!a:.60} are not "
                f"supported: those of {', '.join(sorted(MTP_FAMILIES))} are"
            )
        return None
    if (file := directory / MTP_LAYERS).is_file():
        original, arrays = is_original(SafetensorsFile(file), config), safetensors.load(file)
        return without_copies(arrays, arrays.__getitem__), original
    if shards.format_of(directory) not in ("safetensors", "torch"):
        return None
    weights = Weights(directory)
    names = [*filter(known(config), weights.infos)]
    return (without_copies(names, weights.read), is_original(weights, config)) if names else None


def without_copies(names: Iterable[str], read: Callable[[str], mx.array]) -> dict[str, mx.array]:
    return {name: read(name) for name in filterfalse(COPY.fullmatch, names)}


def tensors(directory: Path, config: Mapping[str, Any], weights: Weights) -> dict[str, Tensor]:
    """Return the tensors that a conversion copies. weights: The weights in `directory`."""
    if (file := directory / MTP_LAYERS).is_file():
        reader: TensorReader = SafetensorsFile(file)
        return {name: reader.tensor(name) for name in reader.infos}
    names = [*filter(known(config), weights.infos)]
    return {name: weights.tensor(name) for name in names} if is_original(weights, config) else {}


def is_original(reader: TensorReader, config: Mapping[str, Any]) -> bool:
    """Return whether weights have the layout of the model's authors. mlx-lm transposes convolutions
    and adds 1 to norms. MTPLX quantizes the layers, and may store norms as the authors do. Raises
    CheckpointError."""
    if str(config.get("model_type")) in SPLIT:
        return False
    if any(part.get(_ENCODING) in _DELTA for part in (config, text_config(config))):
        return True
    shapes = [info.shape for name, info in reader.infos.items() if name.endswith(CONVOLUTION)]
    if shapes:
        return any(shape[-1:] != (1,) for shape in shapes)
    quantized = any(name.endswith(".scales") for name in filter(MTP_NAME.fullmatch, reader.infos))
    files = [path for path in reader.paths if path.suffix == ".safetensors"]
    return not quantized and not any(safetensors.metadata(f).get("format") == "mlx" for f in files)


def original_of(name: str, directory: Path, revision: str | None) -> str:
    """Return the repository of the model from which a target was converted: `base_model` of its
    model card, or `_name_or_path` of its config.json. Raises SourceError if it names none.

    Args:
        name: The target's name.
        directory: Its local files."""
    card: Path | None = directory / CARD
    if not (directory / CARD).is_file():
        hub_name, revision = on_hub(name, revision)
        card = Repository(hub_name, revision).small(CARD) if hub_name else None
    from huggingface_hub import repocard

    facts: Mapping[str, Any] = {}
    if card is not None:
        with suppress(Exception):  # the card may be no valid YAML
            facts = repocard.metadata_load(card) or {}
    stated = facts.get("base_model")
    config = disk.read_json(directory / CONFIG) if (directory / CONFIG).is_file() else {}
    candidates = [*(stated if isinstance(stated, list) else [stated]), config.get("_name_or_path")]
    for candidate in candidates:
        if isinstance(candidate, str) and _REPOSITORY.fullmatch(candidate) and candidate != name:
            return candidate
    raise SourceError(f"{name} does not say from which model it was converted: {GIVE}")


def fetch(original: str, announce: Callable[[str], None], progress: Progress) -> Path:
    """Return a directory with the layers for multi-token prediction of a repository. They are
    downloaded once, into the cache directory, and need no network afterwards.

    Args:
        original: The repository.
        announce: Is called with a line about the size, before the download.
        progress: Is called with numbers of bytes after each piece of the download.
    Raises:
        SourceError: The repository cannot be read or has no such layers, or the disk is full.
        CheckpointError: A file of the repository is damaged.
        OutputError: The cache directory cannot be written."""
    if not _REPOSITORY.fullmatch(original):
        raise SourceError(f"{original:.100} is no name of a repository: {GIVE}")
    place = system.cache_directory("mtp") / original.replace("/", "--")
    if place.is_dir():
        return place
    repository = Repository(original, None)
    config_file = repository.small(CONFIG)
    if config_file is None:
        raise SourceError(f"{original} has no {CONFIG}: {GIVE}")
    runs, header = _layers(repository, original, disk.read_json(config_file))
    total = sum(end - begin for _, begin, end in runs)
    announce(f"downloading the layers for multi-token prediction of {original}: {show_size(total)}")
    system.check_room(place, total, f"the part of {original} in {place}", SourceError)
    done = 0

    def advance(nbytes: int) -> None:
        nonlocal done
        done += nbytes
        progress(done, total)

    with destination.directory(place, total) as made:
        with (made / MTP_LAYERS).open("wb") as stream:
            stream.write(header)
            for file, begin, end in runs:
                repository.part(file, begin, end - begin, stream, advance)
        safetensors.read_header(made / MTP_LAYERS)
        shutil.copyfile(config_file, made / CONFIG)
    return place


def _layers(
    repository: Repository, original: str, config: Mapping[str, Any]
) -> tuple[list[tuple[str, int, int]], bytes]:
    """Return the ranges of bytes (file, begin, end) with the tensors of the layers in a repository,
    and the header of a file of these bytes. Copies of the target's embedding and head are left
    out."""
    belongs = known(config)
    files = [file for file in repository.files if file == MTP_LAYERS]
    if not files and (index := repository.small(shards.INDEX)) is not None:
        places = shards.places_of(index)
        files = sorted({file for name, file in places.items() if belongs(name)})
    elif not files:
        kind, files = shards.choose(repository.files)
        files = files if kind == "safetensors" else []
    entries: dict[str, Any] = {_FORMAT: {"format": "pt"}}
    runs: list[tuple[str, int, int]] = []
    position = 0
    for file in files:
        header = repository.header(file)
        stored, first = json.loads(header[8:]), len(header)
        entries[_FORMAT] = stored.pop(_FORMAT, entries[_FORMAT])
        for name, entry in sorted(stored.items(), key=lambda item: item[1]["data_offsets"]):
            if not belongs(name) or COPY.fullmatch(name):
                continue
            begin, end = (first + int(offset) for offset in entry["data_offsets"])
            offsets = [position, position := position + end - begin]
            entries[name] = {**entry, "data_offsets": offsets}
            # Neighbors share one request.
            if runs and runs[-1][0] == file and runs[-1][2] == begin:
                begin = runs.pop()[1]
            runs.append((file, begin, end))
    if not runs:
        raise SourceError(
            f"{original} has no layers for multi-token prediction of a supported family "
            f"({', '.join(sorted(MTP_FAMILIES))}): {GIVE}"
        )
    return runs, safetensors.header_of(entries)
