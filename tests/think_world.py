"""Chat templates of reasoning models in the words of the tiny chat model, and of the tags of a thought."""

from typing import Any

from draftheads.models.model import TargetModel
from training_world import VOCAB, chat_model, chat_tokenizer

OPEN, CLOSE = "<think>", "</think>"
WORDS = [*VOCAB, OPEN, CLOSE, "<tool>", *(f"v{i}" for i in range(5))]

# thoughts before the last question are left out; an answer without a thought gets an empty one
_LATER = (
    "{%- set ns = namespace(last=-1) -%}"
    "{%- for m in messages -%}{%- if m.role == 'user' -%}{%- set ns.last = loop.index0 -%}{%- endif -%}{%- endfor -%}"
    "{%- for m in messages -%}{%- set said = m.content -%}{%- set thought = m.reasoning_content or '' -%}"
    "{%- if m.role == 'assistant' and '</think>' in said -%}"
    "{%- set thought = said.split('</think>')[0].split('<think>')[-1].strip() -%}"
    "{%- set said = said.split('</think>')[-1].lstrip() -%}{%- endif -%}"
    "{{- '<s> ' + m.role + ' \\n ' -}}"
    "{%- if m.role == 'assistant' and loop.index0 > ns.last -%}"
    "{{- '<think> \\n ' + thought + ' \\n </think> \\n ' -}}{%- endif -%}"
    "{{- said -}}{%- for c in m.tool_calls or [] -%}{{- ' ' + c.function.name + ' ' + c.function.arguments.at -}}"
    "{%- endfor -%}{{- ' <e> \\n ' -}}{%- endfor -%}"
)
# no thought is ever written, and none of those in the words
_NO_THOUGHTS = (
    "{%- for m in messages -%}"
    "{{- '<s> ' + m.role + ' \\n ' + m.content.split('</think>')[-1].lstrip() + ' <e> \\n ' -}}"
    "{%- endfor -%}"
)
# no thought is ever written, calls are, and what follows the beginning of an answer may begin as the tag of a thought
_CALLS_ONLY = (
    "{%- for m in messages -%}{{- '<s> ' + m.role -}}{%- set said = m.content.split('</think>')[-1].lstrip() -%}"
    "{%- if said or not m.tool_calls -%}{{- ' \\n ' + said -}}{%- endif -%}"
    "{%- for c in m.tool_calls or [] -%}{{- ' \\n <tool> ' + c.function.name + ' ' + c.function.arguments.at -}}"
    "{%- endfor -%}{{- '<e> \\n ' -}}{%- endfor -%}"
)
_BEGIN = "{%%- if add_generation_prompt -%%}{{- '<s> assistant \\n %s' -}}{%%- endif -%%}"
TEMPLATES = {
    "optional": _LATER + _BEGIN % "",  # Qwen3
    "always": _LATER + _BEGIN % "<think> \\n ",  # Qwen3-Thinking
    "dropping": _NO_THOUGHTS + _BEGIN % "<think> \\n ",  # DeepSeek-R1
    "calling": _CALLS_ONLY + _BEGIN % "<think> \\n ",  # QwQ
    "never": _NO_THOUGHTS + _BEGIN % "<think> \\n </think> \\n ",  # Qwen3 that was told not to think
}


def think_tokenizer(name: str) -> Any:
    """One of the templates."""
    tokenizer = chat_tokenizer(TEMPLATES[name])
    tokenizer.add_tokens(WORDS[len(VOCAB) :])
    return tokenizer


def think_model(name: str, *, seed: int = 0) -> TargetModel:
    """A random model with such a tokenizer."""
    return TargetModel(chat_model(seed=seed, vocab_size=len(WORDS)).model, think_tokenizer(name), "tiny-thinker")
