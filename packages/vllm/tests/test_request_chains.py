"""Chains for requests that join, pause, start again and leave, against a session that reads each text alone."""

import random
from dataclasses import dataclass
from functools import cache

import pytest
import torch
from torch import Tensor

from draftheads.errors import InvalidTree
from draftheads.heads.base import DraftHead
from draftheads.speculation.draft import Context
from draftheads.speculation.tree import Tree
from draftheads_vllm.request_chains import RequestChains
from families import VOCAB, tiny_head, tiny_model

METHODS = ["medusa", "hydra", "hydra++", "amphista", "mlp-speculator", "markov-medusa", "eagle"]
K = 3
LONGEST = 40  # tokens of a text


@cache
def head_of(method: str) -> DraftHead:
    return tiny_head(method, tiny_model("llama"))


@dataclass
class Text:
    """A request's text, known from the beginning, with a hidden state for each token."""

    ids: list[int]
    states: Tensor  # (T, D)
    length: int  # tokens that it has so far
    read: int = 0  # tokens whose states were given

    def give(self, chains: RequestChains, name: str, count: int) -> None:
        chains.read(name, self.read, self.states[self.read : self.read + count])
        self.read += count


def text_of(numbers: random.Random, head: DraftHead, *, prompt: int) -> Text:
    ids = [numbers.randrange(VOCAB) for _ in range(LONGEST)]
    generator = torch.Generator().manual_seed(numbers.randrange(1 << 30))
    return Text(ids, torch.randn(LONGEST, head.config.hidden_size, generator=generator), prompt)


def chain_alone(head: DraftHead, text: Text) -> list[int]:
    """The chain after the text, by a new session that reads all of it at once."""
    known = text.length - 1
    context = Context(
        text.states[None, :known],
        torch.tensor([text.ids[:known]]),
        torch.tensor([known]),
        torch.tensor([text.ids[known]]),
    )
    return head.start().propose(context, Tree.chain(K)).token_ids[0, 1:].tolist()


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("method", METHODS)
def test_any_schedule_gives_the_chains_of_whole_texts(method: str, seed: int) -> None:
    head, numbers = head_of(method), random.Random(seed)  # noqa: S311 - no secrets
    chains = RequestChains(head, K)
    going: dict[str, Text] = {}
    seen = {"joined": 0, "paused": 0, "started again": 0, "unread": 0, "ended": 0}
    for _ in range(60):
        if len(going) < 4 and numbers.random() < 0.4:
            going[f"request {seen['joined']}"] = text_of(numbers, head, prompt=numbers.randint(2, 12))
            seen["joined"] += 1
        scheduled = [name for name in going if numbers.random() < 0.8]
        numbers.shuffle(scheduled)
        seen["paused"] += len(going) - len(scheduled)
        asked = {}
        for name in scheduled:
            text = going[name]
            if text.read and numbers.random() < 0.1:  # a preemption: some of the text, or all, is read again
                text.read = numbers.choice([0, numbers.randrange(text.read)])
                seen["started again"] += 1
            unread = text.length - text.read
            count = unread if unread <= K + 1 else numbers.randint(1, unread)  # long parts are read in chunks
            text.give(chains, name, count)
            if text.read == text.length:
                text.length += 1
                asked[name] = text
            else:
                seen["unread"] += 1
        chains.forget(going.keys())
        found = chains.propose({name: text.ids[: text.length] for name, text in asked.items()})
        assert found == {name: chain_alone(head, text) for name, text in asked.items()}
        for name, text in asked.items():
            # accepted draft tokens are text, and their states come with the next pass
            text.length = min(LONGEST, text.length + numbers.randint(0, K))
            if text.length == LONGEST or numbers.random() < 0.05:
                del going[name]
                seen["ended"] += 1
    assert min(seen.values()) >= 2, seen


def test_states_are_copied() -> None:
    head, numbers = head_of("hydra++"), random.Random(0)  # noqa: S311 - no secrets
    text = text_of(numbers, head, prompt=6)
    chains, buffer = RequestChains(head, K), text.states[:6].clone()
    chains.read("a", 0, buffer)
    buffer.fill_(7.0)  # vLLM's next pass
    text.length = 7
    assert chains.propose({"a": text.ids[:7]}) == {"a": chain_alone(head, text)}


def test_a_request_whose_text_is_not_read_gets_no_draft() -> None:
    head, numbers = head_of("hydra"), random.Random(0)  # noqa: S311 - no secrets
    text = text_of(numbers, head, prompt=6)
    chains = RequestChains(head, K)
    assert chains.propose({"a": text.ids[:6]}) == {}
    text.give(chains, "a", 4)
    assert chains.propose({"a": text.ids[:7]}) == {}


def test_a_gap_costs_a_head_with_a_history_its_drafts_until_the_text_is_read_again() -> None:
    numbers = random.Random(0)  # noqa: S311 - no secrets
    text = text_of(numbers, head_of("hydra"), prompt=6)
    for method, drafts in (("hydra", True), ("hydra++", False)):
        chains = RequestChains(head_of(method), K)
        text.read, text.length = 2, 6  # the first two tokens were in a cache
        text.give(chains, "a", 4)
        text.length = 7
        assert bool(chains.propose({"a": text.ids[:7]})) == drafts
        text.read = 1  # the first token is missing still
        text.give(chains, "a", 5)
        assert bool(chains.propose({"a": text.ids[:7]})) == drafts
        text.read = 0
        text.give(chains, "a", 6)
        assert chains.propose({"a": text.ids[:7]}) == {"a": chain_alone(head_of(method), text)}


def test_ended_requests_are_forgotten() -> None:
    head, numbers = head_of("hydra++"), random.Random(0)  # noqa: S311 - no secrets
    chains = RequestChains(head, K)
    old, new = (text_of(numbers, head, prompt=6) for _ in range(2))
    old.give(chains, "a", 6)
    assert chains.propose({"a": old.ids[:7]})
    chains.forget([])
    assert chains._texts == {}
    new.give(chains, "a", 6)  # another request of the same name
    new.length = 7
    assert chains.propose({"a": new.ids[:7]}) == {"a": chain_alone(head, new)}


def test_a_chain_that_is_longer_than_the_head_is_refused() -> None:
    with pytest.raises(InvalidTree, match="4 deep but the head has 3 heads"):
        RequestChains(head_of("medusa"), 4)
