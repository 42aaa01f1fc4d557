"""Measuring what trees of draft tokens gain."""
