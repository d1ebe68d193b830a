"""Flags that name models and drafters, and the loading of these models. Importing this module does
not import MLX."""

from __future__ import annotations

from dataclasses import fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Self

from ..checkpoints.stored_models import ROOT
from ..checkpoints.stored_models import names as stored_names
from ..core.options import Options, proposers
from ..engine.known_pairs import AUTO, FAST, TOKENS, USES, best_for, draft_for, this_machine
from ..errors import OptionError
from ..models.cache_settings import CacheSettings
from ..models.drafters import DRAFTER_KINDS
from ..system import parse_size, show_size
from . import render
from .flags import Flags, ModelSampling, flag

if TYPE_CHECKING:
    from ..engine.pair import Pair

SHIPPED_TARGET = "weights/t5-enfr"
SHIPPED_DRAFT = "weights/t5-enfr-draft"
SHIPPED_PROMPT = (
    "translate English to French: Let's go to the store and buy some groceries including eggs, "
    "avocadoes, and bread."
)
NOT_SHIPPED = (
    "this installation lacks the sample models, which wheels and clones have: name a pair, such as "
    "--model google/flan-t5-large --draft-model google/flan-t5-small; mlx-specdec pairs lists more"
)
DRAFTLESS = ("ngram", "medusa", "none")
"""Proposers that use no draft model."""
Dtype = Literal["auto", "float32", "float16", "bfloat16"]
REVISION = "The branch, tag or commit of the model on the Hub."
DTYPE = "The number format to compute in."


class Sources(Flags, panel="Model"):
    model: str | None = flag(
        "The target: a directory, a name on the Hub, lmstudio:PUBLISHER/NAME or ollama:NAME:TAG. "
        "With auto, auto:code or auto:fast, the table of pairs names the best pair for chat or "
        "code, or the fastest one.",
        None,
        "--model-name",
        show_default="the shipped translator",
        autocompletion=lambda: [AUTO, f"{AUTO}:{USES[1]}", f"{AUTO}:{FAST}", *stored_names()],
    )
    draft_model: str | None = flag(
        "The draft model or hidden-state drafter: a directory or a name on the Hub. With mtp, the "
        "target drafts with its layers for multi-token prediction; mtp:NAME fetches such layers "
        "from another model. With auto, the table of pairs names the fastest draft.",
        None,
        "--draft-model-name",
        autocompletion=lambda: [AUTO, "mtp", *stored_names()],
    )
    revision: str | None = flag(REVISION)
    dtype: Dtype = flag(DTYPE, "auto")
    q_bits: int | None = flag("Quantize the target to this many bits on load.")
    draft_q_bits: int | None = flag(
        "Quantize the draft to this many bits on load.", None, "--draft-bits"
    )
    expand_weights: bool | None = flag(
        "Dequantize quantized weights on load, which is faster on a CPU and takes more memory.",
        show_default="on a CPU with --dtype auto, if a model then takes a quarter of the memory "
        "at most",
    )

    def begin(self) -> Self:
        """Choose the pair for `--model auto`, and print the size of its download. Raises
        OptionError if no pair fits."""
        word, _, use = (self.model or "").partition(":")
        if word != AUTO:
            return self
        use, machine = use or USES[0], this_machine()
        pair, bits = best_for(use, machine, self.q_bits)
        target, q_bits = pair.target.source(bits)
        draft, draft_q_bits = pair.draft_source(self.draft_q_bits or bits)
        nbytes = pair.target.download(bits)
        if self.draft_model in (None, AUTO):
            nbytes += pair.draft.download(pair.draft_bits(bits))
            speed = render.told_speed(pair, bits, USES[0] if use == FAST else use, machine)
            gain = f" Speed here: {speed}."
        else:
            draft, draft_q_bits, gain = self.draft_model, self.draft_q_bits, ""
        render.note(
            f"auto: {target} at {bits} bits, drafts from {draft}; "
            f"{show_size(pair.nbytes(bits, machine.on_cpu))} of memory with {TOKENS:,} tokens."
            f"{gain} Downloads about {show_size(nbytes)} from the Hub, less what its cache has"
        )
        chosen: dict[str, Any] = {"model": target, "draft_model": draft}
        return replace(self, **chosen, q_bits=q_bits, draft_q_bits=draft_q_bits)

    def named(self) -> tuple[str, str | None]:
        """Return the names of the target and the draft model, by default of the shipped ones.
        Raises OptionError if the shipped models are missing, or if there is no draft "auto" for the
        target."""
        target = self.model or SHIPPED_TARGET
        if self.model is None and not any((place / target).is_dir() for place in (Path(), ROOT)):
            raise OptionError(NOT_SHIPPED)
        if self.draft_model == AUTO:
            return target, draft_for(target)
        return target, self.draft_model or (SHIPPED_DRAFT if self.model is None else None)


