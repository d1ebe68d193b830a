"""Loading a pair, requests on their way through one engine, and what texts leave behind."""
