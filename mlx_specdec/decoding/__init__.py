"""The decoding loop, the sequences that it decodes, and their statistics."""
