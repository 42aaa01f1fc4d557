"""The frozen model: loading, its cache, its masks, its kernels. The only room that says transformers."""
