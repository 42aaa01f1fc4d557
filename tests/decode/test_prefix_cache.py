"""The cache of read texts equals a slow reference: what is found, what is kept, and how many bytes it holds."""

from dataclasses import replace

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from draftheads.decode.prefix_cache import BLOCK_TOKENS, PrefixCache, ReadText, block_digests

TOKEN = 2 * 2 * 3 * 4 + 5 * 4  # bytes of a token: keys and values of a layer, two heads of three numbers, five hidden


def text_of(ids: list[int]) -> ReadText:
    """Entries that show which token they belong to."""
    numbers = torch.tensor(ids, dtype=torch.float32)
    keys = numbers[None, :, None].expand(2, -1, 3).clone()
    return ReadText(ids, (keys, 2 * keys), numbers[:, None].expand(-1, 5).clone())


def add(cache: PrefixCache, space: str, ids: list[int]) -> None:
    cache.add(block_digests(space, ids), text_of(ids))


def found(cache: PrefixCache, space: str, ids: list[int]) -> list[int]:
    """The tokens of the beginning that is found, whose entries are right."""
    digests = block_digests(space, ids)
    known, text = cache.num_known(digests), cache.find(digests)
    if text is None:
        assert known == 0
        return []
    assert len(text.token_ids) == known
    numbers = torch.tensor(text.token_ids, dtype=torch.float32)
    assert text.hidden[:, 0].tolist() == numbers.tolist()
    keys, values = text.entries
    assert keys[1, :, 2].tolist() == numbers.tolist()
    assert values[0, :, 0].tolist() == (2 * numbers).tolist()
    return text.token_ids


def numbers(count: int, *rest: int) -> list[int]:
    return [*range(1, count + 1), *rest]


def test_those_used_longest_ago_leave_first():
    cache = PrefixCache(30 * TOKEN)
    for start in (100, 200, 300):
        add(cache, "a", list(range(start, start + 10)))
    assert found(cache, "a", list(range(100, 111)))
    add(cache, "a", list(range(400, 410)))
    assert not found(cache, "a", list(range(200, 211)))
    assert found(cache, "a", list(range(100, 111)))
    cache.limit(10 * TOKEN)
    assert (len(cache), cache.num_bytes) == (1, 10 * TOKEN)
    assert found(cache, "a", list(range(100, 111)))
    cache.limit(0)
    assert (len(cache), cache.num_bytes, len(cache._with_block)) == (0, 0, 0)
    add(cache, "a", numbers(10))
    assert len(cache) == 0


def with_states(ids: list[int]) -> ReadText:
    return replace(text_of(ids), states={("state", 0, 0): torch.full((2,), float(len(ids)))})


def test_a_text_with_states_is_found_from_its_end_only():
    """Beside longer ones, whatever the blocks; the longest one that the prompt begins with."""
    cache = PrefixCache(1 << 20)
    lengths = [16, 19, 20, 40]
    for length in lengths:
        cache.add(block_digests("a", numbers(length)), with_states(numbers(length)))
        cache.add(block_digests("a", numbers(length)), with_states(numbers(length)))
    other = numbers(18, 50)  # the same blocks as the second one
    cache.add(block_digests("a", other), with_states(other))
    assert (len(cache), cache.num_bytes) == (5, sum([*lengths, 19]) * TOKEN + 5 * 8)
    for prompt, expected in [
        (numbers(15), 0),
        (numbers(16), 16),
        (numbers(18), 16),
        (numbers(19), 19),
        (numbers(39), 20),
        (numbers(45), 40),
        ([*other, 7], 19),
        ([*numbers(18), 51, 7], 16),
        ([2, *numbers(45)], 0),
    ]:
        digests = block_digests("a", prompt)
        assert cache.num_shared(digests) == min(40, max(shared(prompt, numbers(45)), shared(prompt, other)))
        assert cache.num_known(digests, prompt) == expected
        text = cache.find(digests, prompt)
        assert (text is None) == (expected == 0)
        if text is not None:
            assert text.token_ids == prompt[:expected]
            assert text.states["state", 0, 0].tolist() == [expected] * 2
    cache.limit(0)
    assert (len(cache), cache.num_bytes, len(cache._with_block), len(cache._ends)) == (0, 0, 0, 0)


STEMS = st.sampled_from([numbers(9), numbers(15, 3), numbers(16), list(range(50, 62))])
TEXTS = st.builds(lambda stem, rest: [*stem, *rest], STEMS, st.lists(st.integers(0, 1), max_size=18))


def whole(ids: list[int]) -> list[int]:
    return ids[: len(ids) // BLOCK_TOKENS * BLOCK_TOKENS]


def shared(one: list[int], other: list[int]) -> int:
    return max(n for n in range(0, min(len(one), len(other)) + 1, BLOCK_TOKENS) if one[:n] == other[:n])


@given(st.lists(st.tuples(st.sampled_from("ab"), TEXTS, st.booleans()), max_size=25), st.integers(0, 120))
@settings(deadline=None, max_examples=150)
def test_it_equals_a_slow_reference(actions: list[tuple[str, list[int], bool]], room: int):
    cache, kept = PrefixCache(room * TOKEN), []  # the reference: names, spaces and texts; order is not looked at
    for space, ids, is_added in actions:
        if is_added:
            add(cache, space, ids)
            if not any(of == space and shared(text, ids) == len(whole(ids)) for of, text in kept):
                kept = [(of, text) for of, text in kept if of != space or whole(text) != ids[: len(whole(text))]]
                if len(ids) <= room:
                    kept.append((space, ids))
            there = [(name[0], text.token_ids) for name, (text, _) in cache._texts.items()]
            kept = [pair for pair in kept if pair in there]  # what had to leave is tested above
            assert sorted(kept) == sorted(there)
            assert cache.num_bytes == sum(len(text) for _, text in kept) * TOKEN <= room * TOKEN
        else:
            longest = max((shared(text, ids) for of, text in kept if of == space), default=0)
            assert found(cache, space, ids) == ids[:longest]
