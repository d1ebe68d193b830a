"""Proposers: sources of draft tokens."""
