"""The maths of speculative decoding, tensors in and tensors out: trees, drafts, sampling and acceptance."""
