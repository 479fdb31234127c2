"""The Dockerfile keeps the rules of an image that strangers may run."""

import pathlib
import re

import dockerfile
import pytest
from dockerfile import Step, steps

ROOT = pathlib.Path(__file__).parents[2]


def faults(text: str) -> list[str]:
    """What is wrong with a Dockerfile."""
    found = steps(text)
    of = {word: [s.text for s in found if s.word == word] for word, _ in found}
    last = max(i for i, step in enumerate(found) if step.word == "FROM")
    tags = [base.split()[0] for base in of["FROM"]]
    wrong = [
        f"{tag}: not pinned" for tag in tags if not re.search(r":\d+\.\d+\.\d+-|@sha256:", tag)
    ]
    wrong += [f"{tag}: latest" for tag in tags if tag.endswith(":latest")]
    if len(of["FROM"]) < 2:
        wrong.append("one stage: what builds it goes along")
    users = [step.text for step in found[last:] if step.word == "USER"]
    if not users or users[-1].split(":")[0] in ("0", "root"):
        wrong.append("runs as root")
    if "ADD" in of:
        wrong.append("ADD: COPY does what it says")
    for run in of.get("RUN", ()):
        for command in run.split("&&"):
            if "pip install" in command and "--no-cache-dir" not in command:
                wrong.append("pip leaves its cache")
            if "pip install" in command and "--constraint" not in command:
                wrong.append("pip chooses the versions")
        if "apt-get" in run and "/var/lib/apt/lists" not in run:
            wrong.append("apt leaves its lists")
        if re.search(r"curl|wget", run):
            wrong.append("fetches what no registry checks")
    if [s.word for s in found if s.word == "ENTRYPOINT"] != ["ENTRYPOINT"]:
        wrong.append("no entry point")
    return wrong


def test_the_image_is_pinned_small_and_not_root_s():
    assert faults(dockerfile.FILE.read_text()) == []


@pytest.mark.parametrize(
    ("line", "becomes", "fault"),
    [
        ("python:3.11.13-slim-bookworm", "python:latest", "latest"),
        ("python:3.11.13-slim-bookworm", "python:3.11", "not pinned"),
        ("USER 1000:1000", "USER root", "root"),
        ("USER 1000:1000", "", "root"),
        ("COPY bert_jax", "ADD bert_jax", "ADD"),
        ("install --no-cache-dir", "install", "cache"),
        (" --constraint constraints.txt", "", "versions"),
        ("RUN groupadd", "RUN apt-get update && groupadd", "lists"),
        ("RUN groupadd", "RUN curl -O http://there && groupadd", "fetches"),
        ("ENTRYPOINT", "CMD", "entry point"),
    ],
)
def test_a_fault_in_the_dockerfile_is_found(line, becomes, fault):
    text = dockerfile.FILE.read_text()
    assert line in text
    assert any(fault in found for found in faults(text.replace(line, becomes)))


def test_the_command_is_bert_jax_and_has_what_it_needs():
    found = steps(dockerfile.FILE.read_text())
    assert Step("ENTRYPOINT", '["bert-jax"]') in found
    assert Step("ARG", "EXTRAS=tpu,gcs") in found
    copied = " ".join(step.text for step in found if step.word == "COPY")
    for name in ("constraints.txt", "pyproject.toml", "setup.cfg", "LICENSE", "experiments"):
        assert name in copied.split()


def test_all_that_is_copied_is_sent_and_nothing_else():
    ignored = (ROOT / ".dockerignore").read_text()
    copies = [s.text for s in steps(dockerfile.FILE.read_text()) if s.word == "COPY"]
    names = {
        name
        for text in copies
        if "--from=" not in text
        for name in text.split()[:-1]
        if not name.startswith("--")
    }
    allowed = {line[1:] for line in ignored.splitlines() if line.startswith("!")}
    assert names == allowed
    assert all((ROOT / name).exists() for name in names)
    assert not dockerfile.sent(".git", ignored) and not dockerfile.sent("runs", ignored)
