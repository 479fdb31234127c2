"""README.md, WORKSPACE.md and docs/: commands are ours, links lead somewhere, sums are right."""

import os
import pathlib
import re
import shlex
import subprocess
import sys

import pytest
import yaml

from bert_jax import cli, config
from launch import __main__ as launch

ROOT = pathlib.Path(__file__).parents[1]
DOCS = sorted((ROOT / "docs").glob("*.md"))
USERS = [ROOT / "README.md", *DOCS]
PAGES = [*USERS, ROOT / "WORKSPACE.md"]
GUIDE = ROOT / "docs" / "pods.md"
# What the guide has its reader export.
VARIABLES = {"PROJECT": "p", "ZONE": "us-west4-a", "REGION": "us-west4", "BUCKET": "b"}
VARIABLES |= {"PRICE": "1.5", "IMAGE": "r/i:1"}
PLACEHOLDERS = {"N": "7", "H": "1", "KIND": "encoder", "NAME": "local"}
OURS = ("bert-jax", "make", "python -m launch", "python -m benchmarks")

FENCE = re.compile(r"^```([^\n]*)\n(.*?)^```", re.MULTILINE | re.DOTALL)


def blocks(page: pathlib.Path, language: str = "") -> list[str]:
    """Returns what is fenced as this language; all that is fenced if none is named."""
    return [text for word, text in FENCE.findall(page.read_text()) if language in ("", word)]


def commands(page: pathlib.Path) -> list[str]:
    """Returns the commands of ours that a page shows, in blocks and within sentences."""
    lines = []
    for block in blocks(page):
        block = re.sub(r"\\\n\s*", "", block)
        prompted = [line[2:] for line in block.splitlines() if line.startswith("$ ")]
        lines += prompted or block.splitlines()
    prose = " ".join(FENCE.sub("", page.read_text()).split())
    lines += [span for span in re.findall(r"`([^`]+)`", prose) if " " in span]
    parts = [part.strip() for line in lines for part in re.split(r" && |\| ", line)]
    parts = [re.sub(r"^srun (--\S+ )*", "", part) for part in parts]
    return [part for part in parts if part.startswith(tuple(f"{word} " for word in OURS))]


SHOWN = sorted({(page.name, line) for page in USERS for line in commands(page)})


@pytest.mark.parametrize(("page", "line"), SHOWN)
def test_a_command_that_is_shown_is_taken(page, line, monkeypatch):
    for name, value in VARIABLES.items():
        monkeypatch.setenv(name, value)
    monkeypatch.chdir(ROOT)
    words = shlex.split(os.path.expandvars(line), comments=True)
    words = [PLACEHOLDERS.get(word, word) for word in words]
    assert not any("$" in word for word in words)
    for word in words:
        assert not re.fullmatch(r"experiments/.*\.py", word) or (ROOT / word).exists(), word
    if words[0] == "bert-jax" and len(words) == 2:
        assert words[1] in cli.COMMANDS  # the name of a command
    elif words[0] == "bert-jax":
        args = cli.parse(words[1:])
        if words[-1].endswith(".py") or "--set" in words:
            kind = config.Finetuning if words[1] == "finetune" else config.Experiment
            file = getattr(args, "experiment", None) or getattr(args, "taskfile", None)
            if file and (ROOT / file).exists():
                config.load_with_origin(file, args.set, kind)
    elif words[0] == "make":
        target = next(word for word in words[1:] if "=" not in word)
        assert re.search(rf"^{target}:", (ROOT / "Makefile").read_text(), re.MULTILINE)
    elif words[2].startswith("benchmarks."):
        assert (ROOT / (words[2].replace(".", "/") + ".py")).exists()
    else:
        launch._make_parser().parse_args(words[3 : words.index("--") if "--" in words else None])


def launches(*launchers: str) -> list[str]:
    """Returns the commands of these launchers in the pages' scripts."""
    scripts = [block for page in DOCS for block in blocks(page, "bash")]
    starts = tuple(f"python -m launch {name} " for name in launchers)
    return [line for block in scripts for line in block.splitlines() if line.startswith(starts)]


