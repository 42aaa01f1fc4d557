"""Draft models of another tokenizer: which tokens are the same, texts in the tokens of the other, and no other text."""

import copy
import json
import logging
import math
from collections.abc import Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from transformers import PreTrainedTokenizerFast

import draftheads
from byte_tokenizers import CORPUS, byte_fallback
from cli_world import letters_tokenizer
from draftheads.cpu.optimise import TYPICAL_TEXT
from draftheads.decode.engine import Engine
from draftheads.drafters.draft_model import DraftModel, DraftModelSession
from draftheads.drafters.mixed import Mixed
from draftheads.drafters.vocabulary import TranslatedText, Vocabularies
from draftheads.errors import InvalidSettings, InvalidTree, SpeedWarning
from draftheads.models.chat_template import ids_of
from draftheads.models.model import TargetModel
from draftheads.settings import SamplingSettings
from draftheads.speculation.draft import Context, Draft
from draftheads.speculation.shapes import BestFirst, Sampled, Shape
from draftheads.speculation.tree import Tree
from families import HAS_RECURRENT, TREES, ids, saved_model, tiny_model

TEXTS = [
    "the cat sat on the mat, the cat",
    "naïve café — 🙂🙂 👩‍👩‍👧 🇯🇵 日本語のテキスト 日本",
    "He loved his daughter more than the sea. Where did the old lighthouse keeper leave the parcel on 14 March?",
    "x",
    "  two  spaces\n\n\tand Привет",
]
SHAPES: dict[str, Shape] = {
    "chain": Tree.chain(4),
    "ragged": TREES["ragged"],
    "best first": BestFirst(12, top_k=4, beam=3, max_depth=4),
}


@cache
def byte_level(size: int, eos: str = "<eos>", other: str = "<|user|>") -> Any:
    """Of so many tokens; with 258 each byte is a token. Texts begin with <s>, if it is a token."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    options: dict[str, Any] = {"initial_alphabet": pre_tokenizers.ByteLevel.alphabet(), "show_progress": False}
    trainer = trainers.BpeTrainer(vocab_size=size, special_tokens=[eos, other], **options)
    tokenizer.train_from_iterator([*CORPUS * 3, *TYPICAL_TEXT.split("\n")], trainer)
    bos = other if other == "<s>" else None
    if bos:
        tokenizer.post_processor = processors.TemplateProcessing("<s> $A", special_tokens=[("<s>", 1)])
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token=eos, bos_token=bos)


TOKENIZERS: dict[str, Any] = {
    "bytes": byte_level(258),
    "small": byte_level(300),
    "large": byte_level(420),
    "fallback": byte_fallback(),
}


def model_of(family: str, tokenizer: Any, *, seed: int = 0, **changes: Any) -> TargetModel:
    made = tiny_model(family, seed=seed, vocab_size=len(tokenizer), **changes)
    return replace(made, tokenizer=tokenizer, model_id=f"{family} of {len(tokenizer)} tokens")


def permuted(target: TargetModel) -> TargetModel:
    """The same model with its token ids in another order."""
    size = target.vocab_size
    new_of = torch.randperm(size, generator=torch.Generator().manual_seed(3)).tolist()
    state = json.loads(target.tokenizer.backend_tokenizer.to_str())
    state["model"]["vocab"] = {token: new_of[i] for token, i in state["model"]["vocab"].items()}
    for token in state["added_tokens"]:
        token["id"] = new_of[token["id"]]
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=Tokenizer.from_str(json.dumps(state)), eos_token="<eos>")
    model = copy.deepcopy(target.model)
    embedding, lm_head = model.get_input_embeddings().weight, model.get_output_embeddings().weight
    for weight in (embedding,) if lm_head is embedding else (embedding, lm_head):
        weight.data = weight.data[torch.tensor(new_of).argsort()]
    return replace(target, model=model, tokenizer=tokenizer, model_id="permuted")


def prompts_of(tokenizer: Any, texts: Sequence[str] = TEXTS) -> list[list[int]]:
    return [ids_of(tokenizer, text) for text in texts]


PAIRS = [  # tokenizers and families of the target and of the draft model
    ("bytes", "llama", "large", "gpt2"),
    ("large", "gpt2", "bytes", "llama"),
    ("large", "llama", "small", "llama"),
    ("small", "gpt2", "large", "llama"),
    ("fallback", "llama", "small", "gpt2"),
    ("large", "llama", "fallback", "llama"),
]


@pytest.mark.filterwarnings("ignore::draftheads.errors.SpeedWarning")
@pytest.mark.few(6)
@pytest.mark.parametrize("fast", [False, True])
@pytest.mark.parametrize(("spoken", "family", "drafted", "small"), PAIRS)
def test_texts_are_plain_decodings_in_batches(spoken: str, family: str, drafted: str, small: str, fast: bool) -> None:
    """Greedy and sampled, with a bias and copies; random models write broken characters and tokens no text has."""
    target = model_of(family, TOKENIZERS[spoken])
    draft = model_of(small, TOKENIZERS[drafted], seed=1)
    drafter = DraftModel(draft.sped_up() if fast else draft, target)
    assert drafter.vocabularies is not None
    prompts = prompts_of(target.tokenizer)
    each = [
        SamplingSettings(max_new_tokens=14 + n, temperature=0.6 * (n % 3), seed=n, ignore_eos=True) for n in range(5)
    ]
    each[3] = replace(each[3], logit_bias={7: 3.0, 9: -100.0})
    plain = ids(Engine(target, max_batch_size=1).generate(prompts, each))
    for shape in [*SHAPES.values(), Sampled(Tree.chain(2))]:
        for made in (drafter, Mixed(drafter)):
            assert ids(Engine(target, made, shape=shape, max_batch_size=2).generate(prompts, each)) == plain


@pytest.mark.parametrize("family", ["llama", "gpt2"])
@pytest.mark.parametrize("shape", SHAPES)
def test_a_permuted_copy_accepts_what_the_model_itself_accepts(family: str, shape: str) -> None:
    target = model_of(family, TOKENIZERS["large"])
    drafter = DraftModel(permuted(target), target)
    assert drafter.vocabularies is not None
    assert drafter.vocabularies.are_equal
    prompts = prompts_of(target.tokenizer)
    prompts[0] = [5, 300, 7, 1, 299]  # no tokenizer writes it so
    options: dict[str, Any] = {"max_new_tokens": 25, "ignore_eos": True}
    found = [
        Engine(target, each, shape=SHAPES[shape], max_batch_size=2).generate(prompts, **options)
        for each in (DraftModel(target, target), drafter)
    ]
    assert ids(found[1]) == ids(found[0]) == ids(Engine(target).generate(prompts, **options))
    assert [each.num_steps for each in found[1]] == [each.num_steps for each in found[0]]
    assert shape != "chain" or found[1][0].num_steps == 25 // 5


def test_a_draft_that_was_sampled_by_a_permuted_copy_is_always_right() -> None:
    """Its distribution is the target's, so rejection accepts all of it."""
    target = model_of("llama", TOKENIZERS["small"])
    engine = Engine(target, DraftModel(permuted(target), target), shape=Sampled(Tree.chain(3)))
    settings = SamplingSettings(max_new_tokens=25, temperature=1.0, seed=1, ignore_eos=True, acceptance="rejection")
    for result in engine.generate(prompts_of(target.tokenizer), settings):
        assert result.num_steps == 24 // 4


