"""A saved head is loaded unchanged, for its own base model only; errors name the broken file and the cause."""

import json
from collections.abc import Callable
from dataclasses import replace
from functools import reduce
from operator import getitem
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from tokenizers import pre_tokenizers
from torch import Tensor
from transformers import PreTrainedTokenizerFast

from cli_world import LETTERS, letters_tokenizer
from draftheads.checkpoints.checkpoint import (
    CARD_FILE,
    CONFIG_FILE,
    PROFILE_FILE,
    TENSORS_FILE,
    copy_for,
    load_head,
    read_head,
    save_head,
)
from draftheads.errors import (
    BaseModelWarning,
    CheckpointCorrupt,
    CheckpointMismatch,
    InvalidTree,
    StorageError,
    UnknownMethod,
)
from draftheads.heads import HEADS
from draftheads.heads.base import DraftHead
from draftheads.heads.medusa import MedusaConfig, MedusaHead
from draftheads.models import fingerprint
from draftheads.models.fingerprint import difference, tokenizer_fingerprint
from draftheads.models.model import TargetModel
from draftheads.speculation.acceptance_profile import AcceptanceProfile
from draftheads.speculation.draft import Context
from draftheads.speculation.shapes import BestFirst
from draftheads.speculation.tree import Tree
from families import propose, tiny_head, tiny_model, tiny_profile

VOCAB, SIZE = 64, 32
TREE = Tree.from_paths([(0,), (1,), (2,), (0, 0), (0, 1), (1, 0), (0, 0, 0)])


def tiny_base(
    *, seed: int = 0, dtype: torch.dtype = torch.float32, tokenizer: Any = None, tied: bool = False, **sizes: Any
) -> TargetModel:
    sizes = {"vocab_size": VOCAB, "hidden_size": SIZE, **sizes}
    model = tiny_model("llama", seed=seed, tie_word_embeddings=tied, **sizes).model.to(dtype)
    return TargetModel(model, tokenizer or letters_tokenizer(), f"tiny-{seed}")


def random_head(base: TargetModel, method: str = "medusa", **options: Any) -> DraftHead:
    """A head that reads the last hidden state."""
    own = {"layers": []} if method in ("eagle3", "dflash", "dflash2", "dspark", "p-eagle") else {}
    return tiny_head(method, base, **own, **options)


def context(*, num_rows: int = 5, dtype: torch.dtype = torch.float32) -> Context:
    generator = torch.Generator().manual_seed(7)
    tokens = torch.randint(VOCAB, (num_rows, 2), generator=generator)
    hidden = torch.randn(num_rows, 2, SIZE, generator=generator).to(dtype)
    return Context(hidden, tokens, torch.tensor([1, 2, 1, 2, 2])[:num_rows], tokens[:, 0])


@pytest.fixture(scope="module")
def base() -> TargetModel:
    return tiny_base()


@pytest.fixture
def folder(base: TargetModel, tmp_path: Path) -> Path:
    """A good head's folder, to be broken."""
    save_head(random_head(base, draft_vocab_size=16), tmp_path / "head", base=base, profile=tiny_profile(TREE))
    return tmp_path / "head"


# --- there and back ---


@pytest.mark.few(13)
@pytest.mark.parametrize("method", sorted(HEADS))
@pytest.mark.parametrize(
    "options",
    [{}, {"draft_vocab_size": 16}, {"lm_head": "own", "num_layers": 2}, {"lm_head": "low_rank", "lm_head_rank": 5}],
)
def test_a_loaded_head_proposes_what_the_saved_one_did(
    base: TargetModel, tmp_path: Path, method: str, options: dict[str, Any]
) -> None:
    head = random_head(base, method, **options)
    save_head(head, tmp_path / "head", base=base, dtype=torch.float32)
    loaded = load_head(tmp_path / "head", base)
    ours, theirs = (propose(each, context(), BestFirst(12)) for each in (head, loaded))
    assert torch.equal(ours.token_ids, theirs.token_ids)
    # a product's order of sums depends on where a tensor begins in memory
    torch.testing.assert_close(ours.path_log_probs, theirs.path_log_probs, rtol=0, atol=2e-6)
    assert loaded.default_shape == head.default_shape, "the assumed profile's"
    assert type(loaded) is type(head)
    assert loaded.config == head.config


