"""The algorithm: rows, the loop, rules, distributions, noise, grammars, and the worth of drafts."""
