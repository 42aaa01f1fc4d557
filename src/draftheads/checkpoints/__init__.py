"""Heads on disk: their files, their acceptance profiles, and where heads are found."""
