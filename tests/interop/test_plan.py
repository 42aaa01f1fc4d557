"""How many tokens another engine should draft."""

from pathlib import Path

import pytest

from draftheads.checkpoints.checkpoint import save_head
from draftheads.cli.main import main
from draftheads.cli.plan import PlanOptions, run
from draftheads.errors import DataError, InvalidSettings, SpeedWarning
from draftheads.interop.plan import Choice, Measured, chain_tokens, plan, read_costs
from draftheads.speculation.acceptance_profile import AcceptanceProfile
from draftheads.speculation.tree import Tree
from families import tiny_head, tiny_model, tiny_profile

# siblings between the tokens of the chain count nothing; the chain is right with 0.8, 0.5 and 0.25
PROFILE = tiny_profile(
    Tree.from_paths([(0,), (1,), (0, 0), (0, 1), (0, 0, 0)]), static_tokens=[1.0, 1.8, 1.9, 2.4, 2.5, 2.75]
)
COSTS = [
    *(Measured(1, k, ms) for k, ms in ((0, 10.0), (1, 10.5), (3, 12.5))),
    *(Measured(8, k, ms) for k, ms in ((0, 10.0), (2, 40.0))),
    Measured(4, 0, 10.0),
    Measured(4, 2, 20.0),
]


def test_a_chain_gives_what_its_nodes_add() -> None:
    assert chain_tokens(PROFILE) == pytest.approx([1.0, 1.8, 2.3, 2.55])


def test_the_fastest_number_of_tokens_at_each_batch_size() -> None:
    one, four, eight = plan(PROFILE, COSTS)
    assert (one.batch, one.draft_tokens) == (1, 3)
    assert one.speed_up == pytest.approx(2.55 / 12.5 / (1.0 / 10.0))
    assert (four.draft_tokens, four.tokens_per_step) == (1, 1.8), "15 ms, between the times of 0 and 2"
    assert (eight.draft_tokens, eight.speed_up) == (0, 1.0)


def test_nothing_is_said_of_times_that_are_not_there() -> None:
    with pytest.raises(InvalidSettings, match="for a batch of 2, 1 time with 3 draft tokens were given"):
        plan(PROFILE, [Measured(2, 3, 10.0)])
    assert plan(PROFILE, [Measured(1, 0, 10.0), Measured(1, 1, 20.0)]) == [Choice(1, 0, 1.0, 1.0)]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("batch,draft_tokens\n1,0\n", "has the columns batch, draft_tokens; needed: .*milliseconds"),
        ("", "has the columns none"),
        ("batch,draft_tokens,milliseconds\n1,x,3\n", "line 2: .* are not three numbers"),
        ("batch,draft_tokens,milliseconds\n1,0,3\n0,0,3\n", "line 3: batch ≥ 1"),
    ],
)
def test_a_file_with_errors(text: str, message: str, tmp_path: Path) -> None:
    (tmp_path / "costs.csv").write_text(text)
    with pytest.raises(DataError, match=message):
        read_costs(tmp_path / "costs.csv")


def test_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    lines = ["batch,draft_tokens,milliseconds", "1,0,10", "1,1,10.2", "1,4,11", "8,0,10", "8,4,90"]
    (tmp_path / "costs.csv").write_text("\n".join(lines))
    assert main(["plan", "hydra", "--costs", str(tmp_path / "costs.csv")]) == 0
    said = capsys.readouterr().out
    assert '"num_speculative_tokens_per_batch_size": [[1, 7, 3], [8, 1024, 0]]' in said
    assert "SGLang: --speculative-num-steps 3 --speculative-eagle-topk 1  # batch size 1\n" in said
    assert "llama.cpp: --spec-draft-n-max 3  # batch size 1\n" in said


def test_a_file_of_a_spreadsheet_with_a_time_measured_twice(tmp_path: Path) -> None:
    (tmp_path / "costs.csv").write_text("\ufeffbatch,draft_tokens,milliseconds\n1,2,30\n1,0,10\n1,0,20\n")
    costs = read_costs(tmp_path / "costs.csv")
    assert [cost.milliseconds for cost in costs] == [30.0, 10.0, 20.0]
    assert plan(PROFILE, costs)[0].speed_up == pytest.approx(1.8 / 22.5 / (1.0 / 15.0)), "plain steps take 15 ms"


def test_an_acceptance_that_nobody_measured_is_told(tmp_path: Path) -> None:
    target = tiny_model("llama")
    assumed = AcceptanceProfile.assumed(3)
    save_head(tiny_head("medusa", target), tmp_path / "head", base=target, profile=assumed)
    (tmp_path / "costs.csv").write_text("batch,draft_tokens,milliseconds\n1,0,10\n1,2,11\n")
    with pytest.warns(SpeedWarning, match=r"nobody has measured this head's acceptance: .* draftheads tune"):
        run(PlanOptions(str(tmp_path / "head"), tmp_path / "costs.csv"))
    run(PlanOptions("medusa", tmp_path / "costs.csv"))
