"""What a victim is told: where it is to die, and where it notes what it did."""

import contextlib
import dataclasses
import json
import pathlib
import signal
from typing import Literal

Place = Literal["step", "save", "evaluation", "start", "prepare", "roll_back"]


@dataclasses.dataclass(frozen=True)
class Death:
    """Where a process dies.

    Attributes:
      at: before a step; once a save has begun; in an evaluation; while a run is being taken up;
        while the corpus is made; between a roll-back and the next save.
      signal: what it gets.
      step: steps done then; if this place is not met, at the next of its kind.
      part: of a save, files that stand there; of an evaluation, batches done; of a start, files of
        lines that were opened; of a roll-back, steps done again.
      after: seconds from that place on.
      process: of several, which one.
    """

    at: Place
    signal: int = signal.SIGKILL
    step: int = 0
    part: int = 0
    after: float = 0.0
    process: int = 0


@dataclasses.dataclass(frozen=True)
class Order:
    """What one start of the command is told.

    Attributes:
      death: how it ends; None: by itself.
      notes: the file it appends its notes to; "" for none.
      start: its number among the starts that share these notes.
      processes: how many are started, on this machine, to be one run.
      not_finite: steps whose loss is made not to be.
    """

    death: Death | None = None
    notes: str = ""
    start: int = 0
    processes: int = 1
    not_finite: tuple[int, ...] = ()

    def to_json(self) -> str:
        """As `from_json` reads it."""
        return json.dumps(dataclasses.asdict(self))

    @classmethod
    def from_json(cls, text: str) -> "Order":
        """Reads what `to_json` wrote; what is left out is as it is by default."""
        values = json.loads(text)
        death = values.pop("death", None)
        return cls(**values, death=Death(**death) if death else None)


def files_below(folder: pathlib.Path) -> int:
    """How many files stand there, while others write and remove some: how far a save is."""
    with contextlib.suppress(OSError):
        return sum(path.is_file() for path in folder.rglob("*"))
    return 0
