"""The Dockerfile keeps the rules of an image that strangers may run."""

import pathlib
import re
from typing import NamedTuple

ROOT = pathlib.Path(__file__).parents[2]
FILE = ROOT / "Dockerfile"


class Step(NamedTuple):
    """An instruction."""

    word: str  # RUN, COPY and so on
    text: str  # what stands behind it, on one line


def steps(text: str) -> list[Step]:
    """The instructions of a Dockerfile, without comments."""
    lines = [line for line in text.splitlines() if not line.lstrip().startswith("#")]
    joined = re.sub(r"\\\n", " ", "\n".join(lines))
    split = [line.strip().split(None, 1) for line in joined.splitlines() if line.strip()]
    return [Step(word.upper(), re.sub(r"\s+", " ", rest)) for word, rest in split]


def test_the_command_is_bert_jax_and_has_what_it_needs():
    instructions = steps(FILE.read_text())
    assert Step("ENTRYPOINT", '["bert-jax"]') in instructions
    assert Step("ARG", "EXTRAS=tpu,gcs") in instructions
    copied = " ".join(step.text for step in instructions if step.word == "COPY")
    for name in ("constraints.txt", "pyproject.toml", "setup.cfg", "LICENSE", "experiments"):
        assert name in copied.split()


def test_all_that_is_copied_is_sent_and_nothing_else():
    ignored = (ROOT / ".dockerignore").read_text().splitlines()
    rules = [line for line in ignored if line and not line.startswith("#")]
    assert rules[0] == "*", "everything is ignored first"
    copies = [s.text for s in steps(FILE.read_text()) if s.word == "COPY"]
    names = {
        name
        for text in copies
        if "--from=" not in text
        for name in text.split()[:-1]
        if not name.startswith("--")
    }
    assert names == {line[1:] for line in rules if line.startswith("!")}
    assert all((ROOT / name).exists() for name in names)
