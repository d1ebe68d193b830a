"""What others have measured of the pairs in the table, in words. Imports no MLX."""

from ..engine.known_pairs import KnownPair, Machine


def measured_by(one: KnownPair) -> str:
    """Return the publisher of a pair's figures, and the machine."""
    return " on ".join(filter(None, map((one.source or {}).get, ("by", "machine"))))


def told_speed(one: KnownPair, bits: int, use: str, machine: Machine) -> str:
    """Return a sentence on the speed of a pair on a machine, and on who has measured it."""
    if not (speed := machine.speed * one.speed(bits, use)):
        return "nobody has published what it gains"
    plain = machine.speed * one.speed(bits, "plain")
    gain = told_gain(one, bits, use)
    return f"about {speed:.0f} tokens/s for {use}, {plain:.0f} without drafts; {gain}"


def told_gain(one: KnownPair, bits: int, use: str) -> str:
    """Return what others have measured at exactly these bits, and what contradicts it."""
    if (gain := one.gain(bits, use)) is None or one.source is None:
        return f"nobody has published the gain at {bits} bits"
    source = f"{measured_by(one)}, {one.source['date']}, {one.source['where']}"
    plain = one.plain.get(str(bits))
    speeds = f"{plain:g} to {plain * gain:.1f} tokens/s, " if plain else ""
    contrary = f"; others found {one.contrary}" if one.contrary else ""
    return f"{speeds}{gain:.2f} times plain decoding for {use}, measured by {source}{contrary}"
