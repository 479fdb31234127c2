"""The tutorial runs as it stands: the shell blocks of the page, and the cells of the notebook."""

import os
import pathlib
import re
import subprocess
import sys

import pytest

from bert_jax import config

ROOT = pathlib.Path(__file__).parents[1]
PAGE, NOTEBOOK = ROOT / "docs" / "tutorial.md", ROOT / "docs" / "tutorial.ipynb"
# What the reader has done before: the checkout and its environment.
BEFORE = ("git clone", "cd ", "make", "source ")


def read_commands(text: str) -> tuple[list[str], list[str]]:
    """Returns the commands of a page's shell blocks, and the lines of output to be compared.

    A block with prompts has commands and their output. In a block without a language, all lines are
    output if there is no prompt. Lines with numbers depend on the machine and are not compared.
    """
    shown, output = [], []
    for language, block in re.findall(r"^```(bash|)\n(.*?)^```", text, re.MULTILINE | re.DOTALL):
        prompted = re.findall(r"^\$ ((?:.*\\\n)*.*)$", block, re.MULTILINE)
        shown += [block] if language else prompted
        rest = re.sub(r"^\$ (?:.*\\\n)*.*$", "", block, flags=re.MULTILINE)
        output += [] if language else rest.splitlines()
    commands = [command.strip() for command in shown if not command.startswith(BEFORE)]
    return commands, [line for line in output if line.strip("$ .") and not re.search(r"\d", line)]


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """A folder that has the experiments, with this environment's programs on the path."""
    (tmp_path / "experiments").symlink_to(ROOT / "experiments")
    monkeypatch.setenv("PATH", f"{pathlib.Path(sys.executable).parent}:{os.environ['PATH']}")
    return tmp_path


def test_commands_and_output_are_told_apart():
    page = "```\n$ make\n$ bert-jax a \\\n    b\nloss 2.5\nreport: r\n...\n```\n```\nend\n```\n"
    assert read_commands(page) == (["bert-jax a \\\n    b"], ["report: r", "end"])
    assert read_commands("```bash\nfoo\nbar\n```\n```python\nx\n```\n") == (["foo\nbar"], [])


def test_the_flags_for_a_first_look_fit_the_experiment():
    flags = re.search(r"`((?:--set \S+ ?)+)`", PAGE.read_text())[1]
    settings = flags.replace("--set ", "").split()
    experiment = config.override(config.load(str(ROOT / "experiments" / "tiny.py")), settings)
    assert f"train {experiment.total_steps} steps" in PAGE.read_text()


@pytest.mark.nightly
def test_the_commands_of_the_tutorial_run(folder):
    commands, expected = read_commands(PAGE.read_text())
    assert commands
    output = ""
    for command in commands:
        # Fewer steps of pre-training, so that the test takes a minute.
        fewer = "experiments/tiny.py --set phases.0.steps=60 --set optimizer.warmup_steps=6"
        command = command.replace("experiments/tiny.py", fewer)
        script = ["bash", "-euo", "pipefail", "-c", command]
        done = subprocess.run(script, cwd=folder, capture_output=True, text=True, check=False)
        output += done.stdout + done.stderr
        assert done.returncode == 0, f"{command}\n{done.stderr}"
    assert not [line for line in expected if line not in output.splitlines()]


@pytest.mark.nightly
def test_the_cells_of_the_notebook_run(folder):
    nbformat = pytest.importorskip("nbformat", reason="nbclient is missing: make test-nightly")
    nbclient = pytest.importorskip("nbclient", reason="nbclient is missing: make test-nightly")
    pytest.importorskip("ipykernel", reason="ipykernel is missing: make test-nightly")
    notebook = nbformat.read(NOTEBOOK, as_version=4)
    resources = {"metadata": {"path": str(folder)}}
    nbclient.NotebookClient(notebook, timeout=1800, resources=resources).execute()
