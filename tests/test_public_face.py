"""The public names are one sorted list. That importing the package is fast is tested in cli/test_main.py."""

from importlib import import_module

import pytest

import draftheads


def test_all_is_sorted_and_complete():
    assert draftheads.__all__ == sorted(set(draftheads.__all__))
    assert dir(draftheads) == draftheads.__all__
    assert sorted(draftheads._HOMES) == draftheads.__all__


@pytest.mark.parametrize("name", draftheads.__all__)
def test_every_name_is_imported_from_its_module(name: str):
    found = getattr(draftheads, name)
    assert found is getattr(import_module(found.__module__), name)
    assert found.__module__ == draftheads._HOMES[name]
    assert found.__doc__


def test_a_star_import_brings_the_names():
    names: dict[str, object] = {}
    exec("from draftheads import *", names)  # noqa: S102 - the statement is what is tested
    assert {name for name in names if not name.startswith("__")} == set(draftheads.__all__)


def test_an_unknown_name_is_an_attribute_error():
    with pytest.raises(AttributeError, match=r"module 'draftheads' has no attribute 'lod'"):
        _ = draftheads.lod