class Models(Sources):
    adapter_path: Path | None = flag(
        "An adapter for the target: a directory that mlx-lm has trained.", metavar="DIR"
    )
    draft_vocab: Literal["same", "intersect"] = flag(
        "With intersect, a draft model of another vocabulary drafts shared tokens only.", "same"
    )
    distributed: Literal["tensor", "pipeline"] | None = flag(
        "Share the target between the machines that mlx-specdec launch or mlx.launch has started. "
        "With tensor, each machine has a part of every layer; with pipeline, it has some layers."
    )

    def loading(self) -> dict[str, Any]:
        """Return the arguments of `engine.loading.load`, except for the names of the models. Raises
        OptionError if flags are wrong."""
        names = {one.name for one in fields(Models)} - {"model", "draft_model"}
        return {name: getattr(self, name) for name in names}

    def begin(self) -> Self:
        """Connect the ranks that share the target, if there are any. Rank 0 returns and runs the
        command. The other ranks load the target, and their process ends when rank 0 ends."""
        if self.distributed is None:
            return super().begin()
        if (self.model or "").partition(":")[0] == AUTO:
            raise OptionError("--model auto knows one machine alone: name the model to share")
        from ..models.distributed.group import join

        ranks = join()
        # Only rank 0 needs a draft model. It reports errors of all ranks.
        target, _ = ranks.together(replace(self, draft_model=None).named)
        if ranks.rank:
            render.silence(True)
            load_pair(target, **self.loading())
        return self


class MemoryFlags(Flags, panel="Model"):
    memory_budget: str | None = flag(
        "The memory for all completions together, such as 8GB. If serve has several models, it "
        "includes their weights. Completions that do not fit wait.",
        metavar="SIZE",
        show_default="what the machine has left",
    )

    def memory(self) -> int | None:
        """Return the budget in bytes, or None for the default. Raises OptionError if it is no
        size."""
        size = self.memory_budget
        return None if size is None else parse_size("--memory-budget", size)


