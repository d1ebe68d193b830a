"""Acceptance rules. They are independent of the proposer."""
