"""Trackers of experiments: a thread reads what a run writes, and sends it on (`run.trackers`).

The loop knows nothing of it: metrics.jsonl and timings.jsonl are read as anyone may read them. Each
tracker is an extra, imported only where it is named, and stays on this machine unless its own
variables say otherwise (WANDB_MODE, MLFLOW_TRACKING_URI, TRACKIO_SPACE_ID). One that fails is one
line; the run goes on.

    W/trackers.json     which tracked run each goes on with, and up to which step it was sent what
    W/tensorboard/      event files: train, evaluation, probes, timings
    W/wandb/, W/trackio/, W/mlflow/
"""

import contextlib
import importlib.util
import json
import os
import threading
import time
import uuid
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

from flax import traverse_util

from bert_jax import config
from bert_jax.errors import InputError, printable
from bert_jax.storage.json_lines import JsonLines
from bert_jax.storage.workdir import Workdir, read_json, write_json

_FORMAT_VERSION = 1
# Seconds between two looks at the files, and for what is under way when the run ends.
_SECONDS, _LAST = 10.0, 60.0
# What a project is called where runs of several kinds lie together.
_PROJECT = "bert_jax"
# Where Trackio looks for its folder; no argument names it.
_TRACKIO = "TRACKIO_DIR"
# A tracked run: the id by which it is found again after a resume; what takes (group, step, numbers
# of a line), a group being train, evaluation, probes or timings, say; what ends it.
Tracker = tuple[str, Callable[[str, int, Mapping[str, float]], Any], Callable[[], Any]]


class RunLocation(NamedTuple):
    """A run as trackers are shown it."""

    folder: str  # of the run, on this machine
    name: str  # of the experiment
    settings: dict[str, Any]  # all fields of it, by their paths


def _tensorboard(location: RunLocation, known: str) -> Tracker:
    """Writes event files in W/tensorboard, one folder a group, each line at once."""
    from tensorboard.summary import Writer

    writers: dict[str, Any] = {}

    def log(group: str, step: int, values: Mapping[str, float]) -> None:
        if group not in writers:
            writers[group] = Writer(os.path.join(location.folder, "tensorboard", group))
        for name, value in values.items():
            writers[group].add_scalar(name, value, step)
        writers[group].flush()

    return known, log, lambda: [writer.close() for writer in writers.values()]


def _trackio(location: RunLocation, known: str) -> Tracker:
    os.environ.setdefault(_TRACKIO, os.path.join(location.folder, "trackio"))
    import trackio

    name = known or f"{location.name}-{uuid.uuid4().hex[:8]}"
    words = {"config": location.settings, "resume": "allow", "embed": False}
    return _of_run(name, trackio.init(project=_PROJECT, name=name, **words))


def _wandb(location: RunLocation, known: str) -> Tracker:
    """Opens a run of Weights & Biases, in W/wandb; `wandb sync` sends it."""
    import wandb

    name = known or uuid.uuid4().hex
    words = {"config": location.settings, "resume": "allow", "dir": location.folder}
    words["settings"] = wandb.Settings(console="off", silent=True)
    if not os.environ.get("WANDB_MODE"):
        words["mode"] = "offline"
    return _of_run(name, wandb.init(project=_PROJECT, name=location.name, id=name, **words))


def _of_run(name: str, run: Any) -> Tracker:
    def log(group: str, step: int, values: Mapping[str, float]) -> None:
        run.log({f"{group}/{name}": value for name, value in values.items()}, step=step)

    return name, log, run.finish


def _mlflow(location: RunLocation, known: str) -> Tracker:
    """Opens a run of MLflow, in W/mlflow: a file of SQLite, since it writes plain ones no more."""
    from mlflow.entities import Metric
    from mlflow.tracking import MlflowClient

    folder = os.path.abspath(os.path.join(location.folder, "mlflow"))
    os.makedirs(folder, exist_ok=True)
    here = f"sqlite:///{folder}/mlflow.db"
    client, run = MlflowClient(os.environ.get("MLFLOW_TRACKING_URI") or here), known
    if run:
        client.update_run(run, status="RUNNING")
    else:
        project = client.get_experiment_by_name(_PROJECT)
        number = (
            client.create_experiment(_PROJECT, f"file://{folder}/artifacts")
            if project is None
            else project.experiment_id
        )
        run = client.create_run(number, run_name=location.name).info.run_id
        for name, value in location.settings.items():
            client.log_param(run, name, value)

    def log(group: str, step: int, values: Mapping[str, float]) -> None:
        now = round(time.time() * 1000)
        metrics = [Metric(f"{group}/{name}", value, now, step) for name, value in values.items()]
        client.log_batch(run, metrics=metrics)

    return run, log, lambda: client.set_terminated(run)


