"""Training of what drafts: heads for a model that stays as it is."""
