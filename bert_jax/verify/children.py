"""Starting the command as a victim, in a process of its own."""

import dataclasses
import os
import pathlib
import signal
import subprocess
import sys
import time
from collections.abc import Sequence

from bert_jax.verify.orders import Order

_TAIL = 5
_DEVICES = "--xla_force_host_platform_device_count="

HUNG = "hung"

# What is started; a test of what a broken one would show puts another here.
VICTIM = "bert_jax.verify.victim"


@dataclasses.dataclass(frozen=True)
class Ended:
    """How a start ended.

    Attributes:
      code: its exit code; minus a signal's number; HUNG if it was ended for taking too long.
      seconds: that it took.
      tail: its last lines.
    """

    code: int | str
    seconds: float
    tail: tuple[str, ...]


@dataclasses.dataclass
class Children:
    """Starts `bert-jax COMMAND EXPERIMENT --workdir W`, one after the other.

    Attributes:
      experiment: a resolved config.
      patience: seconds after which a start has hung; None: it may take as long as it likes.
    """

    experiment: pathlib.Path
    patience: float | None = None

    def run(
        self,
        command: str,
        workdir: pathlib.Path,
        order: Order,
        settings: Sequence[str] = (),
        devices: int | None = None,
    ) -> Ended:
        """Runs it to its end; what it says goes to W.log.

        Args:
          command: `pretrain` or `prepare`.
          workdir: W.
          order: what becomes of it.
          settings: `--set` strings.
          devices: virtual devices on the CPU; None: as the environment has it.
        """
        words = [command, str(self.experiment), "--workdir", str(workdir)]
        words += [word for setting in settings for word in ("--set", setting)]
        log = workdir.with_name(workdir.name + ".log")
        begun = time.monotonic()
        with log.open("ab") as out:
            here = out.tell()
            process = subprocess.Popen(
                [sys.executable, "-m", VICTIM, order.to_json(), *words],
                env=os.environ | _environment(devices),
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=subprocess.STDOUT,
                start_new_session=True,  # else Ctrl-C would reach it, too, and it would save
            )
            code: int | str
            try:
                code = process.wait(self.patience)
            except subprocess.TimeoutExpired:
                code = HUNG
            finally:
                if process.returncode is None:
                    os.killpg(process.pid, signal.SIGKILL)
                    process.wait()
        with log.open("rb") as said:
            said.seek(here)
            lines = said.read().decode(errors="replace").splitlines()
        return Ended(code, time.monotonic() - begun, tuple(lines[-_TAIL:]))


def _environment(devices: int | None) -> dict[str, str]:
    """What is put over this process's."""
    settings = {"PYTHONUNBUFFERED": "1"}
    if devices is None:
        return settings
    flags = [f for f in os.environ.get("XLA_FLAGS", "").split() if not f.startswith(_DEVICES)]
    return settings | {"XLA_FLAGS": " ".join([*flags, f"{_DEVICES}{devices}"])}
