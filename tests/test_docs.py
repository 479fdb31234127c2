"""The pages of the root and of docs/: commands are ours, links lead somewhere, sums are right."""

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
README = ROOT / "README.md"
HOWTO, RESULTS = ROOT / "docs" / "howto", ROOT / "docs" / "results"
DOCS = sorted((ROOT / "docs").rglob("*.md"))
PAGES = [*sorted(ROOT.glob("*.md")), *DOCS]
# Pages whose commands are checked; the changelog also names commands of older versions.
CURRENT = [page for page in PAGES if page.name != "CHANGELOG.md"]
# The most lines of a page; see `most_lines` for the others.
LIMITS = {"README.md": 150, "WORKSPACE.md": 150, "AGENTS.md": 40}
LIMITS |= {"CHANGELOG.md": 200, "CONTRIBUTING.md": 200}
# What the guides have their reader export.
VARIABLES = {"PROJECT": "p", "ZONE": "us-west4-a", "REGION": "us-west4", "BUCKET": "b"}
VARIABLES |= {"PRICE": "1.5", "IMAGE": "r/i:1"}
PLACEHOLDERS = {"N": "7", "H": "1", "KIND": "encoder", "NAME": "local"}
OURS = ("bert-jax", "make", "python -m launch", "python -m benchmarks")
LAUNCH = ("python -m launch", "bert-jax launch")
# How-to guides with the launcher that each of them uses.
GUIDES = {"train-on-gke.md": "gke", "train-on-tpu-vms.md": "tpu_vm"}
GUIDES |= {"use-several-processes.md": "local"}

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


def name_of(page: pathlib.Path) -> str:
    return page.relative_to(ROOT).as_posix()


SHOWN = sorted({(name_of(page), line) for page in CURRENT for line in commands(page)})


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


def launches(page: pathlib.Path, launcher: str) -> list[str]:
    """Returns the commands of a page that start this launcher."""
    starts = tuple(f"{program} {launcher} " for program in LAUNCH)
    return [line for line in commands(page) if line.startswith(starts)]


@pytest.mark.parametrize(("page", "launcher"), GUIDES.items())
def test_a_guide_launches(page, launcher):
    assert launches(HOWTO / page, launcher)


RENTED = [line for page in DOCS for name in ("gke", "tpu_vm") for line in launches(page, name)]


@pytest.mark.parametrize("line", dict.fromkeys(RENTED))
def test_a_launch_of_the_guides_can_be_rendered(line, monkeypatch, capsys):
    for name, value in VARIABLES.items():
        monkeypatch.setenv(name, value)
    monkeypatch.chdir(ROOT)
    words = shlex.split(os.path.expandvars(line))
    launcher = next(number for number, word in enumerate(words) if word in ("gke", "tpu_vm"))
    assert launch.main([*words[launcher:], "--dry-run"]) == 0
    assert words[words.index("--workdir") + 1] in capsys.readouterr().out


@pytest.mark.parametrize("block", [block for page in DOCS for block in blocks(page, "yaml")])
def test_a_manifest_of_the_guides_is_yaml_whose_commands_are_ours(block):
    manifests = list(yaml.safe_load_all(block))
    assert manifests and all(isinstance(one, dict) for one in manifests)
    for line in re.findall(r"bert-jax (?:pretrain|prepare) .*", block):
        words = shlex.split(re.sub(r"\$\{?\w+\}?", "x", line))
        cli.parse(words[1:])


def test_a_script_for_slurm_is_bash_and_starts_a_run_in_each_task():
    pages = [HOWTO / "use-several-processes.md", HOWTO / "train-on-a-gpu.md"]
    scripts = [block for page in pages for block in blocks(page, "bash") if "#SBATCH" in block]
    assert scripts
    for script in scripts:
        assert script.startswith("#!/bin/bash\n#SBATCH --")
        assert re.search(r"^srun (--\S+ )*bert-jax pretrain ", script, re.MULTILINE)
        subprocess.run(["bash", "-n"], input=script, text=True, check=True)