def test_the_guide_launches_in_every_way():
    assert launches("tpu_vm") and launches("gke")


@pytest.mark.parametrize("line", dict.fromkeys(launches("tpu_vm", "gke")))
def test_a_launch_of_the_guides_can_be_rendered(line, monkeypatch, capsys):
    for name, value in VARIABLES.items():
        monkeypatch.setenv(name, value)
    monkeypatch.chdir(ROOT)
    words = shlex.split(os.path.expandvars(line))
    assert launch.main([*words[3:], "--dry-run"]) == 0
    assert "gs://b/wikipedia" in capsys.readouterr().out


@pytest.mark.parametrize("block", [block for page in DOCS for block in blocks(page, "yaml")])
def test_a_manifest_of_the_guides_is_yaml_whose_commands_are_ours(block):
    manifests = list(yaml.safe_load_all(block))
    assert manifests and all(isinstance(one, dict) for one in manifests)
    for line in re.findall(r"bert-jax (?:pretrain|prepare) .*", block):
        words = shlex.split(re.sub(r"\$\{?\w+\}?", "x", line))
        cli.parse(words[1:])


def test_a_script_for_slurm_is_bash_and_starts_a_run_in_each_task():
    scripts = [block for page in DOCS for block in blocks(page, "bash") if "#SBATCH" in block]
    assert scripts
    for script in scripts:
        assert script.startswith("#!/bin/bash\n#SBATCH --")
        assert re.search(r"^srun (--\S+ )*bert-jax pretrain ", script, re.MULTILINE)
        subprocess.run(["bash", "-n"], input=script, text=True, check=True)


def test_the_sums_of_the_guide_are_right():
    text = GUIDE.read_text()
    products = re.findall(r"\| (\d+) x ([\d.]+) = ([\d,]+) \|", text)
    assert len(products) == 3
    for chips, hours, product in products:
        assert round(int(chips) * float(hours)) == int(product.replace(",", ""))
    (sum_,) = re.findall(r"([\d,]+) x PRICE / ([\d.]+) = ([\d,]+) x PRICE", text)
    hours, goodput, cost = (float(number.replace(",", "")) for number in sum_)
    assert hours in [int(product.replace(",", "")) for _, _, product in products]
    assert round(hours / goodput) == cost
    estimates = (ROOT / "docs" / "performance.md").read_text()
    for name, topology, hours in re.findall(r"\| `(\S+)` \| (\S+) \| ([\d.]+) hours \|", text):
        (estimated,) = re.findall(rf"\| `{name}` \| {topology} \|.* ([\d.]+) h \|", estimates)
        assert estimated == hours


def anchors(page: pathlib.Path) -> set[str]:
    """Returns the names that GitHub gives a page's headings."""
    headings = re.findall(r"^#+ (.*)$", FENCE.sub("", page.read_text()), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", text.lower()).replace(" ", "-") for text in headings}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_lead_somewhere(page):
    links = re.findall(r"\]\(([^)\s]+)\)", FENCE.sub("", page.read_text()))
    for link in links:
        if "://" in link:
            continue
        file, _, anchor = link.partition("#")
        target = (page.parent / file).resolve() if file else page
        assert target.exists(), link
        assert not anchor or anchor in anchors(target), link


def test_every_page_is_linked_from_the_readme():
    readme = USERS[0].read_text()
    assert not [page.name for page in DOCS if f"](docs/{page.name})" not in readme]


@pytest.mark.parametrize(("page", "lines"), [("README.md", 250), ("WORKSPACE.md", 210)])
def test_a_page_stays_short(page, lines):
    assert len((ROOT / page).read_text().splitlines()) <= lines


def test_what_python_md_imports_is_there():
    for line in "".join(blocks(ROOT / "docs" / "python.md", "python")).splitlines():
        if line.startswith(("import ", "from ")):
            exec(line, {})


@pytest.mark.long
def test_the_examples_of_python_md_run(tmp_path):
    code = "".join(blocks(ROOT / "docs" / "python.md", "python"))
    (tmp_path / "experiments").symlink_to(ROOT / "experiments")
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    assert "step 30, 0.3M parameters" in done.stdout
