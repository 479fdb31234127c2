"""Writing a report, once or for as long as a run goes on."""

import contextlib
import os
import pathlib
import time
from collections.abc import Callable, Sequence
from typing import Literal

from etils import epath

from bert_jax.errors import InputError
from bert_jax.report import page, times
from bert_jax.report.events import Events
from bert_jax.report.records import Record
from bert_jax.storage import mirror


def write(
    workdirs: Sequence[str],
    out: str | None,
    every: int | None,
    what: Literal["page", "events"],
    say: Callable[[str], None],
    price_per_chip_hour: float | None = None,
) -> None:
    """Writes the page of a run, or one that compares several.

    Args:
      workdirs: of the runs.
      out: where the page goes; None: into the workdir, or beside where several are compared.
      every: seconds after which it is written again while one of the runs goes on; None: once.
      what: `events` writes TensorBoard event files into each workdir, too.
      say: is told where the page is, and at the end what came of the time.
      price_per_chip_hour: in any currency; None: costs are left out.

    Raises:
      InputError: no run there, a damaged file, or a page that cannot be written.
    """
    records = _read(workdirs)
    path = _place(records, out)
    with contextlib.ExitStack() as stack:
        events = []
        if what == "events":
            events = [stack.enter_context(contextlib.closing(Events(r))) for r in records]
        told = False
        while True:
            going_on = every is not None and any(r.state == "running" for r in records)
            refresh = every if going_on else None
            mirror.write(path, page.render(records, refresh, price_per_chip_hour))
            if not told:
                say(f"report: {path}")
                told = True
            if not going_on:
                break
            try:
                time.sleep(every)
            except KeyboardInterrupt:
                # One that does not renew itself.
                mirror.write(path, page.render(records, None, price_per_chip_hour))
                raise
            records = _read(workdirs)
            for record, files in zip(records, events, strict=False):
                files.add(record)
    for record in records:
        which = f"{record.label}: " if len(records) > 1 else ""
        say(which + times.goodput(record.timings).tell(price_per_chip_hour))


def _read(workdirs: Sequence[str]) -> list[Record]:
    records = [Record.read(root) for root in workdirs]
    labels = [record.label for record in records]
    if len(set(labels)) < len(labels):
        for record in records:
            record.label = str(record.workdir.named)
    return records


def _place(records: list[Record], out: str | None) -> epath.Path:
    if out is not None:
        path = epath.Path(os.path.realpath(out))
        if path.exists() and not os.path.isfile(path):
            raise InputError(f"--out {out}: is no file; name one")
        if not path.parent.exists():
            raise InputError(f"--out {out}: no folder {path.parent}")
        return path
    if len(records) > 1:
        return epath.Path(pathlib.Path("comparison.html"))
    return records[0].workdir.named / "report.html"
