"""Llama as Meta publishes it: params.json, consolidated.NN.pth, tokenizer.model."""
