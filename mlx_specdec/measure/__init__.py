"""Measuring a pair on a file of prompts: methods, measurement, analysis, report."""
