"""Fixtures of tests/conftest.py that the packages' tests need, too."""

from conftest import _idle_machine, cheap_nodes, one_thread

__all__ = ["_idle_machine", "cheap_nodes", "one_thread"]
