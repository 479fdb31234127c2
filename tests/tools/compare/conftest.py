"""What all tests of tables begin with."""

import pytest
from small_run import write_text

from bert_jax.tools.compare import runs
from bert_jax.tools.report import figures


@pytest.fixture
def here(tmp_path, monkeypatch):
    """Text and an experiment; the current folder. No programs are dropped, no plots drawn."""
    write_text(tmp_path)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(runs.jax, "clear_caches", lambda: None)
    monkeypatch.setattr(figures, "draw", lambda *_: "")
    monkeypatch.setattr(figures, "draw_dots", lambda *_: "")
    return tmp_path
