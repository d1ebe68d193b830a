"""Measuring a pair on a file of prompts: methods, measurement, analysis, report."""

from __future__ import annotations
