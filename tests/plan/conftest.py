"""Stand-ins for the compiler."""

import pytest
from stand_in import VERSIONS, compiled

from bert_jax.plan import compile as compile_lib
from bert_jax.plan import remedies, scaling, search


@pytest.fixture
def answers(monkeypatch):
    """Compilations are answered by the function in this list; what was asked is put behind it."""
    asked = [lambda job: compiled(job.topology)]

    def compile_all(jobs, say, refusals="raise", seconds=None):
        asked.extend(jobs)
        return [asked[0](job) for job in jobs]

    for module in (compile_lib, remedies, scaling, search):
        monkeypatch.setattr(module, "compile_all", compile_all)
    monkeypatch.setattr("bert_jax.plan.command.compile_all", compile_all)
    monkeypatch.setattr(compile_lib, "versions", lambda: VERSIONS)
    return asked
