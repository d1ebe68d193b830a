"""Loads a pair, schedules and decodes requests, and caches prompts."""
