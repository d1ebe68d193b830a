"""Text and token ids: tokenizers, vocabularies compared by content, streamed detokenization."""
