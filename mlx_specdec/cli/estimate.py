"""The estimate command: what a pair takes and may gain, before it is downloaded."""

from __future__ import annotations

import sys
from dataclasses import asdict

from .. import process
from ..checkpoints.disk import show, usable_memory
from ..errors import OptionError
from ..options import mtp_of
from . import render
from .flags import Flags, Json, command, flag, group
from .known_pairs import USES, known_pair
from .loading import Sources, named
from .pairs import told_gain

NOTE = (
    "These figures come from sizes and from the speed of one matrix on this machine. Drafts of one "
    "family are mostly accepted at 60 to 80 %; mlx-specdec bench measures it with the real weights."
)


@group("Prompt")
class PromptLength(Flags):
    prompt_tokens: int = flag(128, "The number of tokens of the prompt.", min=1)


@command("mlx-specdec estimate --model Qwen/Qwen3-8B --draft-model auto --q-bits 4")
def estimate(sources: Sources, prompt: PromptLength, output: Json) -> None:
    """Predict what a pair takes and gains before a download.

    Only config.json and the headers of the weights are read."""
    model, draft_model = named(sources)
    if draft_model is None:
        raise OptionError("name the draft model as well, with --draft-model")
    if mtp_of(draft_model) is not None:
        raise OptionError(
            "estimate needs the files of layers for multi-token prediction: give their directory"
        )
    from ..measure.estimate import GENERATED, Side, probe, side, speeds
    from ..models.number_format import NumberFormat

    def measured(name: str, revision: str | None, q_bits: int | None) -> Side:
        numbers = NumberFormat(sources.dtype, q_bits, expand=sources.expand_weights)
        return side(name, revision, numbers, prompt.prompt_tokens)

    target = measured(model, sources.revision, sources.q_bits)
    draft = measured(draft_model, None, sources.draft_q_bits)
    whole = "decoder-only", "encoder-decoder"
    if target.kind not in whole:
        raise OptionError(f"{model} is a drafter, and no target: give it as the draft model")
    if draft.kind in whole and draft.kind != target.kind:
        raise OptionError(
            f"the draft model is {draft.kind} and the target {target.kind}: give a draft of the "
            "target's own kind"
        )
    need = sum(one.weights_bytes + one.caches_bytes for one in (target, draft))
    limit, found = usable_memory(), None
    if need <= limit:
        found = speeds(target, draft, {one.numbers: probe(one.numbers) for one in (target, draft)})
    pair = known_pair(model, draft_model)
    gain = None if pair is None else told_gain(pair, target.numbers[0] or 16, USES[0])
    if output.json:
        payload = {
            "target": target.as_dict(),
            "draft": {**draft.as_dict(), "kind": draft.kind},
            "prompt_tokens": prompt.prompt_tokens,
            "max_tokens": GENERATED,
            "memory_bytes": need,
            "memory_limit_bytes": limit,
            "fits": need <= limit,
            "speeds": found and asdict(found),
            "known_gain": gain,
            "device": process.device_name(),
            "blas": process.name(),
        }
        render.write(sys.stdout, render.as_json(payload))
        return
    sides = render.table("", ">target", f">{'draft' if draft.kind in whole else draft.kind}")
    rows = [(one.as_dict(), show(round(one.read(1)))) for one in (target, draft)]
    sides.add_row("model", *(row["name"] for row, _ in rows))
    sides.add_row("numbers", *(row["dtype"] for row, _ in rows))
    sides.add_row("weights", *(show(row["weights_bytes"]) for row, _ in rows))
    text = f"caches, {prompt.prompt_tokens} + {GENERATED} tokens"
    sides.add_row(text, *(show(row["caches_bytes"]) for row, _ in rows))
    sides.add_row("read in a step", *(step for _, step in rows))
    known = [] if gain is None else [f"The table of pairs: {gain}."]
    if found is None:
        render.lay_out(
            sys.stdout,
            sides,
            f"NO: it would not fit. Weights and caches take {show(need)}, and models may take "
            f"{show(limit)} here. Smaller models need less, and so do fewer bits (--q-bits, "
            "--draft-q-bits).",
            *known,
        )
        return
    costs = ", ".join(f"{m}: {cost:.2f}" for m, cost in enumerate(found.passes, 1) if m > 1)
    gains = render.table(">acceptance rate", ">best draft length", ">speedup", ">tokens/s")
    for one in found.gains:
        length = str(one.num_draft) if one.num_draft else "0 (plain)"
        speed = f"{one.speed_up / found.step_seconds:.1f}"
        gains.add_row(f"{one.acceptance_rate:.0%}", length, f"{one.speed_up:.2f}", speed)
    render.lay_out(
        sys.stdout,
        sides,
        f"Fits: {show(need)} of the {show(limit)} that models may take here.",
        f"A plain step takes about {1000 * found.step_seconds:.2f} ms "
        f"({1 / found.step_seconds:.1f} tokens/s), and a draft step {found.draft_cost:.2f} of it; "
        f"{process.device_name()}, BLAS {process.name()}. A pass over m tokens, in plain steps: "
        f"{costs}.",
        gains,
        *known,
        NOTE,
    )
