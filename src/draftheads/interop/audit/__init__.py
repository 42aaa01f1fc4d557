"""Is a server's speculative decoding lossless? The same prompts with drafting and without, compared text by text."""
