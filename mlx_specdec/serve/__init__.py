"""Answers over HTTP: one thread that decodes, and what OpenAI's clients say and hear around it.

Needs the extra `server`; nothing but the serve command imports it.
"""