def context_of(texts: Sequence[Sequence[int]]) -> Context:
    """Of what was accepted, the root last."""
    width = max(map(len, texts)) - 1
    padded = torch.tensor([[*each[:-1], *[0] * (width + 1 - len(each))] for each in texts])
    counts, roots = torch.tensor([len(each) - 1 for each in texts]), torch.tensor([each[-1] for each in texts])
    return Context(torch.zeros(len(texts), width, 32), padded, counts, roots)


@pytest.mark.filterwarnings("ignore::draftheads.errors.SpeedWarning")
@pytest.mark.parametrize("fast", [False, True])
@pytest.mark.parametrize(("spoken", "family", "drafted", "small"), PAIRS[:4])
def test_drafting_after_steps_is_drafting_from_scratch(
    spoken: str, family: str, drafted: str, small: str, fast: bool
) -> None:
    """The cache has the tokens of the whole text; steps cut characters and words, and a row leaves."""
    target, draft = model_of(family, TOKENIZERS[spoken]), model_of(small, TOKENIZERS[drafted], seed=1)
    drafter = DraftModel(draft.sped_up() if fast else draft, target)
    both = drafter.vocabularies
    assert both is not None
    whole = prompts_of(target.tokenizer, [TEXTS[2], TEXTS[1] * 2, " ".join(TEXTS[:3])])
    session, ends, num_cut = drafter.start(), [9, 8, 7], 0
    new = [text[:end] for text, end in zip(whole, ends, strict=True)]
    for step in range(14):
        shape = list(SHAPES.values())[step % 3]
        fresh = drafter.start()
        assert isinstance(session, DraftModelSession)
        assert isinstance(fresh, DraftModelSession)
        before = [list(text.ids) for text in session._texts]
        drafts = fresh.propose(context_of([text[:end] for text, end in zip(whole, ends, strict=True)]), shape)
        if step in (4, 10):  # copies are drafted in its place
            session.observe(context_of(new))
        else:
            assert torch.equal(session.propose(context_of(new), shape).token_ids, drafts.token_ids)
        texts = [text.ids for text in session._texts]
        assert texts == [text.ids for text in fresh._texts]
        assert [row.length for row in session._rows] == [len(ids) - 1 for ids in texts]
        num_cut += sum(old[:-1] != ids[: len(old) - 1] for old, ids in zip(before, texts, strict=False))
        for text, end, own in zip(whole, ends, texts, strict=True):
            said = target.tokenizer.decode(text[:end]).rstrip("\ufffd").strip()
            assert draft.tokenizer.decode(own).strip().startswith(said)
        for own, drafted_ids, depths in zip(texts, drafts.token_ids.tolist(), drafts.depths.tolist(), strict=False):
            if shape is SHAPES["chain"]:  # its text is the draft model's own
                num_tokens = sum(depth > 0 for depth in depths)
                found = b"".join(both.target.bytes[i] for i in drafted_ids[1 : 1 + num_tokens])
                greedy = list(own)
                for _ in range(both.chain_length(4)):
                    greedy.append(int(draft.model(torch.tensor([greedy])).logits[0, -1].argmax()))
                spelt = b"".join(both.draft.bytes[i] for i in greedy[len(own) :])
                assert num_tokens == 4 or found == spelt
                assert spelt.startswith(found)
        if step == 5:
            session.keep(torch.tensor([2, 0]))
            whole, ends = [whole[2], whole[0]], [ends[2], ends[0]]
        more = [1 + (step + row) % 3 for row in range(len(ends))]
        new = [text[end - 1 : end + count] for text, end, count in zip(whole, ends, more, strict=True)]
        ends = [end + count for end, count in zip(ends, more, strict=True)]
    assert (num_cut > 0) == (drafted == "large"), "longer tokens replace those of half a word"


