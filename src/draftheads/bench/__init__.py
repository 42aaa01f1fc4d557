"""Measurements: ways of decoding side by side, on the same prompts, in the same run."""
