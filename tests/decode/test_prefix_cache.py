"""The cache of read texts equals a slow reference: what is found, what is kept, and how many bytes it holds."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from draftheads.decode.prefix_cache import FEWEST_TOKENS, PrefixCache
from draftheads.decode.prompt_reader import ReadText
from draftheads.models.kv_cache import RowEntries

SLOT = 2 * 2 * 3 * 4 + 5 * 4  # bytes of a token: keys and values of a layer, two heads of three numbers, five hidden


def text_of(ids: list[int], *, slack: int = 0) -> ReadText:
    """Entries that show which token they belong to; ``slack`` slots are held but not shown."""
    numbers = torch.tensor([*ids, *[0] * slack], dtype=torch.float32)
    keys = numbers[None, :, None].expand(2, -1, 3).clone()
    return ReadText(
        ids, RowEntries(((keys, 2 * keys),)).first(len(ids)), numbers[: len(ids), None].expand(-1, 5).clone()
    )


def check(found: ReadText, ids: list[int]) -> None:
    assert found.token_ids == ids
    numbers = torch.tensor(ids, dtype=torch.float32)
    assert found.hidden[:, 0].tolist() == numbers.tolist()
    for keys, values in found.entries.layers:
        assert keys[1, :, 2].tolist() == numbers.tolist()
        assert values[0, :, 0].tolist() == (2 * numbers).tolist()


def numbers(count: int, *rest: int) -> list[int]:
    return [*range(1, count + 1), *rest]


def test_the_longest_common_beginning_is_found_also_of_a_part():
    cache = PrefixCache(1 << 20)
    cache.add("a", text_of(numbers(20, 50, 51)))
    cache.add("a", text_of(numbers(12, 60, 61)))
    check(cache.find("a", numbers(20, 99)), numbers(20))
    check(cache.find("a", numbers(12, 60, 77)), numbers(12, 60))
    assert cache.find("b", numbers(20, 99)) is None
    assert cache.find("a", numbers(FEWEST_TOKENS - 1, 99, 98)) is None
    assert (cache.hits, cache.tokens_reused) == (2, 20 + 13)


def test_the_last_token_of_a_prompt_is_not_found():
    cache = PrefixCache(1 << 20)
    cache.add("a", text_of(numbers(20)))
    check(cache.find("a", numbers(20)), numbers(19))


def test_a_text_replaces_those_that_it_extends():
    cache = PrefixCache(1 << 20)
    cache.add("a", text_of(numbers(10)))
    cache.add("b", text_of(numbers(10)))
    cache.add("a", text_of(numbers(15)))
    assert (len(cache), cache.num_bytes) == (2, 25 * SLOT)
    cache.add("a", text_of(numbers(12)))
    assert (len(cache), cache.num_bytes) == (2, 25 * SLOT)


def test_those_used_longest_ago_leave_first():
    cache = PrefixCache(30 * SLOT)
    for start in (100, 200, 300):
        cache.add("a", text_of(list(range(start, start + 10))))
    assert cache.find("a", list(range(100, 111))) is not None
    cache.add("a", text_of(list(range(400, 410))))
    assert cache.find("a", list(range(200, 211))) is None
    assert cache.find("a", list(range(100, 111))) is not None
    cache.limit(10 * SLOT)
    assert (len(cache), cache.num_bytes) == (1, 10 * SLOT)
    assert cache.find("a", list(range(100, 111))) is not None
    cache.limit(0)
    assert (len(cache), cache.num_bytes) == (0, 0)


@pytest.mark.parametrize("copy", [True, False])
def test_bytes_are_those_that_the_memory_takes(copy: bool):
    cache = PrefixCache(1 << 20)
    given_text = text_of(numbers(10), slack=6)
    cache.add("a", given_text, copy=copy)
    assert cache.num_bytes == 10 * SLOT + (0 if copy else 6 * 48)
    given_text.entries.layers[0][0].zero_()
    found = cache.find("a", numbers(11))
    assert bool(found.entries.layers[0][0].any()) == copy
    small = PrefixCache(10 * SLOT)
    small.add("a", text_of(numbers(10), slack=6), copy=copy)
    assert len(small) == copy


def shared(one: list[int], other: list[int]) -> int:
    return max(n for n in range(min(len(one), len(other)) + 1) if one[:n] == other[:n])


STEMS = st.sampled_from([numbers(9), numbers(9, 3), numbers(16), list(range(50, 62))])
TEXTS = st.builds(lambda stem, rest: [*stem, *rest], STEMS, st.lists(st.integers(0, 2), max_size=8))


@given(st.lists(st.tuples(st.sampled_from("ab"), TEXTS, st.booleans()), max_size=25), st.integers(0, 80))
@settings(deadline=None, max_examples=150)
def test_it_equals_a_slow_reference(actions: list[tuple[str, list[int], bool]], room: int):
    cache, kept = PrefixCache(room * SLOT), []  # the reference: pairs, used last comes last
    for space, ids, is_added in actions:
        if is_added:
            cache.add(space, text_of(ids))
            longer = [pair for pair in kept if pair[0] == space and pair[1][: len(ids)] == ids]
            if longer:
                kept = [pair for pair in kept if pair != longer[0]] + longer[:1]
            else:
                kept = [pair for pair in kept if pair[0] != space or ids[: len(pair[1])] != pair[1]]
                if len(ids) <= room:
                    while sum(len(pair[1]) for pair in kept) + len(ids) > room:
                        kept.pop(0)
                    kept.append((space, ids))
        else:
            lengths = [shared(pair[1], ids[:-1]) if pair[0] == space else -1 for pair in kept]
            found = cache.find(space, ids)
            if max(lengths, default=0) < FEWEST_TOKENS:
                assert found is None
            else:
                check(found, ids[: max(lengths)])
                kept.append(kept.pop(lengths.index(max(lengths))))
        assert cache.num_bytes == sum(len(pair[1]) for pair in kept) * SLOT <= room * SLOT
        assert [(key[0], list(key[1])) for key in cache._texts] == kept
