"""Heads of other packages are registered by a call or by an entry point."""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import pytest

import draftheads
from draftheads import heads
from draftheads.errors import InvalidSettings, UnknownMethod
from draftheads.heads import HEADS, head_classes, head_methods, register
from draftheads.heads.base import HeadConfig
from draftheads.heads.medusa import MedusaConfig, MedusaHead


@dataclass(frozen=True)
class TwinConfig(MedusaConfig):
    method: ClassVar[str] = "twin"


class TwinHead(MedusaHead):
    """Medusa by another name."""


@pytest.fixture(autouse=True)
def restored(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Registrations end with the test."""
    monkeypatch.setattr(heads, "HEADS", dict(HEADS))
    heads._load_entry_points.cache_clear()
    yield
    heads._load_entry_points.cache_clear()


def install_package(site: Path, module: str, *, attribute: str = "register_heads") -> None:
    """A package with one module and an entry point of the group ``draftheads.heads``."""
    record = site / "twin_heads-1.0.dist-info"
    record.mkdir(parents=True)
    (record / "METADATA").write_text("Metadata-Version: 2.1\nName: twin-heads\nVersion: 1.0\n")
    (record / "entry_points.txt").write_text(f"[draftheads.heads]\ntwin = twin_heads:{attribute}\n")
    (site / "twin_heads.py").write_text(module)


def test_an_unknown_method_is_refused() -> None:
    with pytest.raises(
        UnknownMethod, match=r"unknown method 'medus' \(did you mean medusa\?\); choose .*hydra.*medusa"
    ):
        head_classes("medus")


def test_a_registered_head_is_found_by_its_method() -> None:
    draftheads.register(TwinConfig, TwinHead)
    register(TwinConfig, TwinHead)  # the same classes again change nothing
    assert head_classes("twin") == (TwinConfig, TwinHead)
    assert "twin" in head_methods()


@pytest.mark.parametrize(
    ("config_class", "head_class", "words"),
    [
        (MedusaConfig, TwinHead, r"the method 'medusa' is taken by .*MedusaHead"),
        (TwinHead, TwinHead, "must be a subclass of HeadConfig"),
        (TwinConfig, TwinConfig, "must be a subclass of DraftHead"),
        (HeadConfig, TwinHead, r"HeadConfig.method is None; it must be the architecture's name"),
    ],
)
def test_impossible_registrations_are_refused(config_class: Any, head_class: Any, words: str) -> None:
    with pytest.raises(InvalidSettings, match=words):
        register(config_class, head_class)


def test_an_entry_point_is_loaded_for_an_unknown_method(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(heads, "TWINS", (TwinConfig, TwinHead), raising=False)
    install_package(
        tmp_path,
        "from draftheads import heads\n\n\ndef register_heads():\n    heads.register(*heads.TWINS)\n",
    )
    assert head_classes("twin") == (TwinConfig, TwinHead)


def test_a_package_that_fails_costs_a_warning(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(tmp_path)
    install_package(tmp_path, "", attribute="nothing")
    with (
        pytest.warns(RuntimeWarning, match="the heads of twin_heads:nothing cannot be used"),
        pytest.raises(UnknownMethod, match="unknown method 'twin'"),
    ):
        head_classes("twin")
    assert "medusa" in head_methods()
