"""Tokenizers whose tokens can be parts of characters."""

from typing import Any

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from transformers import PreTrainedTokenizerFast

CORPUS = [
    "the cat sat on the mat",
    "Привет, мир",
    "日本語のテキスト 日本",
    "naïve café — 🙂🙂 👩‍👩‍👧 🇯🇵",
    "  two  spaces\n\n\tand a tab",
]
LETTERS = "thecat  \n\t,.—éïПривет日本語漢字テキスト🙂👩👧🇯🇵\u200d\ufe0f\u0301𝄞"


def byte_level() -> Any:
    """As GPT-2's and Llama-3's: tokens are pieces of bytes, so a character can need several."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.post_processor = processors.ByteLevel(trim_offsets=False)
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=300, initial_alphabet=alphabet, special_tokens=["<eos>"], show_progress=False
    )
    tokenizer.train_from_iterator(CORPUS, trainer)
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<eos>")


def byte_fallback() -> Any:
    """As Llama-2's: spaces are part of words, the first is dropped, and characters it has not are spelt in bytes."""
    all_bytes = [f"<0x{byte:02X}>" for byte in range(256)]
    vocabulary = ["<unk>", "<eos>", *all_bytes, *"thecat▁Привет日本", "▁t", "th"]
    ids = {token: i for i, token in enumerate(dict.fromkeys(vocabulary))}
    merges = [("▁", "t"), ("t", "h")]
    tokenizer = Tokenizer(models.BPE(ids, merges, unk_token="<unk>", byte_fallback=True, fuse_unk=True))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first")
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    tokenizer.add_special_tokens([AddedToken("<eos>", special=True)])
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<eos>")


TOKENIZERS = {"byte level": byte_level(), "byte fallback": byte_fallback()}


def whole_text(tokenizer: Any, token_ids: list[int]) -> str:
    text: str = tokenizer.decode(token_ids, skip_special_tokens=True, clean_up_tokenization_spaces=False)
    return text
