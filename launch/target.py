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

from bert_jax.config import InputError
from bert_jax.workdir import made, named_errors, read_json, sealed, write_atomic

FORMAT_VERSION = 1
FILE = "launch.json"

Place = Literal["tpu_vm", "gke"]
_PLACES = ("tpu_vm", "gke")

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

    def write(self) -> None:
        """Writes W/launch.json.

        Raises:
          InputError: it cannot be written.
        """
        path = epath.Path(self.workdir) / FILE
        record = {"format_version": FORMAT_VERSION, **dataclasses.asdict(self)}
        with made(path.parent):
            write_atomic(path, json.dumps(sealed(record), indent=2) + "\n")


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


def read(workdir: str) -> Record:
    """What `Record.write` wrote.

    Raises:
      InputError: nothing was launched with this workdir, or its record is damaged.
    """
    path = epath.Path(workdir) / FILE
    with named_errors(path):
        if not path.exists():
            raise InputError(f"{workdir}: nothing was launched here (no {FILE})")
        found = read_json(path, FORMAT_VERSION, restore=_REMEDY)
    try:
        return _parse(found)
    except (KeyError, TypeError, ValueError) as error:
        raise InputError(f"{path}: damaged; {_REMEDY}") from error


def _parse(found: dict[str, Any]) -> Record:
    record = Record(**{f.name: found[f.name] for f in dataclasses.fields(Record)})
    texts = [record.name, record.workdir, record.topology, record.config_sha256, record.commit]
    texts += [*record.place, *record.place.values()]
    if record.target not in _PLACES or not all(isinstance(text, str) for text in texts):
        raise ValueError
    if type(record.hosts) is not int or not isinstance(record.time, float):
        raise ValueError
    return record


def of(record: Record) -> Target:
    """The run that a record tells of."""
    return importlib.import_module(f"launch.{record.target}").target(record)
