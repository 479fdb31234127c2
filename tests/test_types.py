"""A type checker knows what a user's script gets of `import bert_jax`."""

import os
import pathlib
import shutil
import subprocess
import sys

import pytest

ROOT = pathlib.Path(__file__).parents[1]
BESIDE_PYTHON = os.path.dirname(sys.executable)
PYREFLY = shutil.which("pyrefly", path=os.pathsep.join([BESIDE_PYTHON, *os.get_exec_path()]))

USES = """
import pathlib
from typing import assert_type

import bert_jax
import numpy as np
import numpy.typing as npt
from bert_jax.pretraining.loaded_model import LoadedModel, Prediction

model = bert_jax.load(pathlib.Path("runs/tiny"), checkpoint="best")
assert_type(model, LoadedModel)
assert_type(model.step, int)
assert_type(bert_jax.pretrain("tiny"), LoadedModel)
answer = model.fill("We [MASK].", top=3)
assert_type(answer, Prediction)
assert_type(answer.masks, list[list[tuple[str, float]]])
assert_type(answer.is_next, float | None)
assert_type(model.fill(["We [MASK].", "You [MASK]."]), list[Prediction])
assert_type(model.embed(["We shall."], normalize=True), npt.NDArray[np.float32])
assert_type(bert_jax.embed("run", ["We shall."], role="query"), npt.NDArray[np.float32])
tuned = bert_jax.finetune("task.py", base="runs/tiny", settings=["seed=1"])
assert_type(tuned, bert_jax.FinetunedModel)
assert_type(tuned.labels, tuple[str, ...])
assert_type(bert_jax.search(model, ["We shall."], "We")[0][0].score, float)
assert_type(bert_jax.export(tuned, "out", "task"), str)
batch = bert_jax.batches("tiny", 7)
assert_type(batch, dict[str, np.ndarray])
masked_lm, _ = model.apply(model.params, batch)
print(masked_lm.shape)
"""

# Each is one line that the checker must refuse, and its rule.
MISUSES = {
    "model.fill('We [MASK].').mask": "missing-attribute",
    "model.fill(['We [MASK].']).masks": "missing-attribute",
    "model.embed('We shall.', pooling='middle')": "bad-argument-type",
    "bert_jax.batches('tiny', '7')": "bad-argument-type",
    "bert_jax.embed(model, ['We shall.'], role='text')": "bad-argument-type",
    "bert_jax.export(model, 'out', 'onnx')": "bad-argument-type",
    "bert_jax.train_bert('tiny')": "missing-attribute",
}


def check(script: pathlib.Path) -> subprocess.CompletedProcess:
    """Returns what pyrefly says of a script."""
    if PYREFLY is None:
        pytest.skip("pyrefly is not installed")
    places = ["--python-interpreter-path", sys.executable, "--search-path", str(ROOT)]
    form = ["--preset", "default", "--output-format", "min-text"]
    command = [PYREFLY, "check", str(script), *places, *form]
    return subprocess.run(command, capture_output=True, text=True, cwd=script.parent)


def test_results_have_the_types_that_are_documented(tmp_path):
    script = tmp_path / "uses.py"
    script.write_text(USES)
    result = check(script)
    assert result.returncode == 0, result.stdout + result.stderr


def test_a_misused_result_is_an_error(tmp_path):
    script = tmp_path / "misuses.py"
    script.write_text("\n".join(["import bert_jax", "model = bert_jax.load('run')", *MISUSES, ""]))
    result = check(script)
    errors = [line for line in result.stdout.splitlines() if line.startswith("ERROR")]
    assert result.returncode == 1 and len(errors) == len(MISUSES), result.stdout + result.stderr
    for number, (error, rule) in enumerate(zip(errors, MISUSES.values(), strict=True), start=3):
        assert f"misuses.py:{number}:" in error and f"[{rule}]" in error
