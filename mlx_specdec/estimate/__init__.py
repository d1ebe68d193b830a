"""What a pair of models would gain on this machine, from their config.json files alone."""