def test_where_tokens_are_biased_chains_are_of_shared_tokens_and_follow_the_bias() -> None:
    target = model_of("llama", TOKENIZERS["bytes"])
    engine = Engine(target, DraftModel(model_of("gpt2", TOKENIZERS["large"]), target), shape=Tree.chain(4))
    settings = SamplingSettings(max_new_tokens=21, logit_bias={7: 100.0}, ignore_eos=True)
    for result in engine.generate(prompts_of(target.tokenizer), settings):
        assert (result.token_ids, result.num_steps) == ((7,) * 21, 4)


@pytest.mark.parametrize("drafted", ["small", "large"])
@pytest.mark.parametrize("spoken", ["bytes", "small", "large"])
def test_a_text_that_comes_in_pieces_has_the_tokens_of_the_whole(spoken: str, drafted: str) -> None:
    target, own = TOKENIZERS[spoken], TOKENIZERS[drafted]
    both = Vocabularies(model_of("llama", own), model_of("llama", target))
    whole = " ".join([*TEXTS, TYPICAL_TEXT, *TEXTS])
    token_ids, place, count = ids_of(target, whole), 0, 0
    text = TranslatedText(both)
    text.ids, text._certain = [0, 0], 2  # as after a beginning: at first there are always two tokens
    while place < len(token_ids):
        count = count % 5 + 1
        before, same = list(text.ids), text.add(token_ids[place : place + count])
        assert text.ids[:same] == before[:same]
        assert text.ids[: same + 1] != before[: same + 1]
        place += count
        assert (
            b"".join(both.draft.bytes[i] for i in text.ids[2:])
            == whole.encode()[: sum(len(both.target.bytes[i]) for i in token_ids[:place])]
        )
    assert text.ids[2:] == ids_of(own, whole)


def test_half_characters_are_left_out_until_they_are_whole_if_no_token_is_a_byte() -> None:
    vocabulary = {token: i for i, token in enumerate(["<unk>", *sorted({*TYPICAL_TEXT, "é", "▁"} - {" "})])}
    backend = Tokenizer(models.BPE(vocabulary, [], unk_token="<unk>"))
    backend.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="never")
    backend.decoder = decoders.Metaspace(prepend_scheme="never")
    letters = PreTrainedTokenizerFast(tokenizer_object=backend, unk_token="<unk>")
    both = Vocabularies(model_of("llama", letters), model_of("llama", TOKENIZERS["bytes"]))
    text = TranslatedText(both)
    shown = []
    for token in ids_of(TOKENIZERS["bytes"], "éa é🙂"):
        text.add([token])
        shown.append("".join(letters.convert_ids_to_tokens(text.ids)))
    nothing = "<unk><unk>"
    assert [each.removeprefix(nothing) for each in shown] == [
        "", "é", "éa", "éa▁", "éa▁", "éa▁é", "éa▁é", "éa▁é", "éa▁é", "éa▁é<unk>"
    ]  # fmt: skip


