"""Tiny models with a tokenizer that can spell JSON, grammars, and a slow decoder with masks of its own."""

import json
from functools import cache
from typing import Any

import llguidance
import llguidance.hf
import numpy as np
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from torch import Tensor
from transformers import PreTrainedTokenizerFast

from draftheads.models.model import TargetModel
from draftheads.settings import Grammar
from families import tiny_model

VOCAB = 330
EOS = 0
PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 8},
        "age": {"type": "integer", "minimum": 0, "maximum": 120},
        "tags": {"type": "array", "items": {"enum": ["red", "green", "blue"]}, "maxItems": 2},
    },
    "required": ["name", "age", "tags"],
    "additionalProperties": False,
}
GRAMMARS = {
    "person": Grammar.json_schema(PERSON),
    "choice": Grammar.regex("(yes|no|perhaps)( indeed)?"),
    "call": Grammar.json_schema(
        {"type": "object", "properties": {"city": {"const": "San Francisco"}}, "required": ["city"]}
    ),
    "sums": Grammar.lark('start: NUMBER (" + " NUMBER)*\nNUMBER: /[0-9]{1,3}/'),
    "object": Grammar.json_object(),
}


@cache
def json_tokenizer() -> Any:
    """Bytes, and pieces that are frequent in JSON."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        special_tokens=["<eos>"],
        show_progress=False,
    )
    text = json.dumps({"name": "Ada", "age": 36, "tags": ["red", "green", "blue"], "city": "San Francisco"})
    tokenizer.train_from_iterator([text, "yes indeed, no, perhaps: true false null 12 + 345"] * 4, trainer)
    assert tokenizer.get_vocab_size() <= VOCAB
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<eos>")


@cache
def json_model(family: str = "llama", seed: int = 0) -> TargetModel:
    """A random model with that tokenizer, and some tokens that the tokenizer does not have."""
    model = tiny_model(family, seed=seed, vocab_size=VOCAB, eos_token_id=EOS, bos_token_id=EOS, pad_token_id=EOS)
    return TargetModel(model.model, json_tokenizer(), f"tiny-json-{family}")


@cache
def _table() -> Any:
    return llguidance.hf.from_tokenizer(json_tokenizer(), n_vocab=VOCAB, eos_token=[EOS])


class SlowGrammar:
    """A grammar read from its beginning at each question."""

    def __init__(self, grammar: Grammar) -> None:
        if grammar.kind == "json_schema":
            one_line = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}
            self.text = llguidance.LLMatcher.grammar_from_json_schema(grammar.text, overrides=one_line)
        elif grammar.kind == "regex":
            self.text = llguidance.LLMatcher.grammar_from_regex(grammar.text)
        else:
            self.text = llguidance.LLMatcher.grammar_from_lark(grammar.text)

    def allowed(self, token_ids: list[int]) -> Tensor:
        """(V,) bool after these tokens."""
        matcher = llguidance.LLMatcher(_table(), self.text, log_level=0)
        assert matcher.consume_tokens(token_ids), "the tokens so far are allowed"
        mask = np.frombuffer(matcher.compute_logit_bias(), np.uint8)
        return torch.from_numpy(mask[:VOCAB] > 0)

    def allows(self, token_ids: list[int]) -> bool:
        """Whether the tokens can be the beginning of a text."""
        matcher = llguidance.LLMatcher(_table(), self.text, log_level=0)
        return matcher.validate_tokens(token_ids) == len(token_ids)


def slow_answer(model: TargetModel, prompt: list[int], grammar: Grammar, *, max_new_tokens: int) -> list[int]:
    """The greedy answer, token by token, each from a pass over the whole text."""
    slow, answer = SlowGrammar(grammar), []
    while len(answer) < max_new_tokens and (not answer or answer[-1] != EOS):
        logits = model.model(torch.tensor([prompt + answer])).logits[0, -1]
        answer.append(int(logits.masked_fill(~slow.allowed(answer), -torch.inf).argmax()))
    return answer
