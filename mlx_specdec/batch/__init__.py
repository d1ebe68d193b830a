"""A file of prompts decoded many at a time: its lines, what each asks for, and the results on disk.

`run` leads; `lines` and `asked` read, `journal` writes. Terminals are above it.
"""