def test_a_head_is_saved_in_bf16_with_an_assumed_profile_and_shares_the_bases_matrices(
    base: TargetModel, tmp_path: Path
) -> None:
    head = random_head(base, "hydra", draft_vocab_size=16).to(torch.bfloat16).float()
    head.bind(base.weights)
    save_head(head, tmp_path, base=base)
    kinds = {name: tensor.dtype for name, tensor in load_file(tmp_path / TENSORS_FILE).items()}
    assert kinds.pop("draft_vocab") == torch.int64
    assert set(kinds.values()) == {torch.bfloat16}
    saved = read_head(tmp_path)
    assert saved.num_parameters == sum(weight.numel() for weight in head.parameters()), "without the map of tokens"
    assert saved.profile == AcceptanceProfile.assumed(3), "none was measured"
    loaded = load_head(tmp_path, base)
    assert torch.equal(propose(head, context(), TREE).token_ids, propose(loaded, context(), TREE).token_ids)
    assert loaded.target_embedding.data_ptr() == base.weights.embedding.data_ptr()


@pytest.mark.parametrize("dtype", [None, torch.float32])
def test_a_loaded_head_is_frozen_and_of_the_bases_type_or_the_given_one(
    folder: Path, dtype: torch.dtype | None
) -> None:
    base = tiny_base(dtype=torch.bfloat16)
    base.lm_head.bias = torch.nn.Parameter(torch.arange(VOCAB, dtype=torch.bfloat16))
    head = load_head(folder, base, dtype=dtype)
    own = dtype or torch.bfloat16
    assert not head.training
    assert not any(parameter.requires_grad for parameter in head.parameters())
    assert {parameter.dtype for parameter in head.parameters()} == {own}
    assert head.target_embedding.data_ptr() == base.weights.embedding.data_ptr(), "the embedding is not copied"
    assert head.lm_heads.shared_bias is not None
    assert torch.equal(head.lm_heads.shared_bias.float(), head.draft_vocab.float())
    ours = propose(head, context(dtype=own))
    assert ours.num_nodes == TREE.num_nodes
    twin = copy_for(head, base)
    assert {parameter.dtype for parameter in twin.parameters()} == {torch.bfloat16}
    theirs = propose(twin, context(dtype=torch.bfloat16), TREE)
    assert (ours.token_ids == theirs.token_ids).double().mean() > 0.8, "up to near-ties"


def test_loading_draws_no_random_numbers(base: TargetModel, folder: Path) -> None:
    torch.manual_seed(3)
    expected = torch.rand(1)
    torch.manual_seed(3)
    load_head(folder, base)
    assert torch.equal(torch.rand(1), expected)


def test_the_files_on_the_disk_are_described_without_the_base(base: TargetModel, tmp_path: Path) -> None:
    head, profile = random_head(base, lm_head="low_rank", lm_head_rank=5), tiny_profile(TREE)
    given = TargetModel(base.model, base.tokenizer, base.model_id, "{{ messages[0]['content'] }}")
    for name, model, card in (("head", base, "# Card\nfast"), ("other", given, "")):
        save_head(head, tmp_path / name, base=model, card=card, profile=profile)
    config = json.loads((tmp_path / "head" / CONFIG_FILE).read_text())
    assert list(config) == ["format_version", "method", "head", "base", "provenance"]
    assert (config["format_version"], config["head"]) == (1, head.config.options())
    assert config["provenance"]["torch"] == torch.__version__
    assert (tmp_path / "head" / CARD_FILE).read_text() == "# Card\nfast\n"
    saved, other = read_head(tmp_path / "head"), read_head(tmp_path / "other")
    assert (saved.method, saved.model_id, saved.config) == ("medusa", "tiny-0", head.config)
    assert (saved.fingerprints, saved.profile) == (base.fingerprints, profile)
    assert (saved.chat_template, other.chat_template) == (None, given.chat_template)
    assert other.card.startswith("# medusa head for tiny-0")
    (tmp_path / "other" / CARD_FILE).unlink()
    assert read_head(tmp_path / "other").card == ""
    assert load_head(tmp_path / "other", base).default_shape == TREE


