"""The loop of decoding, the sequences in it, and what is counted and timed of them."""
