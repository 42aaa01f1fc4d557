"""Trained heads that come with the package."""
