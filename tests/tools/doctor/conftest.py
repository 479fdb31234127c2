"""Most texts of these tests are of no language."""

import sys

import pytest


@pytest.fixture(autouse=True)
def without_lingua(monkeypatch):
    """lingua counts as not installed."""
    monkeypatch.setitem(sys.modules, "lingua", None)
