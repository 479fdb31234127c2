"""docs/running_on_tpu.md: its commands are ours, and its sums are right."""

import os
import pathlib
import re
import shlex

import pytest

from bert_jax import cli
from launch import __main__, gke, tpu_vm

GUIDE = pathlib.Path(__file__).parents[2] / "docs" / "running_on_tpu.md"
SET = {"PROJECT": "p", "ZONE": "us-west4-a", "BUCKET": "b", "PRICE": "1.5", "IMAGE": "r/i:1"}


def commands() -> list[str]:
    """Lines of shell that start something of ours."""
    blocks = re.findall(r"^```bash\n(.*?)^```", GUIDE.read_text(), re.MULTILINE | re.DOTALL)
    lines = [line for block in blocks for line in block.splitlines()]
    return [line for line in lines if line.startswith(("bert-jax ", "python -m launch "))]


def test_there_are_commands_to_check():
    assert len(commands()) > 10
    assert {line.split()[3] for line in commands() if line.startswith("python")} == {
        *("tpu_vm", "gke", "status", "logs", "stop")
    }


@pytest.mark.parametrize("line", commands())
def test_a_command_of_the_guide_is_taken(line, monkeypatch, capsys):
    for name, value in SET.items():
        monkeypatch.setenv(name, value)
    words = shlex.split(os.path.expandvars(line))
    assert not any("$" in word for word in words)
    if words[0] == "bert-jax":
        cli.parser().parse_args(words[1:])
    elif (launcher := {"gke": gke, "tpu_vm": tpu_vm}.get(words[3])) is not None:
        assert launcher.main([*words[4:], "--dry-run"]) == 0
        assert "gs://b/wikipedia" in capsys.readouterr().out
    else:
        assert words[3] in __main__.COMMANDS and words[4].startswith("gs://b/")


def test_the_sums_are_right():
    text = GUIDE.read_text()
    products = re.findall(r"\| (\d+) x ([\d.]+) = ([\d,]+) \|", text)
    assert len(products) == 3
    for chips, hours, product in products:
        assert round(int(chips) * float(hours)) == int(product.replace(",", ""))
    (sum_,) = re.findall(r"([\d,]+) x PRICE / ([\d.]+) = ([\d,]+) x PRICE", text)
    hours, goodput, cost = (float(number.replace(",", "")) for number in sum_)
    assert hours in [int(product.replace(",", "")) for _, _, product in products]
    assert round(hours / goodput) == cost
    readme = (GUIDE.parents[1] / "README.md").read_text()
    for row in re.findall(r"\| `(\S+)` \| (\S+) \| ([\d.]+) hours \|", text):
        experiment, slice_name, hours = row
        (told,) = re.findall(rf"\| `{experiment}` \| {slice_name} \|.* ([\d.]+) h \|", readme)
        assert told == hours
