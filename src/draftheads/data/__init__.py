"""Prompts and chats of files, training batches, and the target's hidden states."""
