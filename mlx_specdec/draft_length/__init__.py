"""The choice of the draft length: fixed, or learned from the seconds and acceptance of rounds."""
