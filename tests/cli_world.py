"""What the tests of the command line share: a tokenizer of letters, and the command in a process of its own."""

import subprocess
import sys
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer, decoders, models
from transformers import PreTrainedTokenizerFast

LETTERS = "abcdefghijklmnop \n\té"
SPECIAL = ["<pad>", "<bos>", "<eos>", "<unk>"]
TEMPLATE = "{% for message in messages %}{{ message['content'] }}\n{% endfor %}"


def letters_tokenizer() -> PreTrainedTokenizerFast:
    """A token for each of a few letters, with the ids that the tiny models' configurations speak of."""
    vocab = {token: number for number, token in enumerate([*SPECIAL, *LETTERS])}
    backend = Tokenizer(models.BPE(vocab=vocab, merges=[], unk_token="<unk>"))
    backend.decoder = decoders.Fuse()
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=backend, pad_token="<pad>", bos_token="<bos>", eos_token="<eos>", unk_token="<unk>"
    )
    tokenizer.chat_template = TEMPLATE
    return tokenizer


def run_process(arguments: list[str], folder: Path, **options: Any) -> subprocess.CompletedProcess[str]:
    """The command in a process of its own."""
    command = [sys.executable, "-m", "draftheads", *arguments]
    return subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=120, check=False, **options)
