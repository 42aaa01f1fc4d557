"""Steps on a device other than the CPU: no mixed devices, the CPU's text, and one read by the host in each step."""

import copy
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

from draftheads.data.batches import Batch as TrainingBatch
from draftheads.decode.engine import Engine
from draftheads.decode.step_costs import StepTimer
from draftheads.drafters.draft_model import DraftModel
from draftheads.drafters.lookahead import Lookahead
from draftheads.drafters.mixed import Mixed
from draftheads.heads import HEADS
from draftheads.heads.base import DraftHead
from draftheads.models.model import StepMode, TargetModel
from draftheads.search.replay import Answer, Replay
from draftheads.search.settings import ReplaySettings
from draftheads.settings import SamplingSettings
from draftheads.speculation.acceptance_profile import AcceptanceProfile
from draftheads.speculation.drafter import Drafter
from draftheads.speculation.shapes import Sampled, Shape
from draftheads.speculation.tree import Tree
from draftheads.train.learner import Learner, with_noise
from draftheads.train.report import _measure_batch
from draftheads.utils.progress import NoProgress
from draftheads.utils.transfer import to_device
from fake_device import DEVICE, FakeDevice
from families import FAMILIES, GROWING, PROMPTS, TREES, VOCAB, by_hand, tiny_head, tiny_model, tiny_profile
from structured_world import GRAMMARS, json_model

TEXTS = [*PROMPTS, [5, 6, 7, 5, 6, 7, 5]]
LENGTHS = [12, 4, 12, 9]  # tokens of the answers in batches of three: rows leave, and one joins
SAMPLED = {"temperature": 0.8, "seed": 5, "top_k": 9, "top_p": 0.9}
DRAWN = Sampled(Tree.from_paths([(0,), (1,), (0, 0)]))
SHAPES: dict[str, Shape] = {**TREES, **GROWING, "drawn": DRAWN, "drawn chain": Sampled(Tree.chain(3))}
BIAS = {3: 1.0, 7: -2.0}
STEP = ["decode/batch.py"]  # where the host reads the tokens of a step
SENT_ONCE = ("speculation/draft.py", "speculation/growing.py")  # a static tree, at its first use

Make = Callable[[TargetModel], Drafter | None]  # a drafter for a model on the CPU
Action = Callable[[Tensor], object]


@dataclass(frozen=True)
class Transfers:
    """Between host and device in a step, by file and line."""

    reads: Counter[str]  # the most of all steps
    waits: Counter[str]  # the same
    copies: Counter[str]  # the same of steps before which no row joined, and after which none left

    def files_read(self) -> list[str]:
        """The file of each read."""
        return sorted(place.split(":")[0] for place in self.reads.elements())


@pytest.fixture(autouse=True)
def _one_thread(one_thread: None) -> None:
    """For all tests."""


@pytest.fixture
def device() -> Iterator[FakeDevice]:
    with FakeDevice() as found:
        yield found


some_model = cache(tiny_model)


def moved(model: TargetModel, *, graphs: bool = False) -> TargetModel:
    """A copy of the model on the device."""
    return TargetModel(
        copy.deepcopy(model.model).to(DEVICE), model.tokenizer, model.model_id, step_mode=StepMode(graphs)
    )


def moved_drafter(drafter: Any, model: TargetModel) -> Any:
    """A copy of the drafter on the device, for the model there."""
    if isinstance(drafter, DraftHead):
        head = copy.deepcopy(drafter).to(DEVICE)
        head.bind(model.weights)
        return head
    if isinstance(drafter, DraftModel):
        return DraftModel(moved(drafter.model, graphs=model.has_static_steps), model)
    if isinstance(drafter, Mixed) and not drafter.is_alone:
        return Mixed(moved_drafter(drafter.drafter, model))
    return drafter


