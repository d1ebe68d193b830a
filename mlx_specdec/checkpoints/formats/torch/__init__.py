"""What torch.save writes, zip archive or older stream, read without torch."""
