"""source -> recipe -> writer -> check -> into place, one tensor at a time.

Knows the order of the steps and what is reported. Knows nothing of models' arithmetic: whoever
wants logits compared passes the function that does it.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import mlx.core as mx

from ..errors import OptionError
from . import files, keys
from .check import compare
from .disk import destination, sizes
from .disk.digests import Digests, FileDigest
from .formats.meta.params import PARAMS
from .hub.upload import check_repository, upload
from .keys import Quantisation
from .layouts import as_directory, originals
from .provenance import Provenance
from .recipes import Recipe, recipe_for
from .report import Report as Report
from .shards import FORMATS
from .source import resolve
from .tensors import Tensor
from .unpack import dequantised
from .verify import Comparisons, TextChange, check_fits
from .verify import verify as run_verify
from .wanted import Wanted
from .writer import Change, stored_nbytes, write_config, write_weights

SCRATCH = "scratch"
WRITTEN = (
    "config.json",
    "model*.safetensors",
    "model.safetensors.index.json",
    "provenance.json",
    "README.md",
    *files.CARRIED,
)
"""Patterns of the files of a result."""
OTHER_FILES_BYTES = 10_000_000
"""For the files beside the weights."""


def convert(
    model: str,
    mlx_path: Path | None = None,
    *,
    dtype: str | None = None,
    quantize: bool = False,
    q_bits: int | None = None,
    q_group_size: int | None = None,
    q_mode: str = "affine",
    quant_predicate: str | None = None,
    dequantize: bool = False,
    upload_repo: str | None = None,
    revision: str | None = None,
    overwrite: bool = False,
    shard_bytes: int | None = None,
    verify: bool = False,
    compare_logits: Callable[[Path, Path], float] | None = None,
    compare_text: Callable[[Path, Path], TextChange | str] | None = None,
    progress: Callable[[int, int], None] | None = None,
    download_progress: Callable[[int, int], None] | None = None,
) -> Report:
    """Write a T5 or decoder-only checkpoint as mlx-lm would, and check what was written.

    model: a directory, a .gguf file or a Hub name. mlx_path: the directory to make, weights/NAME
    by default. dtype: float32, float16 or bfloat16; as stored where None. quantize: pack matrices
    to q_bits in groups of q_group_size, where None to those of q_mode (affine: 4 and 64; mxfp4,
    nvfp4, mxfp8). quant_predicate: one of mlx-lm's mixed recipes, mixed_3_6 for example.
    dequantize: unpack a quantised source. upload_repo: of the Hub, where the result goes as well.
    overwrite: replace a model that lies at mlx_path.
    shard_bytes: the most bytes in one file of the result; 4 GB where None, a quarter of the memory
    on a small machine. What a conversion takes of memory stays below 1.2 times that and 300 MB.
    compare_logits: gives the largest difference of log-probabilities of (source, result);
    compare_text: what became of a fixed text. Both are asked before the result is moved into place,
    where whole models fit in memory and in what shard_bytes allows, the text of packed weights
    only; verify: ask both whatever a shard is, and refuse models that do not fit.
    progress: called with (done, total) bytes, read once to write and once to check;
    download_progress: with those of a download.

    Nothing appears at mlx_path unless all went well. Raises SourceError, CheckpointError,
    OptionError, OutputError.
    """
    shard_bytes = sizes.default_shard_bytes() if shard_bytes is None else shard_bytes
    wanted = Wanted.checked(
        dtype=dtype,
        quantize=quantize,
        bits=q_bits,
        group_size=q_group_size,
        mode=q_mode,
        mixed=quant_predicate,
        dequantize=dequantize,
    )
    if shard_bytes < 1:
        raise OptionError(f"a shard needs at least one byte, not {shard_bytes}")
    if verify and compare_logits is None:
        raise OptionError("to verify needs compare_logits: mlx_specdec.assemble has one")
    if upload_repo is not None:
        check_repository(upload_repo)
    local = Path(os.path.expanduser(model))
    path = _destination(model, local, mlx_path)
    destination.check_free(path, overwrite=overwrite, source=local, written=WRITTEN)
    source = resolve(model, revision=revision, progress=download_progress)
    name, commit = _name(model, source)
    with as_directory(source) as directory:
        recipe = recipe_for(directory, wanted.quantisation, wanted.mixed)
        if wanted.dequantize:
            recipe = dequantised(recipe)
        own = originals(recipe.paths, source, directory)
        with Digests([*own, *_configuration(source)]) as digests:

            def provenance(result: Mapping[str, FileDigest]) -> Provenance:
                return Provenance(
                    name, commit, FORMATS[recipe.format], digests.result(), result, recipe.account
                )

            report = _convert(
                directory,
                path,
                recipe,
                wanted,
                shard_bytes,
                verify,
                provenance,
                Comparisons(compare_logits, compare_text),
                progress,
            )
    if upload_repo is not None:
        upload(
            path,
            upload_repo,
            base_model=None if os.path.exists(local) else model,
            by_mlx_lm=not keys.is_encoder_decoder(recipe.config),
        )
    return report


def _convert(
    source: Path,
    path: Path,
    recipe: Recipe,
    wanted: Wanted,
    shard_bytes: int,
    verified: bool,
    provenance: Callable[[Mapping[str, FileDigest]], Provenance],
    comparisons: Comparisons,
    progress: Callable[[int, int], None] | None,
) -> Report:
    if verified:
        check_fits(sum(outline.size for outline in recipe.outlines.values()))
    change = _changes(recipe, None if wanted.dtype is None else getattr(mx, wanted.dtype))
    destination.check_room(
        path, stored_nbytes(recipe.outlines, change) + recipe.scratch_nbytes + OTHER_FILES_BYTES
    )
    steps = _Steps(2 * recipe.nbytes, progress)
    with destination.directory(path) as work:
        scratch = work / SCRATCH
        written = write_weights(
            work, recipe.tensors(scratch), change, shard_bytes=shard_bytes, progress=steps.add
        )
        for file in files.tokenizer_files(source):
            shutil.copyfile(file, work / file.name)
        write_config(work, _config(recipe, wanted), _quantization(recipe, wanted.quantisation))
        with Digests(_results(work)) as digests:
            differences = compare(work, recipe.tensors(scratch), change, steps.add)
            shutil.rmtree(scratch, ignore_errors=True)
            found = run_verify(
                source,
                work,
                written.parameters,
                differences,
                comparisons,
                asked=verified,
                shard_bytes=shard_bytes,
            )
            report = Report(
                path=path,
                tensors=written.tensors,
                parameters=written.parameters,
                nbytes=written.nbytes,
                dtype=_words(wanted),
                differences=differences,
                verified=found,
                notes=_notes(recipe, source),
                provenance=provenance(digests.result()),
            )
        report.provenance.write(work, report.facts())
    steps.finish()
    return report


def _name(model: str, source: Path) -> tuple[str, str | None]:
    """What to call a source, and the commit of what came from the Hub. The rest of a local path is
    nobody else's business."""
    if os.path.exists(os.path.expanduser(model)):
        return source.resolve().name, None
    return model, source.name if source.parent.name == "snapshots" else None


