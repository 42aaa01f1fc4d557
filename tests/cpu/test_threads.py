"""The number of threads follows the cores that other programs leave free."""

from collections.abc import Iterator
from typing import Any

import pytest
import torch

from draftheads.cpu import threads
from draftheads.cpu.threads import ThreadChoice, num_threads
from draftheads.decode.engine import Engine
from families import PROMPTS, tiny_model


class Others:
    """Other programs on four cores."""

    num_cores = 4
    busy = 0.0
    looks = 0

    def busy_cores(self, **_: object) -> float | None:
        self.looks += 1
        return self.busy if self.busy >= 0 else None


@pytest.fixture(autouse=True)
def _four_threads() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(4)
    yield
    torch.set_num_threads(before)


def passes(choice: ThreadChoice, count: int = threads._PASSES) -> int:
    """The number of threads after some passes."""
    for _ in range(count):
        choice.before_pass()
    return torch.get_num_threads()


def test_threads_follow_the_free_cores():
    others = Others()
    choice = ThreadChoice(others, is_fixed=False)
    assert passes(choice) == 4
    others.busy = 1.0
    assert passes(choice, threads._PASSES - 1) == 4, "a look costs time, so there is none before each pass"
    assert passes(choice, 1) == 3
    others.busy = 3.9
    assert passes(choice) == 1, "never none"
    others.busy = -1.0
    assert passes(choice) == 1, "no new number so soon"
    others.busy = 0.2
    assert passes(choice) == 4, "an idle desktop"
    others.busy = 2.0
    passes(choice)
    choice.restore()
    assert torch.get_num_threads() == 4
    assert passes(choice, 1) == 2, "the next step has the chosen number at once"


def test_a_number_that_the_caller_sets_is_the_most():
    others = Others()
    choice = ThreadChoice(others, is_fixed=False)
    torch.set_num_threads(3)
    assert passes(choice) == 3
    choice.restore()
    assert torch.get_num_threads() == 3


def test_while_something_is_measured_the_number_stays():
    others = Others()
    choice = ThreadChoice(others, is_fixed=False)
    others.busy = 2.0
    with choice.unchanged():
        assert torch.get_num_threads() == 2
        others.busy = 0.0
        assert passes(choice) == 2
    assert torch.get_num_threads() == 4
    assert passes(choice) == 4


def test_a_number_from_the_environment_stays(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(threads, "OtherPrograms", Others)
    monkeypatch.setattr(Others, "busy", 3.0)
    for name, expected in (("OMP_NUM_THREADS", 4), ("MKL_NUM_THREADS", 4), ("ANOTHER", 1)):
        for variable in ("OMP_NUM_THREADS", "MKL_NUM_THREADS"):
            monkeypatch.delenv(variable, raising=False)
        monkeypatch.setenv(name, "4")
        assert passes(threads.thread_choice.__wrapped__()) == expected
        torch.set_num_threads(4)


def test_as_many_threads_as_free_cores():
    assert [num_threads(8, free) for free in (0.0, 0.8, 1.8, 7.6, 8.0, 64.0)] == [1, 1, 2, 7, 8, 8]


def test_torch_has_one_thread_while_the_native_library_has_the_chosen_number(monkeypatch: pytest.MonkeyPatch) -> None:
    others = Others()
    others.busy = 2.0
    choice = ThreadChoice(others, is_fixed=False)
    for module in ("models.model", "cpu.threads"):
        monkeypatch.setattr(f"draftheads.{module}.thread_choice", lambda: choice)
    model = tiny_model("llama").sped_up()
    if model.native is None:
        pytest.skip("the native library was not built: no C++ compiler")
    seen = set()
    own = type(model.native).run

    def run(*arguments: Any, **options: Any) -> Any:
        seen.add((torch.get_num_threads(), threads.native_threads()))
        return own(*arguments, **options)

    monkeypatch.setattr(type(model.native), "run", run)
    Engine(model).generate(PROMPTS, max_new_tokens=2 * threads._PASSES, ignore_eos=True)
    assert seen == {(1, 4)}
    assert (torch.get_num_threads(), threads.native_threads()) == (4, 4)
    with pytest.raises(RuntimeError), choice.natively():
        raise RuntimeError
    assert torch.get_num_threads() == 4