class TextFlags(ModelSampling, Models, panel="Drafting"):
    """The flags of all commands that generate completions."""

    kv_bits: int | None = flag(
        "Quantize the KV cache to 2, 3, 4, 6 or 8 bits; outputs with drafts can then differ from "
        "plain decoding.",
        panel="Model",
    )
    kv_group_size: int = flag(
        "The number of values in the KV cache that share one scale.", 64, panel="Model"
    )
    max_kv_size: int | None = flag(
        "The number of newest tokens that the KV cache keeps.", panel="Model"
    )
    proposer: str | None = flag(
        "The proposer: draft (a draft model), ngram (lookup in prompt and completion), medusa "
        f"(Medusa heads), a hidden-state drafter by its kind ({', '.join(DRAFTER_KINDS)}), "
        "auto (lookup first, then one of the others), or none.",
        metavar="NAME",
        autocompletion=proposers,
        show_default="auto; if --num-draft is a number and something else drafts, without lookup",
    )
    num_draft: str = flag(
        "The number of draft tokens in a round; auto learns it on this machine.",
        "auto",
        "--num-draft-tokens",
        metavar="N|auto",
    )
    ngram_min: int | None = flag(
        "The shortest match, in tokens, after which lookup drafts.",
        show_default="2; 4 if there is another drafter and no --lookup-file",
    )
    lookup_file: list[Path] | None = flag(
        "A text file that lookup also searches; the flag may be repeated.",
        metavar="FILE",
        exists=True,
        dir_okay=False,
    )
    regular_decode: bool = flag("Decode plainly, without speculation.")

    def named(self) -> tuple[str, str | None]:
        target, draft = super().named()
        return target, None if self.regular_decode or self.proposer in DRAFTLESS else draft

    def loading(self) -> dict[str, Any]:
        caches = CacheSettings(self.kv_bits, self.kv_group_size, self.max_kv_size)
        return {**super().loading(), "caches": caches}

    def options(self) -> Options:
        """Return the settings of a request. Raises OptionError if flags are wrong."""
        plain = "--regular-decode" if self.regular_decode else f"--proposer {self.proposer}"
        drafts = {
            "--num-draft": self.num_draft not in ("auto", "0"),
            "--proposer": self.proposer not in (None, "none"),
        }
        if self.regular_decode or self.proposer == "none":
            for wrong in (name for name, drafting in drafts.items() if drafting):
                raise OptionError(f"{plain} drafts nothing: leave out {wrong}, or {plain}")
        proposer = "auto" if self.lookup_file and self.proposer is None else self.proposer
        if self.lookup_file and not self.regular_decode and proposer not in ("auto", "ngram"):
            raise OptionError("--lookup-file is for lookup: give --proposer ngram or auto")
        count = count_or_auto("--num-draft", self.num_draft)
        own = {"proposer": proposer, "regular": self.regular_decode, "num_draft": count}
        return Options(**{**self.for_options(), **own})


def load_pair(model: str, draft_model: str | None = None, **settings: Any) -> Pair:
    """Load a pair by name, and show notes and the progress of downloads. settings: Arguments of
    `engine.loading.load`, whose errors this function raises, too."""
    from ..engine.loading import load

    names = " and ".join(filter(None, (model, draft_model)))
    with render.progress("downloading", in_bytes=True) as report, render.slowly(f"loading {names}"):
        pair = load(model, draft_model, progress=report, announce=render.note, **settings)
    for note in pair.notes:
        render.note(note)
    return pair


def load_drafting(
    drafting: TextFlags,
    options: Options,
    *,
    history: bool = False,
    rows: int = 1,
) -> tuple[Pair, Options]:
    """Load a target, its draft model or drafter, and the documents that lookup searches.

    Args:
        options: The settings from the flags.
        history: Let lookup search all sequences that are generated from now on.
        rows: The number of sequences in the largest batch.
    Returns:
        The pair, and the options after the target's files have set the proposer and sampling
        settings for which no flag was given.
    Raises:
        SpecdecError: If `load_pair` or `engine.pair.with_documents` raises it."""
    pair = load_pair(*drafting.named(), **drafting.loading())
    if drafting.lookup_file and not drafting.regular_decode:
        from ..engine.pair import with_documents

        with render.progress("indexing what to look up") as report:
            pair = with_documents(pair, drafting.lookup_file, report)
    if sampling := drafting.recommended(pair.sampling):
        options = replace(options, **sampling)  # type: ignore[arg-type]
        shown = ", ".join(f"{name} {value:g}" for name, value in sampling.items())
        render.note(f"sampling as generation_config.json says: {shown}; --greedy decodes greedily")
    with render.slowly("trying whether passes over several tokens agree with single ones"):
        # The models keep the results of trials, for which the first completion would wait.
        _ = pair.target.rows_agree
        if options.exact:
            _ = pair.target.exact
        elif rows > 1:
            any(model.why_not_batched for model in (pair.target, pair.draft) if model is not None)
    if history:
        from ..engine.pair import with_history

        pair = with_history(pair)
    return pair, options


def count_or_auto(name: str, text: str) -> int | Literal["auto"]:
    """Parse the value of a flag that takes a number or auto. Raises OptionError with the flag's
    name if it is neither."""
    if text == "auto":
        return "auto"
    try:
        return int(text)
    except ValueError:
        raise OptionError(f"{name} must be a number or auto, not {text!r}") from None