_OPENED: dict[str, Callable[[RunLocation, str], Tracker]] = {
    "tensorboard": _tensorboard,
    "trackio": _trackio,
    "wandb": _wandb,
    "mlflow": _mlflow,
}


def require_installed(names: tuple[str, ...]) -> None:
    """Raises InputError if a tracker that is named is not installed."""
    for name in names:
        if importlib.util.find_spec(name) is None:
            raise InputError(
                f"run.trackers={name}: needs the [{name}] extra: pip install 'bert-jax[{name}]'"
            )


@contextlib.contextmanager
def following(
    names: tuple[str, ...], workdir: Workdir, experiment: Any, say: Callable[[str], None]
) -> Iterator[None]:
    """Sends each tracker the lines of a run while entered, and what is left at the end."""
    if not names:
        yield
        return
    ends = threading.Event()
    args = (names, workdir, experiment, say, ends)
    thread = threading.Thread(target=_follow, args=args, name="trackers", daemon=True)
    is_named = _TRACKIO in os.environ
    thread.start()
    try:
        yield
    finally:
        ends.set()
        thread.join(_LAST)
        if thread.is_alive():
            say(f"trackers: not done after {_LAST:.0f} s more; lines not sent yet are left out")
        if not is_named:
            os.environ.pop(_TRACKIO, None)


def _follow(
    names: tuple[str, ...],
    workdir: Workdir,
    experiment: Any,
    say: Callable[[str], None],
    ends: threading.Event,
) -> None:
    """Opens the trackers, sends each what it was not sent until the run ends, and closes them."""
    state = workdir.root / "trackers.json"
    known: dict[str, dict[str, Any]] = {}
    opened: dict[str, Tracker] = {}

    @contextlib.contextmanager
    def without_on_failure(name: str) -> Iterator[None]:
        try:
            yield
        except Exception as error:
            opened.pop(name, None)
            why = f"{type(error).__name__}: {printable((str(error).splitlines() or [''])[0])}"
            say(f"trackers: {name}: {why}; the run goes on without it")

    def send() -> None:
        lines = _lines(workdir)
        before = json.dumps(known)
        for name, (_, log, _) in list(opened.items()):
            with without_on_failure(name):
                sent = known[name]["sent"]
                for group, step, values in lines:
                    if step > sent.get(group, -1):
                        log(group, step, values)
                        sent[group] = step
        if json.dumps(known) != before:
            write_json(state, {"format_version": _FORMAT_VERSION, "trackers": known})

    with without_on_failure("trackers.json"):
        if state.exists():
            known |= read_json(state, _FORMAT_VERSION)["trackers"]
    settings = {
        path: value if isinstance(value, int | float | str) else str(value)
        for path, value in config.flatten(experiment)
    }
    location = RunLocation(os.fspath(workdir.root), experiment.name, settings)
    for name in names:
        with without_on_failure(name):
            of = known.setdefault(name, {"id": "", "sent": {}})
            opened[name] = _OPENED[name](location, of["id"])
            of["id"] = opened[name][0]
    with without_on_failure("lines"):
        while opened and not ends.wait(_SECONDS):
            send()
        send()
    for name, (_, _, close) in list(opened.items()):
        with without_on_failure(name):
            close()


def _lines(workdir: Workdir) -> list[tuple[str, int, dict[str, float]]]:
    """Returns (group, step, numbers) of all lines of a run, in the order of their steps."""
    # First the timings: no metrics of a later step are read before those of an earlier one.
    lines = [
        x | {"kind": "timings"} for x in JsonLines(workdir.timings).read() if x["kind"] == "train"
    ]
    lines += JsonLines(workdir.metrics).read()
    parts = [(line.pop("kind"), line.pop("step"), _numbers(line)) for line in lines]
    return sorted(parts, key=lambda line: line[1])


def _numbers(line: dict[str, Any]) -> dict[str, float]:
    """Returns the numbers of a line by their names, those of objects in it by their paths."""
    values = traverse_util.flatten_dict(line, sep="/").items()
    return {k: float(v) for k, v in values if isinstance(v, int | float) and k != "time"}
