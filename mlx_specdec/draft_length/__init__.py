"""What passes and rounds cost, measured or learned, and the speedup that follows."""

from __future__ import annotations
