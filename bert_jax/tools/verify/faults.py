"""What a start of `bert-jax` is to suffer, done by `python -m bert_jax.tools.verify.child`.

It journals what it did. A line of the journal is one JSON object, written in one call to a file
opened for appending, so that no kill can cut it:

    {"kind": "step", "start": N, "step": S, "rows": [...], "hashes": [...]}
    {"kind": "killed", "start": N, "done": S}
    {"kind": "rolled_back", "start": N, "done": S, "to": S}
    {"kind": "prepared", "start": N, "seconds": T}
"""

import contextlib
import dataclasses
import json
import pathlib
import signal
from typing import Literal

Place = Literal["step", "save", "evaluation", "start", "prepare", "roll_back"]


@dataclasses.dataclass(frozen=True)
class Fault:
    """The place at which a process is killed."""

    # Before a step; once a save has begun; in an evaluation; while a run is being restored; while
    # the corpus is made; between a roll-back and the next save.
    at: Place
    signal: int = signal.SIGKILL  # what it gets
    step: int = 0  # steps done then; if this place is not met, the next of its kind
    # Of a save, files that exist; of an evaluation, batches done; of a start, files of lines that
    # were opened; of a roll-back, steps done again.
    part: int = 0
    after: float = 0.0  # seconds from that place on


@dataclasses.dataclass(frozen=True)
class Plan:
    """The plan of one start of the command: what it does next to its work."""

    fault: Fault | None = None  # how it ends; None: by itself
    journal: str = ""  # the file it appends to; "" for none
    start: int = 0  # its number among the starts that share this journal
    not_finite: tuple[int, ...] = ()  # steps whose loss is made not to be finite

    def to_json(self) -> str:
        """Returns the plan as `from_json` reads it."""
        return json.dumps(dataclasses.asdict(self))

    @classmethod
    def from_json(cls, text: str) -> "Plan":
        """Reads what `to_json` wrote."""
        values = json.loads(text)
        fault = values.pop("fault")
        return cls(**values, fault=Fault(**fault) if fault else None)


def files_below(folder: pathlib.Path) -> int:
    """Counts files while others write and remove some: how far a save is."""
    with contextlib.suppress(OSError):
        return sum(path.is_file() for path in folder.rglob("*"))
    return 0
