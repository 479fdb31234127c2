"""Faults to inject into a start of `bert-jax`; bert_jax.tools.verify.child carries them out.

The child keeps a journal. Each line is a JSON object, written in one call to a file opened for
appending, so that no kill can cut it. N is `Plan.start_number`, S a number of steps done:

    {"kind": "step", "start": N, "step": S, "rows": [...], "hashes": [...]}
    {"kind": "killed", "start": N, "done": S}
    {"kind": "rolled_back", "start": N, "done": S, "to": S}
"""

import contextlib
import dataclasses
import json
import pathlib
import signal
from typing import Literal

Moment = Literal["step", "save", "evaluation", "startup", "prepare", "roll_back"]


@dataclasses.dataclass(frozen=True)
class Fault:
    """When and how a process is killed."""

    # step: before a step; save: once a save has begun; startup: while a run opens its files;
    # evaluation: before an evaluation; prepare: while the corpus is made; roll_back: between a
    # roll-back and the next save.
    at: Moment
    signal: int = signal.SIGKILL  # the signal that kills it
    step: int = 0  # least steps done; only orders the kills at startup, prepare and roll_back
    # At the kill: files that a save has written, files opened at startup, steps repeated.
    progress: int = 0
    after: float = 0.0  # seconds between the moment and the kill


@dataclasses.dataclass(frozen=True)
class Plan:
    """The plan of one start of the command: what the child does besides running it."""

    fault: Fault | None = None  # how the start is killed; None: it is not
    journal: str = ""  # path of the journal to append to; "" for none
    start_number: int = 0  # of this start among those that share the journal
    nonfinite_steps: tuple[int, ...] = ()  # steps whose loss the child makes NaN

    def to_json(self) -> str:
        """Returns the plan as `from_json` reads it."""
        return json.dumps(dataclasses.asdict(self))

    @classmethod
    def from_json(cls, text: str) -> "Plan":
        """Reads the JSON that `to_json` returns."""
        values = json.loads(text)
        fault = values.pop("fault")
        return cls(**values, fault=Fault(**fault) if fault else None)


def files_below(folder: pathlib.Path) -> int:
    """Counts the files below a folder, which a save may be writing; 0 if the folder vanishes."""
    with contextlib.suppress(OSError):
        return sum(path.is_file() for path in folder.rglob("*"))
    return 0
