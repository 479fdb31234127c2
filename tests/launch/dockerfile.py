"""The Dockerfile, read; as a script it does its steps on this machine, without an engine.

    python tests/launch/dockerfile.py FOLDER

A path of the image lies below FOLDER, so nothing needs root. What an engine alone can do (another
system below, users) is left out and named. At the end the image's command is run: `prepare`,
`pretrain` and `plan` of a run of a few steps.
"""

import json
import os
import pathlib
import re
import shlex
import shutil
import subprocess
import sys
from typing import NamedTuple

ROOT = pathlib.Path(__file__).parents[2]
FILE = ROOT / "Dockerfile"
# Only an engine can do these.
ENGINE_ONLY = ("groupadd", "useradd")

SHRUNK = (
    *("--set", "phases.0.steps=5"),
    *("--set", "optimizer.warmup_steps=1", "--set", "data.eval_rows=8"),
    *("--set", "model.vocab_size=1000", "--set", "phases.0.batch_size=8"),
    *("--set", "run.eval_batch_size=8"),
)


class Step(NamedTuple):
    """An instruction.

    Attributes:
      word: RUN, COPY and so on.
      text: what stands behind it, on one line.
    """

    word: str
    text: str


def steps(text: str) -> list[Step]:
    """The instructions of a Dockerfile, without comments."""
    lines = [line for line in text.splitlines() if not line.lstrip().startswith("#")]
    joined = re.sub(r"\\\n", " ", "\n".join(lines))
    split = [line.strip().split(None, 1) for line in joined.splitlines() if line.strip()]
    return [Step(word.upper(), re.sub(r"\s+", " ", rest)) for word, rest in split]


def sent(name: str, ignored: str) -> bool:
    """Whether a file of the context reaches the engine: all is ignored but what is named."""
    rules = [line for line in ignored.splitlines() if line and not line.startswith("#")]
    assert rules[0] == "*", "everything is ignored first"
    return f"!{pathlib.PurePosixPath(name).parts[0]}" in rules


class Machine:
    """What the steps are done on.

    Attributes:
      folder: stands for the image's /.
      here: the folder that the steps are in, as the image has it.
      environment: of the steps, and of the command.
      arguments: build arguments, with their defaults.
      command: the entry point's words.
    """

    def __init__(self, folder: pathlib.Path):
        self.folder, self.here = folder, "/"
        self.environment: dict[str, str] = {}
        self.arguments: dict[str, str] = {}
        self.command: list[str] = []

    def place(self, path: str) -> pathlib.Path:
        """Where a path of the image lies on this machine."""
        return self.folder / os.path.join(self.here, path).lstrip("/")

    def do(self, step: Step) -> None:
        """Does a step, or says that it cannot."""
        print(f"== {step.word} {step.text}", flush=True)
        getattr(self, f"_{step.word.lower()}", self._nothing)(step.text)

    def _nothing(self, text: str) -> None:
        """For an engine."""

    def _from(self, text: str) -> None:
        self.arguments, self.environment, self.here = {}, {}, "/"

    def _arg(self, text: str) -> None:
        name, _, value = text.partition("=")
        self.arguments[name] = value

    def _env(self, text: str) -> None:
        for word in shlex.split(text):
            name, _, value = word.partition("=")
            self.environment[name] = value.replace("$PATH", os.environ["PATH"])

    def _workdir(self, text: str) -> None:
        self.here = text
        self.place(".").mkdir(parents=True, exist_ok=True)

    def _copy(self, text: str) -> None:
        words = [word for word in text.split() if not word.startswith("--chown")]
        if words[0].startswith("--from="):  # the stages share a folder
            assert self.place(words[1]).exists()
            return
        *names, target = words
        for name in names:
            assert sent(name, (ROOT / ".dockerignore").read_text()), f"{name}: never sent"
            into = self.place(target)
            if (ROOT / name).is_dir():
                dull = shutil.ignore_patterns("__pycache__")
                shutil.copytree(ROOT / name, into, ignore=dull, dirs_exist_ok=True)
            else:
                shutil.copy(ROOT / name, into)

    def _run(self, text: str) -> None:
        if text.startswith(ENGINE_ONLY):
            print("   left out: no engine")
            return
        # Paths of the image that these commands name.
        moved = re.sub(r"(?<![\w.)/])/(?=(wheels|opt|source)\b)", f"{self.folder}/", text)
        self._start(["sh", "-ec", moved], self.arguments)

    def _entrypoint(self, text: str) -> None:
        self.command = json.loads(text)

    def run(self, *args: str) -> None:
        """The image's command."""
        print("$", shlex.join([*self.command, *args]), flush=True)
        self._start([*self.command, *args], {})

    def _start(self, command: list[str], more: dict[str, str]) -> None:
        home = self.place("/home/bert")
        home.mkdir(parents=True, exist_ok=True)
        path = self.environment.get("PATH", os.environ["PATH"])
        path = path.replace("/opt/bert_jax", f"{self.folder}/opt/bert_jax")
        kept = {k: v for k, v in os.environ.items() if k.startswith("PIP_") or k == "LANG"}
        environment = kept | more | self.environment | {"PATH": path, "HOME": str(home)}
        subprocess.run(command, cwd=self.place("."), env=environment, check=True)


def main(folder: str) -> None:
    """Does all steps in an empty folder, and tries the command."""
    machine = Machine(pathlib.Path(folder).resolve())
    machine.folder.mkdir(parents=True)
    for step in steps(FILE.read_text()):
        machine.do(step)
    machine.run("--version")
    machine.environment["JAX_PLATFORMS"] = "cpu"
    tiny = ("experiments/tiny.py", *SHRUNK)
    machine.run("prepare", *tiny)
    machine.run("pretrain", *tiny)
    machine.run("plan", *tiny, "--topology", "v5e:1x1")
    print("image: every step done, and prepare, pretrain and plan run")


if __name__ == "__main__":
    main(sys.argv[1])
