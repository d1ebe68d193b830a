"""The estimate command: what a pair takes and may gain, before it is downloaded."""

from __future__ import annotations

import sys
from dataclasses import asdict

from ..core.options import mtp_of
from ..engine.known_pairs import USES, known_pair
from ..errors import OptionError
from ..system import show_size, usable_memory
from . import render
from .flags import Flags, Json, command, flag
from .loading import Sources, named
from .pairs import told_gain

ESTIMATE_NOTE = (
    "These figures come from sizes and from the speed of matrices on this machine. Drafts of one "
    "family are mostly accepted at 60 to 80 %; mlx-specdec bench measures it with the real weights."
)


class PromptLength(Flags, panel="Prompt"):
    prompt_tokens: int = flag(128, "The number of tokens of the prompt.", min=1)


@command("mlx-specdec estimate --model Qwen/Qwen3-8B --draft-model auto --q-bits 4")
def estimate(sources: Sources, prompt: PromptLength, output: Json) -> None:
    """Predict what a pair takes and gains before a download.

    Only config.json and the headers of the weights are read."""
    model, draft_model = named(sources)
    if draft_model is None or mtp_of(draft_model) is not None:
        raise OptionError("name a draft model, or the directory of a drafter, with --draft-model")
    from ..measure.estimate import GENERATED, gains, side
    from ..models.number_format import NumberFormat

    def numbers(q_bits: int | None) -> NumberFormat:
        return NumberFormat(sources.dtype, q_bits, expand=sources.expand_weights)

    count = prompt.prompt_tokens
    target = side(model, sources.revision, numbers(sources.q_bits), count)
    draft = side(draft_model, None, numbers(sources.draft_q_bits), count, target.head_bytes)
    whole = "decoder-only", "encoder-decoder"
    if target.kind not in whole or (draft.kind in whole and draft.kind != target.kind):
        raise OptionError(
            f"{draft_model} ({draft.kind}) cannot draft for {model} ({target.kind}): give a whole "
            "model as the target, and a draft of the target's own kind"
        )
    need = sum(one.weights_bytes + one.caches_bytes for one in (target, draft))
    fits = need <= (limit := usable_memory())
    rows = gains(target, draft) if fits else []
    pair = known_pair(model, draft_model)
    known = pair and told_gain(pair, target.bits or 16, USES[0])
    if output.json:
        payload = {
            "target": asdict(target),
            "draft": asdict(draft),
            "memory_bytes": need,
            "memory_limit_bytes": limit,
            "fits": fits,
            "gains": rows,
            "known_gain": known,
        }
        render.write(sys.stdout, render.as_json(payload))
        return
    caches = f">caches of {count} + {GENERATED} tokens"
    sides = render.table("model", "numbers", ">weights", caches, ">read in a step")
    for one in (target, draft):
        sizes = map(show_size, (one.weights_bytes, one.caches_bytes, one.step_bytes))
        sides.add_row(one.name, f"{one.bits}-bit, {one.dtype}" if one.bits else one.dtype, *sizes)
    answer = "They fit." if fits else "They do NOT fit: take smaller models or fewer bits."
    lines = [
        sides,
        f"Both take {show_size(need)}, and models may take {show_size(limit)} here. {answer}",
    ]
    if fits:
        table = render.table(">acceptance rate", ">draft length", ">speedup", ">tokens/s")
        form = "{acceptance_rate:.0%} {num_draft} {speed_up:.2f} {tokens_per_second:.1f}"
        for row in rows:
            table.add_row(*form.format(**row).split())
        lines += [table]
    lines += [f"The table of pairs: {known}."] if known else []
    render.lay_out(sys.stdout, *lines, ESTIMATE_NOTE)
