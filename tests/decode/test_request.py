"""A request's own rules: where it stops, what it counts, and that none of it depends on how the tokens came."""

import copy
import pickle
from collections.abc import Sequence
from dataclasses import asdict, replace
from typing import Any
from xml.etree import ElementTree as ET

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken

from byte_tokenizers import LETTERS, TOKENIZERS, byte_level, whole_text
from draftheads.decode.request import GenerationResult, Request, StreamEvent
from draftheads.settings import SamplingSettings
from families import IntegerTokenizer

EOS = 2


def request_of(
    own: SamplingSettings | None = None,
    *,
    prompt: Sequence[int] = (5, 6),
    max_length: int | None = None,
    tokenizer: Any = None,
    **settings: Any,
) -> Request:
    return Request(
        prompt,
        own or SamplingSettings(**settings),
        tokenizer=tokenizer or IntegerTokenizer(),
        eos_ids=frozenset({EOS}),
        max_length=max_length,
        index=3,
    )


def fed(request: Request, *runs: list[int]) -> list[StreamEvent]:
    """Runs of a root's followers, as steps give them, until the answer is finished."""
    events = []
    for run in runs:
        if request.finish_reason is None:
            request.num_steps += 1
            events.append(request.append(run, num_drafted=len(run) - 1))
    return events


# --- a stop inside an accepted run ---


