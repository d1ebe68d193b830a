"""Laws and noise: logits -> log p, and the keys of all randomness. Pure; imports errors only."""