def test_the_sums_of_the_guide_are_right():
    text = (HOWTO / "plan-costs.md").read_text()
    products = re.findall(r"\b(\d+) x ([\d.]+) = ([\d,]+)\b", text)
    assert products
    for chips, hours, product in products:
        assert round(int(chips) * float(hours)) == int(product.replace(",", ""))
    for sum_ in re.findall(r"([\d,]+) x PRICE / ([\d.]+) = ([\d,]+) x PRICE", text):
        hours, goodput, cost = (float(number.replace(",", "")) for number in sum_)
        assert hours in [int(product.replace(",", "")) for _, _, product in products]
        assert round(hours / goodput) == cost
    estimates = (RESULTS / "performance.md").read_text()
    rows = re.findall(r"\| `(\S+)` \| (\S+) \| ([\d.]+) hours \|", text)
    assert rows
    for name, topology, hours in rows:
        (estimated,) = re.findall(rf"\| `{name}` \| {topology} \|.* ([\d.]+) h \|", estimates)
        assert estimated == hours


def links(page: pathlib.Path) -> list[str]:
    """Returns the links of a page that lead to files or headings."""
    prose = re.sub(r"`[^`]*`", "", FENCE.sub("", page.read_text()))
    return [link for link in re.findall(r"\]\(([^)\s]+)\)", prose) if "://" not in link]


def anchors(page: pathlib.Path) -> set[str]:
    """Returns the names that GitHub gives a page's headings."""
    headings = re.findall(r"^#+ (.*)$", FENCE.sub("", page.read_text()), re.MULTILINE)
    headings = [re.sub(r"\[([^]]*)\]\([^)]*\)", r"\1", heading) for heading in headings]
    names = [re.sub(r"[^\w\- ]", "", text.lower()).replace(" ", "-") for text in headings]
    repeated = ((name, names[:i].count(name)) for i, name in enumerate(names))
    return {f"{name}-{count}" if count else name for name, count in repeated}


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_links_lead_somewhere(page):
    for link in links(page):
        file, _, anchor = link.partition("#")
        target = (page.parent / file).resolve() if file else page
        assert target.exists(), link
        assert not anchor or anchor in anchors(target), link


def test_every_page_is_two_clicks_from_the_readme():
    reached = {README}
    for _ in range(2):
        found = {
            (page.parent / link.partition("#")[0]).resolve()
            for page in reached
            for link in links(page)
        }
        reached |= {page for page in found if page.suffix == ".md" and page.exists()}
    assert not [name_of(page) for page in PAGES if page not in reached]


def test_the_index_calls_each_page_by_its_title():
    index = ROOT / "docs" / "index.md"
    entries = re.findall(r"^- \[(.*)\]\((.*\.md)\): .*\.$", index.read_text(), re.MULTILINE)
    titles = {name_of(page): page.read_text().partition("\n")[0] for page in DOCS if page != index}
    assert {f"docs/{file}": f"# {title}" for title, file in entries} == titles


def most_lines(page: pathlib.Path) -> int:
    return LIMITS.get(name_of(page), 120 if page.parent == HOWTO else 200)


def test_pages_stay_short():
    assert not [name for name in LIMITS if not (ROOT / name).exists()]
    pages = [page for page in PAGES if page.parent != RESULTS]
    lengths = {page: len(page.read_text().splitlines()) for page in pages}
    assert not [(name_of(page), n) for page, n in lengths.items() if n > most_lines(page)]


PYTHON = "".join(blocks(HOWTO / "use-from-python.md", "python"))


def test_what_the_page_about_python_imports_is_there():
    for line in PYTHON.splitlines():
        if line.startswith(("import ", "from ")):
            exec(line, {})


@pytest.mark.long
def test_the_examples_of_the_page_about_python_run(tmp_path):
    (tmp_path / "experiments").symlink_to(ROOT / "experiments")
    done = subprocess.run(
        [sys.executable, "-c", PYTHON], cwd=tmp_path, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    assert "step 30, 0.3M parameters" in done.stdout