def decoded(engine: Engine, device: FakeDevice, each: Sequence[SamplingSettings]) -> tuple[list[Any], Transfers]:
    """The answers, and what the steps needed."""
    requests = engine.requests(TEXTS, each)
    steps: list[tuple[Counter[str], Counter[str]]] = []
    quiet: list[Counter[str]] = []
    is_new, num_ended = True, 0

    def on_phase(part: str) -> None:
        nonlocal is_new, num_ended
        if part not in ("prompt", "rest"):
            return
        ended = sum(request.finish_reason is not None for request in requests)
        if part == "rest":
            steps.append((device.reads, device.waits))
            if not is_new and ended == num_ended:
                found = {place: count for place, count in device.copies.items() if not place.startswith(SENT_ONCE)}
                quiet.append(Counter(found))
        is_new, num_ended = part == "prompt", ended
        device.clear()

    for _ in engine.run(requests, on_phase=on_phase):
        pass
    reads, waits = (max(counts, key=Counter.total) for counts in zip(*steps, strict=True))
    results = [request.result() for request in requests]
    return results, Transfers(reads, waits, max(quiet, key=Counter.total))


def transfers(
    model: TargetModel,
    make: Make = lambda _: None,
    *,
    shape: Shape | None = None,
    graphs: bool = False,
    profile: AcceptanceProfile | None = None,
    each: Sequence[dict[str, Any]] = ({},),
    **settings: Any,
) -> Transfers:
    """What a step needs on the device, where the answers are the CPU's."""
    all_settings = [
        SamplingSettings(**{"max_new_tokens": length, "ignore_eos": True, **settings, **each[row % len(each)]})
        for row, length in enumerate(LENGTHS)
    ]
    cost = by_hand([("verify", 1, 1, 10.0), ("verify", 1, 33, 10.5), ("static", 1, 2, 0.1)])
    drafter = make(model)
    options: dict[str, Any] = {"shape": shape, "max_batch_size": 3, "profile": profile, "costs": profile and cost}
    expected = Engine(model, drafter, **options).generate(TEXTS, all_settings)
    with FakeDevice() as device:
        there = moved(model, graphs=graphs)
        results, found = decoded(Engine(there, moved_drafter(drafter, there), **options), device, all_settings)
    for one, other in zip(results, expected, strict=True):
        assert one.token_ids == other.token_ids
        assert one.logprobs == (other.logprobs and pytest.approx(other.logprobs, abs=1e-4))
    return found


def head(method: str, **options: Any) -> Make:
    return lambda model: tiny_head(method, model, **options)


def copying(method: str) -> Make:
    return lambda model: Mixed(tiny_head(method, model))


def draft_model(model: TargetModel) -> DraftModel:
    return DraftModel(tiny_model("llama", seed=3), model)


class Case(NamedTuple):
    """What is decoded, and how often values are sent to the device in a step, at most."""

    copies: int
    make: Make = lambda _: None
    shape: str | None = None
    settings: dict[str, Any] | None = None
    family: str = "llama"
    reads: int = 1  # of the host: the tokens, and then what rows ask for


