"""The Hugging Face Hub: which files of a repository are fetched, and what went wrong."""
