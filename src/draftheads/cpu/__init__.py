"""Faster parts for CPUs: kernels and their choice, fused modules, attention, the number of threads."""
