"""Whether heads fit the model and the memory of this machine, before the model's weights are read."""

from typing import Any

import torch

from draftheads.checkpoints.checkpoint import weightless_head
from draftheads.errors import InvalidSettings
from draftheads.models.devices import default_dtype
from draftheads.models.model_config import head_sizes, num_weights
from draftheads.train import processes
from draftheads.train.new_head import head_config
from draftheads.train.options import HeadOptions, TrainOptions
from draftheads.train.recipes import RECIPES
from draftheads.utils.counts import byte_size, short_count
from draftheads.utils.machine import find_memory

# weights, gradients and Adam's two moments: fp32 each, or moments of 8 bits; at most so much with Muon's one moment
BYTES_PER_PARAMETER = {"adamw": 16, "adamw-8bit": 10, "muon": 16}


def check_sizes(options: TrainOptions, config: Any) -> None:
    """Checks the sizes of new heads against a model's configuration and the memory of this machine."""
    config, heads = config.get_text_config(), options.heads
    if any(getattr(config, name, None) is None for name in ("hidden_size", "vocab_size", "num_attention_heads")):
        return  # not a model that can be loaded; loading it raises the error
    hidden_size, vocab_size = int(config.hidden_size), int(config.vocab_size)
    recipe = {} if options.recipe is None else RECIPES[options.recipe].settings
    not_chosen = (HeadOptions.draft_vocab_size, recipe.get("draft_vocab_size"))  # not chosen for this model
    if heads.draft_vocab_size > vocab_size and heads.draft_vocab_size not in not_chosen:
        raise InvalidSettings(
            f"--draft-vocab-size is {heads.draft_vocab_size}, but {options.model} has {vocab_size} tokens: give a "
            "smaller size, or 0 for the whole vocabulary"
        )
    if heads.lm_head == "low_rank" and heads.lm_head_rank > max(hidden_size, HeadOptions.lm_head_rank):
        raise InvalidSettings(
            f"lm_head_rank is {heads.lm_head_rank}, but the hidden size of {options.model} is {hidden_size}: give a "
            "lower rank, or --lm-head own"
        )
    count = num_parameters(heads, config)
    optimizer = options.optimizer.optimizer
    needed, memory = count * BYTES_PER_PARAMETER[optimizer], memory_bytes()
    if memory is not None and needed > memory:
        place = "GPU" if processes.device().type == "cuda" else "machine"
        smaller = ", or give --optimizer adamw-8bit" if optimizer != "adamw-8bit" else ""
        raise InvalidSettings(
            f"heads of {short_count(count)} parameters need about {byte_size(needed)} of memory to train, but this "
            f"{place} has {byte_size(memory)}: "
            f"lower --num-heads, --num-layers, --draft-vocab-size or --head-options{smaller}"
        )


def num_parameters(options: HeadOptions, config: Any) -> int:
    """The number of parameters of new heads for a text model of that configuration; takes no memory for them."""
    vocab_size, hidden_size = int(config.vocab_size), int(config.hidden_size)
    sizes = head_config(
        options,
        hidden_size=hidden_size,
        vocab_size=vocab_size,
        draft_vocab_size=options.draft_vocab_size if 0 < options.draft_vocab_size < vocab_size else None,
        head_sizes=head_sizes(config, hidden_size),
    )
    return sum(parameter.numel() for parameter in weightless_head(sizes).parameters())


def memory_bytes() -> int | None:
    """Of the GPU, or of this machine or container where there is none; None if it is not known."""
    device = processes.device()
    if device.type == "cuda":
        return int(torch.cuda.get_device_properties(device).total_memory)
    memory = find_memory()
    return memory.total if memory.limit is None else memory.limit


def reading_dtype(options: TrainOptions, config: Any) -> torch.dtype:
    """The type in which the model reads the texts: that of its device.

    With ``--precision fp32`` on a CPU it is fp32, if the model then takes at most half of the memory.
    """
    device = processes.device()
    usual = default_dtype(device)
    if options.hardware.precision != "fp32" or options.hardware.four_bit or device.type != "cpu":
        return usual
    memory = memory_bytes()
    try:
        fits = memory is None or 4 * num_weights(config) <= memory / 2
    except ValueError:  # a configuration that only its own code knows
        return usual
    return torch.float32 if fits else usual