def _configuration(source: Path) -> list[Path]:
    """The file that describes a source, where there is one."""
    return [source / name for name in ("config.json", PARAMS) if (source / name).is_file()]


def _results(work: Path) -> list[Path]:
    return [*sorted(work.glob("model*")), work / "config.json"]


class _Steps:
    """Bytes done, out of bytes in all."""

    def __init__(self, total: int, report: Callable[[int, int], None] | None) -> None:
        self._done, self._total, self._report = 0, total, report
        self.add(0)

    def add(self, nbytes: int) -> None:
        self._done += nbytes
        if self._report is not None and self._done < self._total:
            self._report(self._done, self._total)

    def finish(self) -> None:
        if self._report is not None:
            self._report(self._total, self._total)


def _destination(model: str, local: Path, mlx_path: Path | None) -> Path:
    if mlx_path is not None:
        path = Path(mlx_path).expanduser()
        return path if path.name not in ("", "..") else path.resolve()
    name = local.resolve().name if os.path.exists(local) else model.rstrip("/").rpartition("/")[2]
    if os.path.isfile(local):
        name = Path(name).stem
    if not name.strip():
        name = resolve(model).name
    return Path("weights") / name


def _changes(recipe: Recipe, dtype: mx.Dtype | None) -> Callable[[str, Tensor], Change]:
    def change(name: str, tensor: Tensor) -> Change:
        casts = mx.issubdtype(tensor.dtype, mx.floating) and not recipe.keeps_dtype(name)
        asked = dtype or recipe.natural.get(name)
        return Change(asked if casts else None, recipe.quantised.get(name))

    return change


def _config(recipe: Recipe, wanted: Wanted) -> Mapping[str, Any]:
    """The result's config.json; it names the type under whichever key the source has."""
    config = dict(recipe.config)
    for key in ("dtype", "torch_dtype"):
        if wanted.dtype is not None and key in config:
            config[key] = wanted.dtype
    return config


def _quantization(recipe: Recipe, default: Quantisation | None) -> Mapping[str, Any] | None:
    if default is None:
        return None
    entry: dict[str, Any] = {"group_size": default.group_size, "bits": default.bits}
    entry["mode"] = default.mode
    for name, how in recipe.quantised.items():
        if how != default:
            path = name.removesuffix(".weight")
            entry[path] = {"group_size": how.group_size, "bits": how.bits}
            if how.mode != "affine":
                entry[path]["mode"] = how.mode
    return entry


def _words(wanted: Wanted) -> str:
    words, how = wanted.dtype or "types as stored", wanted.quantisation
    if how is None:
        return f"unpacked, {words}" if wanted.dequantize else words
    return f"{wanted.mixed or f'{how.bits}-bit'}{_mode(how)}, {words}"


def _mode(how: Quantisation) -> str:
    return "" if how.mode == "affine" else f" {how.mode}"


def _notes(recipe: Recipe, source: Path) -> tuple[str, ...]:
    # ByT5's tokenizer is the class alone.
    if recipe.config.get("tokenizer_class") == "ByT5Tokenizer":
        return recipe.notes
    if any(not file.name.startswith("generation") for file in files.tokenizer_files(source)):
        return recipe.notes
    return (*recipe.notes, "the source has no tokenizer files: the result cannot read text yet")
