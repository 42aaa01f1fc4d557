"""Heads trained together with a LoRA adapter in their model (Medusa-2)."""
