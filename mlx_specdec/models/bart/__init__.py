"""BART, mBART, Marian, M2M100, NLLB and Pegasus: one network with switches."""
