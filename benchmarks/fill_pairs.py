"""Write the computed speeds of all pairs into mlx_specdec/pairs.json.

    python benchmarks/fill_pairs.py

`speeds` of a pair has tokens per second by bits, without drafts (`plain`), and with drafts for chat
and for code. They are for an M4 Pro, on which most of the table was measured. A machine multiplies
them by the ratio of memory bandwidths. Run this after a change of `plain`, `gains` or `tokens`,
which are what others published."""

import json
from pathlib import Path
from typing import Any

TABLE = Path(__file__).resolve().parents[1] / "mlx_specdec" / "pairs.json"
BITS = (4, 8, 16)
USED_BANDWIDTH = 0.8
STEP_SECONDS = 0.002
"""The share of the memory bandwidth that a plain step uses, and the seconds that it takes besides
reading the weights. Published speeds of models from 0.6 to 27 billion weights follow from these."""
ROUND_COSTS = {4: 1.9, 8: 1.5, 16: 1.5}
"""Typical duration of a round with 7 draft tokens, in plain steps of a dense model, by bits. Each
value is the median of tokens per round divided by gain in measurements of mlx-dspark (M4 Pro)."""
EXPERTS_COST = 3.3
"""The same duration for a mixture of experts, in which each row of a pass reads other experts."""
SHORT_COSTS = (1.2, 1.5)
"""The same durations for a round with one or two draft tokens. The first is for a dense model, and
the second is for a mixture of experts."""
SHORT = frozenset(("mtp", "eagle", "eagle3", "gemma4_assistant"))
"""The kinds of drafters that draft one or two tokens on Macs."""
DRAFTED = 3
"""The number of tokens that a draft model drafts in a round, each of which takes time."""


def cost(pair: dict[str, Any], models: dict[str, Any], bits: int) -> float:
    """Return the typical duration of a round in plain steps."""
    target = models[pair["target"]]
    experts = "active" in target
    if pair["kind"] in SHORT:
        return SHORT_COSTS[experts]
    found = EXPERTS_COST if experts else ROUND_COSTS[bits]
    if pair["kind"] == "draft":
        billions = models[pair["draft"]]["billions"]
        found += DRAFTED * billions / target.get("active", target["billions"])
    return found


def gain(pair: dict[str, Any], models: dict[str, Any], bits: int, use: str) -> float | None:
    """Return the published gain, or one that follows from a published gain at other bits or from
    tokens per round and the costs of rounds; None without figures."""
    gains = pair.get("gains", {})
    if use in (published := gains.get(str(bits), {})):
        return float(published[use])
    timed = (by[use] * cost(pair, models, int(n)) for n, by in gains.items() if use in by)
    tokens = next(timed, pair.get("tokens"))
    return None if tokens is None else tokens / cost(pair, models, bits)


def plain(pair: dict[str, Any], table: dict[str, Any], bits: int) -> float:
    """Return the tokens per second of plain decoding on an M4 Pro: published ones times the ratio
    of bandwidths, or computed from the bytes that a step reads."""
    chips, target = table["chips"], table["models"][pair["target"]]
    if (published := pair.get("plain", {}).get(str(bits))) is not None:
        source = chips[table["sources"][pair["source"]]["chip"]]
        return float(published * chips["M4 Pro"] / source)
    stored = bits if bits == max(BITS) else bits + 0.5  # with scales
    gigabytes = target.get("active", target["billions"]) * stored / 8
    return 1 / (gigabytes / (USED_BANDWIDTH * chips["M4 Pro"]) + STEP_SECONDS)


def speeds(pair: dict[str, Any], table: dict[str, Any]) -> dict[str, dict[str, float]]:
    """Return tokens per second by bits, without bits at which nobody knows the gain. The pairs in
    weights/ have none, since nobody has measured them on a Mac."""
    found: dict[str, dict[str, float]] = {}
    if pair["target"].startswith("weights/"):
        return found
    for bits in table["models"][pair["target"]].get("bits", BITS):
        gains = {use: gain(pair, table["models"], bits, use) for use in ("chat", "code")}
        known = {use: one for use, one in gains.items() if one is not None}
        if known:
            before = plain(pair, table, bits)
            with_drafts = {use: round(before * one, 1) for use, one in known.items()}
            found[str(bits)] = {"plain": round(before, 1), **with_drafts}
    return found


def lines(entries: dict[str, Any]) -> str:
    """Return an object of JSON with one entry a line."""
    return ",\n".join(f"  {json.dumps(key)}: {json.dumps(one)}" for key, one in entries.items())


def main() -> None:
    table = json.loads(TABLE.read_text(encoding="utf-8"))
    for pair in table["pairs"]:
        pair.pop("speeds", None)
        if found := speeds(pair, table):
            pair["speeds"] = found
    pairs = ",\n".join(f"  {json.dumps(pair)}" for pair in table["pairs"])
    TABLE.write_text(
        f'{{"chips": {json.dumps(table["chips"])},\n"sources": {{\n{lines(table["sources"])}}},\n'
        f'"models": {{\n{lines(table["models"])}}},\n"pairs": [\n{pairs}\n]}}\n',
        encoding="utf-8",
    )


if __name__ == "__main__":
    main()
