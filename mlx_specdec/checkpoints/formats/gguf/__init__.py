"""GGUF files: header, types, tokenizer, and what the architectures are called elsewhere."""
