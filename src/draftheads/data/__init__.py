"""Texts to learn from: chats, batches, and the target's hidden states of them."""