def test_a_profile_of_another_head_is_not_saved(base: TargetModel, tmp_path: Path) -> None:
    with pytest.raises(CheckpointCorrupt, match="temperatures"):
        save_head(random_head(base), tmp_path / "head", base=base, profile=AcceptanceProfile.assumed(2))
    assert not (tmp_path / "head").exists()


# --- saving is all or nothing ---


def test_what_is_in_the_place_of_a_folder_or_file_stays(base: TargetModel, tmp_path: Path) -> None:
    (tmp_path / "letter").write_text("a letter")
    with pytest.raises(StorageError):
        save_head(random_head(base), tmp_path / "letter", base=base)
    assert (tmp_path / "letter").read_text() == "a letter"
    (tmp_path / "head" / CONFIG_FILE / "inner").mkdir(parents=True)
    with pytest.raises(StorageError, match="the new file is at"):
        save_head(random_head(base), tmp_path / "head", base=base)


# --- whose head is it? ---


def test_fingerprints_of_the_parts_are_independent(base: TargetModel) -> None:
    ours = base.fingerprints
    assert tiny_base(dtype=torch.bfloat16).fingerprints == ours
    assert difference(ours.embedding, ours.lm_head) > 1
    assert [len(digits) for digits in vars(ours).values()] == [256, 256, 16, 256]
    retokenized = tiny_base(tokenizer=letters_tokenizer(LETTERS[::-1])).fingerprints
    assert retokenized == replace(ours, tokenizer=retokenized.tokenizer)
    tied = tiny_base(tied=True).fingerprints
    assert tied.embedding == tied.lm_head == ours.embedding


def test_a_fingerprint_covers_the_whole_matrix() -> None:
    matrix = torch.zeros(10_000, 2)
    matrix[0, 0] = 3
    matrix[-1, 63 * 37 % 2] = 4
    digits = fingerprint.fingerprint_of(matrix)
    assert (digits[:4], digits[-4:]) == ("4040", "4080")
    assert float(fingerprint._numbers(digits).norm()) == 5
    assert difference(digits, fingerprint.fingerprint_of(torch.zeros(10_000, 2))) == 1


def add_noise(noise: float, *weights: Tensor) -> None:
    for weight in weights:
        weight.add_(noise * weight.std() * torch.randn(weight.shape, generator=torch.Generator().manual_seed(0)))


@pytest.mark.filterwarnings("error")
def test_a_head_of_a_model_that_was_tuned_since_is_loaded_with_a_warning(folder: Path) -> None:
    close, far = tiny_base(), tiny_base()
    add_noise(0.01, *close.layer_matrices())  # as a quantised copy
    add_noise(1.0, *far.layer_matrices())
    load_head(folder, close)
    with pytest.warns(BaseModelWarning, match=r"tiny-0 differ by \d+%.* --start-from .*head --model tiny-0 ") as said:
        assert load_head(folder, far).config == read_head(folder).config
    assert len(said) == 1
    assert said[0].filename == __file__


def test_the_print_of_the_layers_covers_all_layers_and_kernels_keep_it() -> None:
    model, other = tiny_base(), tiny_base()
    matrices = model.layer_matrices()
    assert {id(matrix) for matrix in matrices} == {
        id(weight) for name, weight in model.model.model.layers.named_parameters() if "norm" not in name
    }
    other.layer_matrices()[-1].add_(1)
    assert other.layers_fingerprint != model.layers_fingerprint
    packed = tiny_base().sped_up()
    assert packed.layers_fingerprint == model.layers_fingerprint
    assert TargetModel(packed.model, packed.tokenizer, "packed").layers_fingerprint is None
    assert fingerprint.sampled_layers([torch.zeros(2, 2, dtype=torch.int8)]) is None


