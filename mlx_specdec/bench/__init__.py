"""Measuring a pair on a file of prompts: methods, measurement, analysis, report.

Stands on assemble. Knows nothing of flags or terminals.
"""
