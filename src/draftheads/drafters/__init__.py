"""Drafters that need no training: a smaller model, and the text so far."""
