"""A run's lines as TensorBoard event files, for those who use it."""

from etils import epath

from bert_jax.errors import InputError
from bert_jax.report.records import Line, Record
from bert_jax.storage.workdir import named_errors

# Neither is a curve.
_NOT_SCALARS = ("step", "kind", "time")


class Events:
    """Writes `W/tensorboard/{train,evaluation,probes,timings}`, anew when opened, then adds.

    Raises:
      InputError: the [tensorboard] extra is not installed.
    """

    def __init__(self, record: Record):
        try:
            from tensorboard.summary import Writer
        except ImportError as error:
            raise InputError(
                "--tensorboard: needs the [tensorboard] extra: pip install 'bert-jax[tensorboard]'"
            ) from error
        if record.workdir.remote is not None:
            raise InputError(
                f"--tensorboard: event files are added to, which cannot be done in a bucket; copy "
                f"{record.workdir.named} to this machine"
            )
        self.folder = record.workdir.root / "tensorboard"
        self._written = dict.fromkeys(("train", "evaluation", "probes", "timings"), -1)
        self._writers = {}
        for name in self._written:
            folder = self.folder / name
            with named_errors(folder):
                _remove_old(folder)
                self._writers[name] = Writer(str(folder))
        self.add(record)

    def add(self, record: Record) -> None:
        """Writes the lines of steps that are not written yet."""
        times = {line["step"]: line["time"] for line in record.laps}
        for name, lines in (
            ("train", record.train),
            ("evaluation", record.evaluation),
            ("probes", [_of_probes(line) for line in record.probes]),
            ("timings", record.laps),
        ):
            for line in lines:
                if line["step"] > self._written[name]:
                    self._add_line(name, line, times)
            self._writers[name].flush()

    def _add_line(self, name: str, line: Line, times: dict[int, float]) -> None:
        for tag, value in line.items():
            if tag not in _NOT_SCALARS:
                at = times.get(line["step"])
                self._writers[name].add_scalar(tag, value, line["step"], wall_time=at)
        self._written[name] = line["step"]

    def close(self) -> None:
        """Ends the files."""
        for writer in self._writers.values():
            writer.close()


def _remove_old(folder: epath.Path) -> None:
    """TensorBoard adds up the files it finds: those of an earlier report would show twice."""
    if folder.exists():
        for path in folder.iterdir():
            if path.name.startswith("events.out.tfevents."):
                path.unlink()


def _of_probes(line: Line) -> Line:
    return {"step": line["step"]} | {f"probe/{k}": v for k, v in line["scores"].items()}
