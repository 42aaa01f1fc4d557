"""Files of hidden states as vLLM writes them."""

from collections.abc import Sequence
from pathlib import Path

import torch
from safetensors.torch import save_file

from draftheads.data.texts import EncodedChat
from draftheads.models.model import TargetModel


def extract_as_vllm(
    target: TargetModel, texts: Sequence[EncodedChat], folder: Path, layer_ids: Sequence[int], *, further: int = 0
) -> None:
    """Files as those of vLLM's ExampleHiddenStatesConnector: layer id i is what comes out of i layers, not normed."""
    folder.mkdir()
    for number, text in enumerate(texts):
        token_ids = torch.tensor([*text.token_ids, *[5] * further])
        before_norm: list[torch.Tensor] = []
        note = target.final_norm.register_forward_pre_hook(lambda _, args, to=before_norm: to.append(args[0]))
        with torch.inference_mode():
            found = target.decoder(input_ids=token_ids[None], use_cache=False, output_hidden_states=True).hidden_states
        note.remove()
        outputs = [*found[:-1], before_norm[0].reshape(1, len(token_ids), -1)]
        states = torch.stack([outputs[i][0] for i in layer_ids], 1).to(torch.bfloat16)
        name = folder / f"{number}-{sum(text.token_ids):08x}.safetensors"
        save_file({"hidden_states": states.contiguous(), "token_ids": token_ids}, name)
        name.with_name(f"{name.name}.lock").touch()
