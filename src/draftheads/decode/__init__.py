"""Decoding: requests, rows that step together, and the engine over them."""
