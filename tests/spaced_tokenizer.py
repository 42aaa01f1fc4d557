"""Tokenizers that put a space before each text, as those of Llama-2 and Vicuna do."""

import string

from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers
from transformers import PreTrainedTokenizerFast

SPECIAL = ["<unk>", "<s>", "</s>"]


def spaced_tokenizer(style: str = "prepend") -> PreTrainedTokenizerFast:
    """A token for each character. "prepend" adds the space after each special token, too; "metaspace" only at first."""
    vocab = {token: number for number, token in enumerate([*SPECIAL, "▁", *string.printable])}
    backend = Tokenizer(models.BPE(vocab=vocab, merges=[], unk_token="<unk>"))
    if style == "prepend":
        backend.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    else:
        backend.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first", split=False)
    backend.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.Fuse(), decoders.Strip(" ", 1, 0)])
    return PreTrainedTokenizerFast(tokenizer_object=backend, bos_token="<s>", eos_token="</s>", unk_token="<unk>")
