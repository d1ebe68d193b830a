"""Files and directories as such: where results go, what is left behind, digests and maps."""
