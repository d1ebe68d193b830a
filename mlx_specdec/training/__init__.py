"""Training of Medusa heads, draft models and hidden-state drafters. The target is not changed."""