def test_a_head_is_accepted_for_a_quantised_copy_of_its_base(folder: Path) -> None:
    copy = tiny_base()
    weights = (copy.lm_head.weight, copy.model.get_input_embeddings().weight)
    add_noise(0.01, *weights)
    load_head(folder, copy)
    add_noise(0.2, *weights)
    with pytest.raises(CheckpointMismatch, match=r"embedding .* tiny-0, differs by \d+%"):
        load_head(folder, copy)


def test_the_tokenizers_fingerprint_depends_on_words_ids_and_splitting_only(tmp_path: Path) -> None:
    expected = tokenizer_fingerprint(letters_tokenizer())
    padded = letters_tokenizer()
    padded.padding_side = "left"
    padded(["the", "the w1"], padding=False, truncation=True, max_length=1)
    assert tokenizer_fingerprint(padded) == expected
    assert tokenizer_fingerprint(letters_tokenizer(LETTERS[::-1])) != expected
    bytewise = letters_tokenizer()
    bytewise.backend_tokenizer.pre_tokenizer = pre_tokenizers.CharDelimiterSplit("t")
    assert tokenizer_fingerprint(bytewise) != expected
    letters_tokenizer().save_pretrained(tmp_path)
    assert tokenizer_fingerprint(PreTrainedTokenizerFast.from_pretrained(tmp_path)) == expected


def other_embedding() -> TargetModel:
    base = tiny_base()
    base.model.get_input_embeddings().weight[::2] += 1
    return base


@pytest.mark.parametrize(
    ("make_other", "what"),
    [
        (other_embedding, "the embedding"),
        (lambda: tiny_base(tied=True), "the lm_head"),
        (lambda: tiny_base(tokenizer=letters_tokenizer(LETTERS[::-1])), "tokenizer fingerprint"),
        (lambda: tiny_base(hidden_size=16), "hidden_size 32.* 16"),
        (lambda: tiny_base(vocab_size=63), "vocab_size 64.* 63"),
    ],
)
def test_a_head_of_another_model_is_refused(folder: Path, make_other: Callable[[], TargetModel], what: str) -> None:
    other = make_other()
    with pytest.raises(CheckpointMismatch, match=f"{folder}: trained for tiny-0.*{what}") as caught:
        load_head(folder, other)
    assert f"--method medusa --model {other.model_id}" in str(caught.value)


# --- broken folders ---


def change_json(path: Path, change: Callable[[Any], object]) -> None:
    value = json.loads(path.read_text())
    change(value)
    path.write_text(json.dumps(value))


def change_tensors(path: Path, change: Callable[[dict[str, Tensor]], object]) -> None:
    tensors = {name: tensor.clone() for name, tensor in load_file(path).items()}
    change(tensors)
    save_file(tensors, path)


def put(*keys: str, value: object) -> Callable[[Any], object]:
    """Sets ``config[keys[0]][keys[1]]… = value``."""
    return lambda config: reduce(getitem, keys[:-1], config).__setitem__(keys[-1], value)


def drop(*keys: str) -> Callable[[Any], object]:
    """Removes ``config[keys[0]][keys[1]]…``."""
    return lambda config: reduce(getitem, keys[:-1], config).pop(keys[-1])


def profile(paths: list[list[int]], **changes: Any) -> Callable[[Any], object]:
    """Other paths in a profile."""
    return lambda values: values.update(paths=paths, static_tokens=[1.0] * (len(paths) + 1), **changes)


