"""How the models in weights/ are trained; needs the extra `train` (torch, transformers)."""
