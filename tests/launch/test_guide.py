"""The guides: their commands are ours, and their sums are right."""

import os
import pathlib
import re
import shlex

import pytest
import yaml

from bert_jax import cli
from launch import __main__

DOCS = pathlib.Path(__file__).parents[2] / "docs"
GUIDE = DOCS / "running_on_tpu.md"
SET = {"PROJECT": "p", "ZONE": "us-west4-a", "BUCKET": "b", "PRICE": "1.5", "IMAGE": "r/i:1"}


def blocks(language: str) -> list[str]:
    """The guides' blocks of a language."""
    texts = [guide.read_text() for guide in (GUIDE, DOCS / "launch.md") if guide.exists()]
    pattern = re.compile(rf"^```{language}\n(.*?)^```", re.MULTILINE | re.DOTALL)
    return [block for text in texts for block in pattern.findall(text)]


def commands() -> list[str]:
    """Lines of shell that start something of ours."""
    lines = [line for block in blocks("bash") for line in block.splitlines()]
    ours = ("bert-jax ", "python -m launch ")
    return list(dict.fromkeys(line for line in lines if line.startswith(ours)))


def test_there_are_commands_to_check():
    assert len(commands()) > 10
    assert {line.split()[3] for line in commands() if line.startswith("python")} >= {
        *("tpu_vm", "gke", "status", "logs", "stop")
    }


@pytest.mark.parametrize("line", commands())
def test_a_command_of_a_guide_is_taken(line, monkeypatch, capsys):
    for name, value in SET.items():
        monkeypatch.setenv(name, value)
    words = shlex.split(os.path.expandvars(line))
    assert not any("$" in word for word in words)
    if words[0] == "bert-jax":
        cli.parser().parse_args(words[1:])
    elif words[3] in ("gke", "tpu_vm"):
        assert __main__.main([*words[3:], "--dry-run"]) == 0
        assert "gs://b/wikipedia" in capsys.readouterr().out
    else:
        __main__._parser().parse_args(words[3 : words.index("--") if "--" in words else None])


@pytest.mark.parametrize("block", blocks("yaml"))
def test_a_manifest_of_a_guide_is_yaml_whose_commands_are_ours(block):
    objects = list(yaml.safe_load_all(block))
    assert objects and all(isinstance(one, dict) for one in objects)
    for line in re.findall(r"bert-jax (?:pretrain|prepare) .*", block):
        words = shlex.split(re.sub(r"\$\{?\w+\}?", "x", line))
        cli.parser().parse_args(words[1:])


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
        (stated,) = re.findall(rf"\| `{experiment}` \| {slice_name} \|.* ([\d.]+) h \|", readme)
        assert stated == hours
