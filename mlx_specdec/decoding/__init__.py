"""The loop: propose, advance, judge, commit. It is handed everything assembled."""
