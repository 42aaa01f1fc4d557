"""Fitting draft heads to a frozen target."""
