"""Trained draft heads for SmolLM2-135M-Instruct: data only, in the folder ``weights``, BASE/METHOD each."""