STATIC = {"graphs": True, "max_new_tokens": 24}
PENALTY = {**SAMPLED, "repetition_penalty": 1.1}
WANTED = [PENALTY, {**PENALTY, "logprobs": 2}, {"logprobs": 1}]
TYPICAL = {**SAMPLED, "acceptance": "typical", "logit_bias": BIAS}
MANY = [{"repetition_penalty": 1.3}, {**SAMPLED, "acceptance": "rejection"}, TYPICAL, {}]
OPTIONS: list[tuple[dict[str, Any], dict[str, Any]]] = [  # of heads, and settings
    ({"draft_vocab_size": 16}, {}),
    ({"draft_vocab_size": 16}, {"logit_bias": BIAS}),
    ({"lm_head": "own"}, {}),
    ({"lm_head": "low_rank", "lm_head_rank": 4}, {}),
]
DRAFTERS: list[tuple[Make, str | None, int]] = [
    (lambda _: Mixed(None), None, 4),
    (lambda _: Lookahead(), None, 3),
    (copying("hydra"), "ragged", 5),
    (copying("eagle"), "best first", 5),
    (copying("hydra"), "sure ones", 5),
    (draft_model, "ragged", 6),
    (draft_model, "best first", 9),
]
SENT = {"drawn": 4, "drawn chain": 5}  # levels of drawn trees need random numbers, also for greedy rows
PLANNED = {"profile": tiny_profile(TREES["ragged"]), "max_new_tokens": 24}
CASES = [
    # plain steps send the lengths of the texts
    *(Case(1, family=family, settings={"graphs": graphs}) for family in FAMILIES for graphs in (False, True)),
    # with drafts static steps send them twice: to verify, and to move what is accepted
    *(Case(2, head("medusa"), "ragged", STATIC, family) for family in FAMILIES),
    *(Case(2, head(method), "ragged", {"graphs": True}) for method in HEADS),
    *(Case(2, head(method), "best first") for method in HEADS),
    # random numbers are sent, and which rows want the log-probabilities of which tokens
    *(Case(5, head(method), "chain", {"each": WANTED}, reads=2) for method in HEADS),
    *(Case(SENT.get(shape, 2), head(method), shape) for shape in SHAPES for method in ("medusa", "hydra")),
    *(
        Case(SENT.get(shape, 2), head("hydra", **options), shape, settings)
        for options, settings in OPTIONS
        for shape in ("ragged", "best first", "drawn")
    ),
    # random numbers are sent: of the texts, of each level of drawn trees, and for rejection
    *(
        Case(copies, head("hydra"), shape, {"acceptance": rule, **SAMPLED})
        for rule in ("exact", "rejection", "block", "typical")
        for shape, copies in (("chain", 3), ("drawn", 6), ("drawn chain", 7))
    ),
    Case(6, head("hydra"), "drawn", {"each": MANY}),
    *(
        Case(copies, make, shape, {"graphs": graphs, "max_new_tokens": 24})
        for make, shape, copies in DRAFTERS
        for graphs in (False, True)
    ),
    *(
        Case(copies + more, make, settings={**PLANNED, **settings}, reads=1 + more // 2)
        for make, copies in ((head("medusa"), 2), (head("eagle"), 2), (head("mtp"), 2), (copying("hydra"), 5))
        for more, settings in ((0, {"graphs": True}), (2, {"logprobs": 1}))
    ),
]


@pytest.mark.few(64)
@pytest.mark.parametrize("case", CASES, ids=range(len(CASES)))
def test_a_step_waits_for_nothing_but_its_tokens(case: Case) -> None:
    shape = case.shape and SHAPES[case.shape]
    found = transfers(some_model(case.family), case.make, shape=shape, **(case.settings or {}))
    assert found.files_read() == STEP * case.reads
    assert not found.waits
    assert found.copies.total() <= case.copies, found.copies


@pytest.mark.parametrize(
    ("shape", "levels"), [(None, 0), ("ragged", 2), ("best first", 2), ("drawn", 1)], ids=["plain", *map(str, range(3))]
)
def test_grammars_read_the_draft_tokens(shape: str | None, levels: int) -> None:
    """Which tokens may follow a draft token is computed on the host: a read for each level with children, and one."""
    each = [{"grammar": GRAMMARS["person"]}, {"grammar": GRAMMARS["sums"], "logit_bias": {5: 1.0}}, {}]
    make = head("hydra") if shape else lambda _: None
    found = transfers(json_model(), make, shape=shape and SHAPES[shape], each=each, ignore_eos=False)
    assert found.files_read() == [*STEP, *["decode/token_rules.py"] * (levels + 1)]
    assert not found.waits
    assert found.copies.total() <= 12


OBJECTIVES = ["teacher", "hard", "amphista"]


@pytest.mark.few(9)
@pytest.mark.parametrize(
    ("method", "loss", "options"),
    [
        *[("hydra", loss, {}) for loss in OBJECTIVES],
        *[(method, "teacher", {}) for method in HEADS if method != "hydra"],
        ("hydra", "teacher", {"draft_vocab_size": 16}),
        ("medusa", "amphista", {"lm_head": "own"}),
    ],
)
def test_training(device: FakeDevice, method: str, loss: Any, options: dict[str, Any]) -> None:
    """Losses, gradients, and what is measured of held-out text equal the CPU's."""
    model = some_model("llama")
    untrained = tiny_head(method, model, **options)
    states = 1 + len(untrained.hidden_layers)
    generator = torch.Generator().manual_seed(0)
    texts = TrainingBatch(
        hidden=torch.randn(2, 16, states * model.hidden_size, generator=generator),
        token_ids=torch.randint(VOCAB, (2, 16), generator=generator),
        loss_mask=torch.arange(16).expand(2, 16) > 2,
        lengths=torch.tensor([16, 16]),
    )
    found = []
    for target in (model, moved(model)):
        own = moved_drafter(untrained, target) if target is not model else untrained
        own.requires_grad_(requires_grad=True)
        given = "eagle" if loss == "teacher" and own.predicts_hidden_states else loss
        learner = Learner(own, target.weights, loss=given)
        placed = {name: value.to(target.device) for name, value in vars(texts).items()}
        torch.manual_seed(1)  # block drafters learn behind random places
        losses = learner(**placed)
        losses["loss"].backward()
        with torch.no_grad():
            sums, _, ranks, counts = _measure_batch(learner.eval(), texts)
        with_noise(placed["hidden"], 15.0, placed["lengths"])
        gradients = [0.0 if one.grad is None else float(one.grad.abs().sum()) for one in own.parameters()]
        loss_values = [losses["loss"].item(), *losses["head_losses"].tolist(), *sums.tolist()]
        found.append((loss_values, gradients, ranks.tolist(), counts.tolist()))
    (expected, expected_gradients, *expected_ranks), (loss_values, gradients, *ranks) = found
    assert loss_values == pytest.approx(expected, rel=1e-4)
    assert any(gradients)
    assert gradients == pytest.approx(expected_gradients, rel=1e-3, abs=1e-5)
    assert ranks == expected_ranks


@pytest.mark.parametrize("method", ["medusa", "eagle", "eagle3", "mtp"])
def test_measuring(device: FakeDevice, method: str) -> None:
    """Trees along recorded answers equal the CPU's; costs can be measured."""
    model = some_model("llama")
    untrained = tiny_head(method, model)
    ids = torch.randint(VOCAB, (3, 14), generator=torch.Generator().manual_seed(0)).tolist()
    answers = [Answer(tuple(text[:4]), tuple(text[4 : 10 + row])) for row, text in enumerate(ids)]
    settings = ReplaySettings(top_k=4, beam=2, max_nodes=8)
    there = moved(model, graphs=True)
    own = moved_drafter(untrained, there)
    expected = Replay(model, untrained, settings, progress=NoProgress()).run(answers)
    assert Replay(there, own, settings, progress=NoProgress()).run(answers)["dynamic"] == expected["dynamic"]
    timer = StepTimer(there, own)
    assert timer.verify(2, 6) > 0
    assert timer.levels(2, 2) > 0


READS: list[Action] = [
    lambda x: x.sum().item(),
    lambda x: x[: x.max()],
    lambda x: x.tolist(),
    lambda x: x.to("cpu", torch.float64),
    lambda x: torch.zeros(4).copy_(x),
    lambda x: x[x > 1],
    lambda x: x.nonzero(),
    lambda x: torch.equal(x, x),
    lambda x: x.repeat_interleave(x),
]
WAITS: list[Action] = [
    lambda x: torch.tensor([1, 2], device=DEVICE),
    lambda x: torch.ones(4).to(DEVICE),
    lambda x: x.copy_(torch.ones(4)),
    lambda x: x[torch.tensor([1])],
    lambda x: x.__setitem__([1, 2], 5),
]
COPIES: list[Action] = [lambda x: to_device([1, 2], DEVICE)]
ERRORS: list[Action] = [
    lambda x: x + torch.ones(4),
    lambda x: torch.cat([x, torch.ones(1)]),
    lambda x: x.gather(0, torch.tensor([1])),
    lambda x: torch.where(torch.ones(4) > 0, x, x),
    lambda x: torch.nn.functional.linear(x.float(), torch.ones(3, 4)),
    lambda x: x.index_put_((torch.tensor([1], device=DEVICE),), torch.ones(1)),
]


@pytest.mark.parametrize(
    ("action", "noted"),
    [
        *((action, (1, 0, 0)) for action in READS),
        *((action, (0, 1, 0)) for action in WAITS),
        *((action, (0, 0, 1)) for action in COPIES),
        *((action, None) for action in ERRORS),
    ],
)
@pytest.mark.parametrize("inference", [True, False])
def test_what_passes_between_host_and_device_is_noted(
    device: FakeDevice, action: Action, noted: tuple[int, int, int] | None, inference: bool
) -> None:
    """And tensors of two devices do not meet."""
    with torch.inference_mode(inference):
        x = torch.arange(4, device=DEVICE)
        if noted is None:
            with pytest.raises(RuntimeError, match="on the CPU meets tensors on lazy"):
                action(x)
        else:
            action(x)
            assert (device.reads.total(), device.waits.total(), device.copies.total()) == noted
