"""A small Llama as an ordinary folder of transformers, for the draft-model options of other programs."""

from draftheads.formats.layout import Format, Written, layer_names, llama_config, refuse, scaled_otherwise
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
    names = {"norm.weight": "norm.weight"}
    for layer in (f"layers.{i}." for i in range(config.num_layers)):
        names |= {**layer_names(config, layer, layer), f"{layer}input_norm.weight": f"{layer}input_layernorm.weight"}
    tensors = {f"model.{theirs}": head.state_dict()[ours] for ours, theirs in names.items()}
    tensors["model.embed_tokens.weight"] = target.weights.embedding.detach()
    tensors["lm_head.weight"] = target.weights.lm_head.detach() * target.weights.logit_scale
    about = {"architectures": ["LlamaForCausalLM"], "model_type": "llama", **llama_config(config, target)}
    return about, tensors


FORMATS = (
    Format(
        "small-llama",
        methods=("small-llama",),
        write=write_small_llama,
        commands={  # vLLM 0.33, SGLang 0.5.23, transformers 5, llama.cpp of November 2026
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
