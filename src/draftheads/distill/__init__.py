"""Distillation: the target answers prompts, and its answers become training data."""
