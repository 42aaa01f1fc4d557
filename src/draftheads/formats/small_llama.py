"""A small Llama as an ordinary folder of transformers, for the draft-model options of other programs."""

import torch
from torch import Tensor

from draftheads.formats.layout import Format, Written, llama_config, refuse, scaled_otherwise
from draftheads.heads.base import DraftHead
from draftheads.heads.small_llama import SmallLlamaConfig
from draftheads.models.model import TargetModel


def write_small_llama(head: DraftHead, target: TargetModel, _: str = "") -> Written:
    """``config.json`` and the tensors, with the target's embedding and an lm_head of the whole vocabulary.

    Tokens outside the head's draft vocabulary get the target's rows, too: a model has no draft vocabulary.
    """
    config = head.config
    assert isinstance(config, SmallLlamaConfig)
    reasons = scaled_otherwise(config, target)
    if config.lm_head != "shared":
        reasons.append(
            f"a Llama of its own has an lm_head of the whole vocabulary; this head's is {config.lm_head}: train it "
            "with --lm-head shared"
        )
    if target.weights.lm_head_bias is not None:
        reasons.append("the model's lm_head has a bias, for which a Llama has no place")
    refuse(reasons)
    tensors = {f"model.{theirs}": tensor for theirs, tensor in _layers(head).items()}
    tensors["model.embed_tokens.weight"] = target.weights.embedding.detach()
    tensors["lm_head.weight"] = target.weights.lm_head.detach() * target.weights.logit_scale
    about = {"architectures": ["LlamaForCausalLM"], "model_type": "llama", **llama_config(config, target)}
    return about, {name: torch.as_tensor(tensor) for name, tensor in tensors.items()}


def _layers(head: DraftHead) -> dict[str, Tensor]:
    names = {
        "input_norm.": "input_layernorm.",
        "middle_norm.": "post_attention_layernorm.",
        "feed_forward.": "mlp.",
        "": "self_attn.",
    }
    found = {}
    for name, tensor in head.state_dict().items():
        if name == "norm.weight":
            found[name] = tensor
        elif name.startswith("layers."):
            _, number, part = name.split(".", 2)
            ours = next(prefix for prefix in names if part.startswith(prefix))
            found[f"layers.{number}.{names[ours]}{part.removeprefix(ours)}"] = tensor
    return found


FORMATS = (
    Format(
        "small-llama",
        ("small-llama",),
        write_small_llama,
        {
            "vLLM": "VLLM(draft_model)",
            "SGLang": "python -m sglang.launch_server --model <model> --speculative-algorithm STANDALONE "
            "--speculative-draft-model-path <head> --speculative-num-steps <steps>",
            "transformers": "model.generate(…, assistant_model=AutoModelForCausalLM.from_pretrained('<head>'))",
            "llama.cpp": "python convert_hf_to_gguf.py <head> --outfile draft.gguf && llama-server -m MODEL.gguf "
            "-md draft.gguf",
        },
        has_tokenizer=True,
    ),
)
