"""Where a run was launched, written down; and what can be asked of any such place.

`W/launch.json` is all that `launch status`, `logs` and `stop` need. Each place is a module of this
package that is named as the command is, and has a function `target(record)`.
"""

import dataclasses
import importlib
import json
from collections.abc import Mapping
from typing import Any, Literal, Protocol

from etils import epath

from bert_jax.errors import InputError
from bert_jax.storage import mirror
from bert_jax.storage.workdir import parse_json, sealed

FORMAT_VERSION = 1
FILE = "launch.json"

Place = Literal["tpu_vm", "gke"]
# What each needs to know of its place.
_PLACES = {"tpu_vm": {"zone", "project"}, "gke": {"context", "namespace"}}

_PRICES = (float, int, type(None))

_REMEDY = "remove it, and launch the run again"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Record:
    """Where a run was launched.

    Attributes:
      target: the command that did.
      name: of what was rented.
      place: what that command needs beside the name to find it: project, zone, namespace.
      workdir: of the run.
      topology: the slice, v5e:8x8.
      hosts: processes.
      config_sha256: of the resolved experiment.
      commit: of the code that was shipped; "" for an image that was built elsewhere.
      time: of the launch, seconds since 1970.
      price_per_chip_hour: what it was said to cost; None: nothing was said.
      stopped: somebody asked for its end, so that whoever launched it starts it no more.
    """

    target: Place
    name: str
    place: Mapping[str, str]
    workdir: str
    topology: str
    hosts: int
    config_sha256: str
    commit: str
    time: float
    price_per_chip_hour: float | None
    stopped: bool = False

    def rents_the_same(self, other: "Record") -> bool:
        """Whether both tell of the same machines, whatever runs there."""
        return (self.target, self.name, self.place) == (other.target, other.name, other.place)

    def write(self, folder: str | None = None) -> None:
        """Writes launch.json.

        Args:
          folder: where; None: in the workdir.

        Raises:
          InputError: it cannot be written.
        """
        path = epath.Path(folder or self.workdir) / FILE
        record = {"format_version": FORMAT_VERSION, **dataclasses.asdict(self)}
        mirror.write(path, json.dumps(sealed(record), indent=2) + "\n")


@dataclasses.dataclass(frozen=True, kw_only=True)
class State:
    """How what was rented stands.

    Attributes:
      word: "waiting" for machines; "running"; "ended" by itself, and still there; "gone": nothing
        is rented any more.
      detail: what the place says of it, one line.
    """

    word: Literal["waiting", "running", "ended", "gone"]
    detail: str


class Target(Protocol):
    """A launched run, where it was launched."""

    def state(self) -> State:
        """How it stands now."""

    def logs(self, host: int, follow: bool) -> int:
        """Prints what the process of a host said; returns an exit code.

        Args:
          host: from 0.
          follow: whether to go on until it has ended.
        """

    def stop(self, seconds: float) -> int:
        """Has the processes save and end, and gives back what is rented; returns an exit code.

        Args:
          seconds: to wait for the save.
        """


def find(folder: str) -> Record | None:
    """What `Record.write` wrote in a workdir; None if nothing was launched with it.

    Raises:
      InputError: the record is damaged, or cannot be read.
    """
    path = epath.Path(folder) / FILE
    if not mirror.exists(path):
        return None
    mend = "use the bert-jax that wrote it"
    found = parse_json(mirror.read(path), path, FORMAT_VERSION, mend, _REMEDY)
    try:
        return _parse(found)
    except (KeyError, TypeError, ValueError) as error:
        raise InputError(f"{path}: damaged; {_REMEDY}") from error


def read(folder: str) -> Record:
    """As `find`; raises InputError, too, if nothing was launched."""
    record = find(folder)
    if record is None:
        raise InputError(f"{folder}: nothing was launched here (no {FILE})")
    return record


def require_no_other(mine: Record) -> None:
    """Looks at what the workdir's record tells of, before another is written over it.

    Raises:
      InputError: that is something else than `mine`, and still there, or may be: nothing would
        tell of it.
    """
    before = find(mine.workdir)
    if before is None or before.rents_the_same(mine):
        return
    try:
        state = of(before).state()
    except InputError as error:
        raise InputError(
            f"{before.name}: was launched for this workdir, and may still be there: {error}"
        ) from error
    if state.word != "gone":
        raise InputError(
            f"{before.name}: is still there for this workdir ({state.detail}); `python -m launch "
            f"stop {mine.workdir}` first"
        )


def mark_stopped(record: Record) -> None:
    """Has whoever launched it start it no more.

    Raises:
      InputError: the workdir's record cannot be read or written.
    """
    newest = find(record.workdir)
    if newest is None or newest.rents_the_same(record):
        dataclasses.replace(newest or record, stopped=True).write()


def _parse(found: dict[str, Any]) -> Record:
    record = Record(**{f.name: found[f.name] for f in dataclasses.fields(Record)})
    texts = [record.name, record.workdir, record.topology, record.config_sha256, record.commit]
    if record.target not in _PLACES or type(record.place) is not dict:
        raise ValueError
    texts += record.place.values()
    if not all(isinstance(text, str) for text in texts):
        raise ValueError
    if record.place.keys() != _PLACES[record.target]:
        raise ValueError
    if type(record.stopped) is not bool or type(record.price_per_chip_hour) not in _PRICES:
        raise ValueError
    if type(record.hosts) is not int or not isinstance(record.time, int | float):
        raise ValueError
    return record


def of(record: Record) -> Target:
    """The run that a record tells of."""
    return importlib.import_module(f"launch.{record.target}").target(record)
