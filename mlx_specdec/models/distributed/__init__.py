"""A target that is divided between several machines: rank 0 decides, the others follow."""

from __future__ import annotations
