"""Faster parts for CPUs: products of layers, the native pass, the number of threads."""