BIAS = "blocks.0.0.linear.bias"
NO_LEVELS: dict[str, Any] = {"shallower_tokens": []}
# file, how it is broken, what the error must name, and its class if it is no CheckpointCorrupt
BROKEN: list[tuple[str, Callable[[Any], object], str] | tuple[str, Callable[[Any], object], str, type]] = [
    (CONFIG_FILE, put("head", "surprise", value=1), r"head\.surprise"),
    (CONFIG_FILE, drop("head", "num_heads"), r"head\.num_heads"),
    (CONFIG_FILE, drop("base", "fingerprints", "lm_head"), r"base\.fingerprints\.lm_head"),
    (CONFIG_FILE, put("base", "model_id", value=3), r"base\.model_id is 3"),
    *((CONFIG_FILE, put("head", "num_heads", value=n), f"num_heads is {n!r}") for n in (True, 2.0, 0, 128)),
    (CONFIG_FILE, put("head", "hidden_size", value=10**12), "hidden_size is 1000000000000"),
    (CONFIG_FILE, put("head", "lm_head", value="mine"), "lm_head is 'mine'"),
    (CONFIG_FILE, put("method", value="telepathy"), "'telepathy'; .*amphista, dflash", UnknownMethod),
    (CONFIG_FILE, put("format_version", value=2), "format_version is 2", CheckpointMismatch),
    (CONFIG_FILE, put("format_version", value=0), "format_version is"),
    (PROFILE_FILE, profile([[0]], temperatures=[1.0], **NO_LEVELS), "temperatures has 1 number .* 3 heads"),
    (PROFILE_FILE, profile([[0] * d for d in range(1, 5)], temperatures=[1.0] * 4, **NO_LEVELS), "4 deep", InvalidTree),
    (PROFILE_FILE, profile([[rank] for rank in range(17)]), "rank 16", InvalidTree),
    (TENSORS_FILE, drop(BIAS), f"missing tensor {BIAS}"),
    (TENSORS_FILE, lambda all_: all_.update({f"x.{i}": torch.zeros(1) for i in range(5)}), r"x\.0, x\.1, x\.2 and 2"),
    (TENSORS_FILE, put(BIAS, value=torch.zeros(31)), rf"{BIAS} is \(31,\)"),
    (TENSORS_FILE, put(BIAS, value=torch.zeros(32).to(torch.float8_e4m3fn)), f"{BIAS} holds F8_E4M3"),
    (TENSORS_FILE, put(BIAS, value=torch.full((32,), torch.nan)), f"{BIAS} has a NaN or infinite number"),
    (TENSORS_FILE, put("draft_vocab", value=torch.zeros(16)), "draft_vocab holds F32"),
    (TENSORS_FILE, lambda all_: all_["draft_vocab"].__setitem__(2, -1), "draft_vocab has ids -1"),
    (TENSORS_FILE, lambda all_: all_["draft_vocab"].__setitem__(2, VOCAB), f"draft_vocab has ids .* {VOCAB}"),
]


@pytest.mark.parametrize("case", BROKEN, ids=lambda case: f"{case[0]}: {case[2]}")
def test_a_broken_folder_is_an_error_that_names_the_cause(base: TargetModel, folder: Path, case: tuple[Any, ...]):
    file, change, named, error = (*case, CheckpointCorrupt)[:4]
    (change_tensors if file == TENSORS_FILE else change_json)(folder / file, change)
    with pytest.raises(error, match=f"{file}: .*{named}") as caught:
        load_head(folder, base)
    assert str(folder) in str(caught.value)


@pytest.mark.parametrize(
    ("file", "content"),
    [
        *((file, None) for file in (CONFIG_FILE, PROFILE_FILE, TENSORS_FILE)),
        *((CONFIG_FILE, text) for text in (b"{", b"", b"\xff\xfe{}", b"[" * 100_000, b"[1]")),
        *((TENSORS_FILE, length) for length in (0, 100, 2000)),
    ],
    ids=range(11),
)
def test_a_missing_or_damaged_file_is_named(
    base: TargetModel, folder: Path, file: str, content: bytes | int | None
) -> None:
    path = folder / file
    if content is None:
        path.unlink()
    else:
        path.write_bytes(path.read_bytes()[:content] if isinstance(content, int) else content)
    with pytest.raises(CheckpointCorrupt, match=str(path)):
        load_head(folder, base)


class ComputingHead(MedusaHead):
    """Breaks the rule that what a head has is saved, or made from its configuration when needed."""

    table: Tensor

    def __init__(self, config: MedusaConfig) -> None:
        super().__init__(config)
        self.register_buffer("table", torch.arange(4), persistent=False)


def test_a_head_that_computes_buffers_when_built_fails_an_assertion(
    base: TargetModel, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(HEADS, "medusa", (MedusaConfig, ComputingHead))
    with pytest.raises(AssertionError, match="table"):
        load_head(folder, base)