def test_tokens_are_the_same_by_their_bytes_whatever_marks_spaces() -> None:
    for names in (("fallback", "large"), ("large", "fallback")):
        draft, target = (model_of("llama", TOKENIZERS[name]) for name in names)
        both = Vocabularies(draft, target)
        pairs = dict(zip(*(both.shared.flip(0).tolist()), strict=True))
        theirs_named, ours_named = (each.tokenizer.convert_ids_to_tokens for each in (target, draft))
        assert len(pairs) == len(set(pairs.values()))
        for theirs, ours in pairs.items():
            assert both.target.bytes[theirs] == both.draft.bytes[ours]
            assert int(both.draft_of[theirs]) == both.direct.get(theirs, ours) == ours
        named = {(theirs_named(theirs), ours_named(ours)) for theirs, ours in pairs.items()}
        expected = [("Ġ", "▁"), ("t", "t"), ("<eos>", "<eos>"), ("Ã", "<0xC3>"), ("B", "<0x42>")]
        assert {pair if names[1] == "large" else pair[::-1] for pair in expected} <= named
        assert both.coverage == len(pairs) / len(target.tokenizer)


def test_special_tokens_are_the_same_by_name_or_role_and_others_are_text() -> None:
    spaced, user = byte_level(300, "</s>", "<s>"), byte_level(420)
    (end, bos), (eos, mark) = (tokenizer.convert_tokens_to_ids(names) for tokenizer, names in (
        (spaced, ["</s>", "<s>"]), (user, ["<eos>", "<|user|>"])
    ))  # fmt: skip
    both = Vocabularies(model_of("llama", user), model_of("llama", spaced))
    assert both.direct == {end: eos}
    text = TranslatedText(both)
    text.add([bos, *ids_of(spaced, "the cat"), end, *ids_of(spaced, " the")])
    assert text.ids == [*ids_of(user, "the cat"), eos, *ids_of(user, " the")]

    text = TranslatedText(Vocabularies(model_of("llama", spaced), model_of("llama", user)))
    text.add([mark, *ids_of(user, "the"), eos])
    assert text.ids == [bos, *ids_of(spaced, "<|user|>the"), end]

    ends = copy.deepcopy(user)
    ends.bos_token = ends.eos_token  # as GPT-2's; texts do not begin with it
    both = Vocabularies(model_of("llama", ends), model_of("llama", spaced))
    assert (both.target_of[eos], both.direct) == (end, {end: eos}), "it is drafted as the end, not as the beginning"

    both = Vocabularies(model_of("llama", spaced), model_of("llama", byte_level(310, "<eos>", "<s>")))
    assert both.direct == {1: bos, 0: end}
    text = TranslatedText(both)
    text.add([1, *ids_of(both.target.tokenizer, "the"), 1])
    assert text.ids == [bos, *ids_of(spaced, "the"), bos], "a text begins once"


def test_a_text_token_with_the_name_of_a_special_one_is_not_the_same() -> None:
    special, text = byte_level(300, "</s>", "the"), TOKENIZERS["large"]
    (word,), mark = ids_of(text, "the"), special.convert_tokens_to_ids("the")
    for draft, target in ((special, text), (text, special)):
        both = Vocabularies(model_of("llama", draft), model_of("llama", target))
        ours, theirs = (mark, word) if draft is special else (word, mark)
        assert (ours, theirs) not in zip(*both.shared.tolist(), strict=True)


def test_tokens_that_a_model_has_no_logits_of_are_not_shared() -> None:
    added = copy.deepcopy(TOKENIZERS["small"]), copy.deepcopy(TOKENIZERS["large"])
    for tokenizer in added:
        tokenizer.add_tokens(["<a>", "<b>"])
    whole = [model_of("llama", tokenizer) for tokenizer in added]
    cut = [model_of("llama", TOKENIZERS[name]) for name in ("small", "large")]
    cut = [replace(model, tokenizer=tokenizer) for model, tokenizer in zip(cut, added, strict=True)]
    count = Vocabularies(*whole).shared.shape[1]
    for draft, target in ((cut[0], whole[1]), (whole[0], cut[1])):
        both = Vocabularies(draft, target)
        assert both.shared.shape[1] == count - 2
        assert both.coverage == (count - 2) / target.vocab_size
        assert int(both.shared[0].max()) < draft.vocab_size
        assert int(both.shared[1].max()) < target.vocab_size