def test_half_a_character_is_shown_when_the_answer_ends() -> None:
    class Halves(IntegerTokenizer):
        """Two tokens a character."""

        def decode(self, token_ids: list[int], **_: object) -> str:
            return "é" * (len(token_ids) // 2) + "\ufffd" * (len(token_ids) % 2)

    request = request_of(tokenizer=Halves(), max_new_tokens=3)
    assert [event.text for event in fed(request, [7], [8], [9])] == ["", "é", "\ufffd"]


def slow_answer(tokens: list[int], own: SamplingSettings) -> tuple[tuple[int, ...], str, str]:
    """Token after token over whole texts: ids, text and why it ended."""
    enders = {*own.stop_token_ids, *(() if own.ignore_eos else (EOS,))}
    early = len(IntegerTokenizer().decode(tokens[: own.min_new_tokens]))
    shows_end = own.include_stop_str_in_output
    for count in range(1, len(tokens) + 1):
        kept = tokens[:count]
        stopped = kept[-1] in enders
        text = IntegerTokenizer().decode(kept[:-1] if stopped and not shows_end else kept)
        found = [
            (start + len(stop), start)
            for stop in own.stop
            for start in range(len(text))
            if text[start:].startswith(stop)
        ]
        if ends := [pair for pair in found if pair[0] > early]:
            end, start = min(ends)
            return tuple(kept), text[: end if shows_end else start], "stop"
        if stopped:
            return tuple(kept), text, "stop"
        if count == own.max_new_tokens:
            return tuple(kept), text, "length"
    raise AssertionError("the tokens did not suffice")


def settings_of(**own: Any) -> SamplingSettings:
    return SamplingSettings(**{**own, "min_new_tokens": min(own["min_new_tokens"], own["max_new_tokens"])})


stop_texts = st.sampled_from(["<7>", "7", "><", "<7><8>", "8><9", "<1", "9>", "nothing", "<2>", "1><10>"])


@settings(deadline=None, max_examples=200)
@given(
    st.lists(st.sampled_from([EOS, 7, 8, 9, 10]), min_size=12, max_size=12),
    st.builds(
        settings_of,
        max_new_tokens=st.integers(1, 12),
        min_new_tokens=st.just(0) | st.integers(1, 8),
        include_stop_str_in_output=st.booleans(),
        stop=st.lists(stop_texts, max_size=3).map(tuple),
        stop_token_ids=st.sampled_from([(), (10,), (9, 10)]),
        ignore_eos=st.booleans(),
    ),
    st.lists(st.integers(1, 5), min_size=12, max_size=12),
)
def test_the_answer_is_the_same_in_any_runs(tokens: list[int], own: SamplingSettings, sizes: list[int]) -> None:
    """What no model chooses is not tried: a token that ends the answer before it may end."""
    request = request_of(own)
    tokens = [8 if token in request.stop_ids and n < own.min_new_tokens else token for n, token in enumerate(tokens)]
    starts = [sum(sizes[:i]) for i in range(len(sizes))]
    runs = [tokens[start : start + size] for start, size in zip(starts, sizes, strict=True)]
    events = fed(request, *filter(None, runs))
    result = request.result()
    assert (result.token_ids, result.text, result.finish_reason) == slow_answer(tokens, own)
    assert "".join(event.text for event in events) == result.text
    assert sum((event.token_ids for event in events), ()) == result.token_ids
    assert [event.finish_reason for event in events] == [None] * (len(events) - 1) + [result.finish_reason]
    for event, run in zip(events, runs, strict=False):
        assert event.token_ids == tuple(run[: len(event.token_ids)])
        assert event.num_drafted == min(len(run) - 1, len(event.token_ids))


# --- room and counts ---


def test_a_result_has_text_counts_and_reason() -> None:
    request = request_of(prompt=[5, 6, 7], max_new_tokens=6)
    request.append([7], num_drafted=0)  # from reading the prompt, which is no step
    fed(request, [8, 9, 10, 11], [12])
    result = request.result()
    assert (result.num_prompt_tokens, result.num_steps, result.tokens_per_step) == (3, 2, 2.5)
    short = request_of(max_new_tokens=1)
    short.append([7], num_drafted=0)
    assert (short.result().num_steps, short.result().tokens_per_step) == (0, 1.0)


# --- random numbers ---


def test_a_place_in_the_answer_has_its_number_however_it_is_reached() -> None:
    plain, drafted = request_of(seed=5, max_new_tokens=500), request_of(seed=5, max_new_tokens=500)
    one_by_one = []
    for _ in range(200):
        one_by_one += plain.uniforms(1)
        fed(plain, [7])
    assert all(0 <= number < 1 for number in one_by_one)
    assert len(set(one_by_one)) == 200
    for size in [1, 4, 2, 60, 3, 70, 1]:
        done = len(drafted.token_ids)
        assert drafted.uniforms(size) == one_by_one[done : done + size]
        assert drafted.uniforms(2) == one_by_one[done : done + 2], "asking does not use a number up"
        fed(drafted, [7] * size)


def test_seeds_make_the_numbers() -> None:
    assert request_of(seed=1).uniforms(4) == request_of(seed=1).uniforms(4)
    for seed in (2, -1):  # -1 is another one in each request
        assert request_of(seed=1).uniforms(4) != request_of(seed=seed).uniforms(4)
    assert request_of(seed=-1).uniforms(4) != request_of(seed=-1).uniforms(4)
    assert request_of().uniforms(4) != request_of().uniforms(4)


# --- what a notebook shows ---


def result_of(tokenizer: Any, *runs: list[int], **own: Any) -> GenerationResult:
    request = request_of(tokenizer=tokenizer, max_new_tokens=sum(map(len, runs)), **own)
    fed(request, *runs)
    return request.result()


def test_a_result_is_short_on_one_line() -> None:
    result = result_of(IntegerTokenizer(), [7], [8, 9, 10], [11, EOS])
    counts = "6 tokens, 1.67 tokens/step, 3 steps, ended by stop"
    assert repr(result) == f"GenerationResult('<7><8><9><10><11>', {counts})"
    long = repr(replace(result, text="\n" * 100))
    assert "\n" not in long
    assert long.startswith("GenerationResult('" + "\\n" * 57 + "…', 6 tokens")


@settings(deadline=None)
@given(st.sampled_from(sorted(TOKENIZERS)), st.text(LETTERS, max_size=25), st.integers(1, 4), st.integers(0, 3))
def test_pieces_are_the_text(name: str, typed: str, width: int, cut: int) -> None:
    """Characters of several tokens belong to the last one; a stop string or a half character changes no sum."""
    tokenizer = TOKENIZERS[name]
    tokens = tokenizer(typed + ".", add_special_tokens=False)["input_ids"]
    tokens = tokens[: max(1, len(tokens) - cut)]
    result = result_of(tokenizer, *[tokens[i : i + width] for i in range(0, len(tokens), width)])
    assert "".join(result.pieces) == result.text
    assert cut or result.text == whole_text(tokenizer, tokens)
    assert len(result.pieces) == len(result.token_ids)
    stopped = result_of(tokenizer, tokens, stop=typed[3:6] or ".")
    assert "".join(stopped.pieces) == stopped.text
    assert len(stopped.pieces) == len(stopped.token_ids)


def test_the_page_of_a_result_colours_accepted_draft_tokens() -> None:
    class Words(IntegerTokenizer):
        def decode(self, token_ids: list[int], **_: object) -> str:
            words = {7: "<script>", 8: "  a\n", 9: "&", 10: '"$x$"'}
            return "".join(words.get(token, "") for token in token_ids)

    result = result_of(Words(), [7], [8, 9, 10], [9, 9, EOS])
    assert result.drafted == (False, True, True, False, True, True, False)
    page = result._repr_html_()
    colour = '<span style="background: rgba(46, 160, 67, 0.25)">'
    assert f'">&lt;script&gt;{colour}  a\n&amp;</span>&quot;$x$&quot;{colour}&amp;&amp;</span></div>' in page
    assert 'class="tex2jax_ignore mathjax_ignore"' in page, "$x$ is no formula"
    assert f"7 tokens, 2.00 tokens/step, 3 steps, ended by stop ({colour}4 accepted draft tokens</span>)" in page
    ET.fromstring(page)  # noqa: S314 - our own
    assert "draft" not in result_of(Words(), [7], [8], [9])._repr_html_()


def test_results_are_compared_pickled_and_copied_without_their_tokenizer() -> None:
    one, other = (result_of(tokenizer, [7], [8, 9]) for tokenizer in (IntegerTokenizer(), Unpicklable()))
    assert one == other
    assert hash(one) == hash(other)
    for found in (pickle.loads(pickle.dumps(other)), copy.deepcopy(other)):  # noqa: S301 - our own
        assert found == other
        assert found.pieces == other.pieces == ("<7>", "<8>", "<9>")
        assert found._repr_html_() == other._repr_html_()
    assert "new_stream" not in asdict(other)
    assert replace(other, text="<7><8>").pieces == ("<7>", "<8>", "")


class Unpicklable(IntegerTokenizer):
    def __reduce__(self) -> str:
        raise AssertionError("a result holds its tokenizer")


def test_a_result_made_by_hand_shows_its_text() -> None:
    result = GenerationResult("<b>", (9, 2), 3, 1, "stop")
    assert result.pieces == ("<b>", "")
    assert "&lt;b&gt;" in result._repr_html_()
    assert GenerationResult("", (), 3, 0, "length")._repr_html_()


@pytest.mark.parametrize("width", [1, 2, 9])
@pytest.mark.parametrize(
    ("stop", "shown", "kept"),
    [
        ("<|turn|>", "the cat", "the cat<|turn|>"),
        ("<|turn|> th", "the cat", "the cat<|turn|> th"),
        ("t<|turn|> th", "the ca", "the cat<|turn|> th"),
        ("<|turn|><|other|>", "the cat the cat", "the cat the cat"),
        ("|", "the cat the cat", "the cat the cat"),  # a part of a token that is not shown
        ("<|other|> cat", "the cat the", "the cat the<|other|> cat"),
    ],
)
def test_stop_strings_have_the_text_of_special_tokens(stop: str, shown: str, kept: str, width: int) -> None:
    tokenizer = byte_level()
    tokenizer.add_tokens([AddedToken(name, special=True) for name in ("<|turn|>", "<|other|>")], special_tokens=True)
    ids = tokenizer("the cat<|turn|> the<|other|> cat")["input_ids"]
    for keep in (False, True):
        settings = SamplingSettings(max_new_tokens=len(ids), stop=stop, include_stop_str_in_output=keep)
        request = Request([5], settings, tokenizer=tokenizer, eos_ids=frozenset({0}), max_length=None)
        text = ""
        for at in range(0, len(ids), width):
            if request.finish_reason is None:
                text += request.append(ids[at : at + width], num_drafted=0).text
        assert request.text == text == (kept if keep else shown)
        assert request.finish_reason == ("length" if shown == "the cat the cat" else "stop")