def test_a_chain_is_spelt_in_the_targets_tokens() -> None:
    target, draft = TOKENIZERS["large"], TOKENIZERS["bytes"]
    both = Vocabularies(model_of("llama", draft), model_of("llama", target))
    user, eos = draft.convert_tokens_to_ids("<|user|>"), draft.eos_token_id
    texts = [ids_of(draft, " the cat"), [*ids_of(draft, " the"), eos], [*ids_of(draft, " t"), user, 9]]
    del both.target_of[user]
    width = max(map(len, texts))
    rows = torch.tensor([[1, *text, *[user] * (width - len(text))] for text in texts])
    found = both.respelt(Draft.on_tree(Tree.chain(width), rows), torch.tensor([7, 8, 9]), 4)
    expected = [ids_of(target, " the cat")[:3], [*ids_of(target, " the"), target.eos_token_id], ids_of(target, " t")]
    for row, ids_ in enumerate(expected):
        assert found.token_ids[row, : len(ids_) + 1].tolist() == [7 + row, *ids_]
        assert found.depths[row].tolist() == [*range(len(ids_) + 1), *[0] * (3 - len(ids_))]
    assert found.num_nodes == 4
    assert both.chain_length(10) == math.ceil(10 * len(ids_of(draft, TYPICAL_TEXT)) / len(ids_of(target, TYPICAL_TEXT)))


def test_what_is_shared_is_said_at_loading(caplog: pytest.LogCaptureFixture, tmp_path: Path) -> None:
    folders = [
        str(saved_model(model_of(family, TOKENIZERS[name]), tmp_path / name))
        for family, name in (("llama", "large"), ("gpt2", "small"))
    ]
    with caplog.at_level(logging.INFO, logger="draftheads"):
        engine = draftheads.load(folders[0], draft_model=folders[1], precision="fp32")
    (said,) = [each for each in caplog.messages if "another tokenizer" in each]
    assert (
        f"{folders[1]} has another tokenizer than {folders[0]}: it can draft 300 of the target's 420 tokens (71.4%)"
        in said
    )
    plain = draftheads.load(folders[0], precision="fp32")
    options: dict[str, Any] = {"max_new_tokens": 20, "ignore_eos": True}
    assert ids(engine.generate(TEXTS, **options)) == ids(plain.generate(TEXTS, **options))


def test_few_shared_tokens_warn_and_none_are_an_error() -> None:
    target, draft = model_of("llama", TOKENIZERS["large"]), model_of("llama", letters_tokenizer("abc"))
    said = r"7 tokens has another tokenizer than .* 420 tokens: it can draft 4 of the target's 420 tokens \(1\.0%\)"
    with pytest.warns(SpeedWarning, match=said):
        DraftModel(draft, target)
    snow = Tokenizer(models.WordLevel({"<unk>": 0, "☃☃": 1}, unk_token="<unk>"))
    pieces = Tokenizer(models.WordPiece({"<unk>": 0, "t": 1, "##h": 2, "##e": 3}, unk_token="<unk>"))
    pieces.pre_tokenizer, pieces.decoder = pre_tokenizers.Whitespace(), decoders.WordPiece()
    for backend, named in ((snow, r"no token of the draft model .* same family"), (pieces, r"bytes are not known")):
        tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, unk_token="<unk>")
        with pytest.raises(InvalidSettings, match=named):
            DraftModel(model_of("llama", tokenizer), target)


@pytest.mark.skipif(not HAS_RECURRENT, reason="trees need a newer transformers")
def test_a_recurrent_draft_model_needs_the_targets_tokenizer() -> None:
    draft, target = model_of("mamba2", TOKENIZERS["small"]), model_of("llama", TOKENIZERS["large"])
    with pytest.raises(InvalidSettings, match=r"layers with states.* same family"):
        DraftModel(draft, target)


def test_memory_is_that_of_the_draft_models_tokens_and_ranks_are_of_shared_ones() -> None:
    target = model_of("llama", TOKENIZERS["large"])
    same, other = DraftModel(target, target), DraftModel(model_of("llama", TOKENIZERS["bytes"]), target)
    assert other.vocabularies is not None
    assert other.bytes_per_slot == pytest.approx(same.bytes_per_slot * other.vocabularies.ratio, abs=1)
    assert other.vocab_size == other.vocabularies.shared.shape[1] == 258
    with pytest.raises(InvalidTree, match="rank 258 "):
        other.check_shape(Tree.from_paths([(258,)]))
