"""Experiment trackers: a thread reads the files that a run writes, and sends lines to trackers.

The training loop does not know about trackers: the thread reads metrics.jsonl and timings.jsonl as
anyone may. `run.trackers` names the trackers. Each is an optional dependency, imported only if it
is named, and writes to this machine unless its own variables say otherwise (WANDB_MODE,
MLFLOW_TRACKING_URI, TRACKIO_SPACE_ID). A tracker that fails is reported; the run continues.

    W/trackers.json     for each tracker, the id of its run and the last step that was sent
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
# Seconds between two reads of the files, and to finish sending when the run ends.
_INTERVAL, _END = 10.0, 60.0
# Name of the project in trackers that group runs.
_PROJECT = "bert_jax"
# Variable that names Trackio's folder; it has no argument for it.
_TRACKIO = "TRACKIO_DIR"
# A tracked run: its id, by which it is resumed; a function of (group, step, numbers of a line),
# where a group is a kind of line, such as train or timings; a function that ends it.
Tracker = tuple[str, Callable[[str, int, Mapping[str, float]], Any], Callable[[], Any]]


class RunLocation(NamedTuple):
    """The names and the address of a run, for trackers."""

    folder: str  # the workdir, on this machine
    name: str  # of the experiment
    settings: dict[str, Any]  # {path: value} of all fields of the experiment


def _tensorboard(location: RunLocation, run_id: str) -> Tracker:
    """Writes event files in W/tensorboard, one folder per group; flushes after each line."""
    from tensorboard.summary import Writer

    writers: dict[str, Any] = {}

    def log(group: str, step: int, values: Mapping[str, float]) -> None:
        if group not in writers:
            writers[group] = Writer(os.path.join(location.folder, "tensorboard", group))
        for name, value in values.items():
            writers[group].add_scalar(name, value, step)
        writers[group].flush()

    return run_id, log, lambda: [writer.close() for writer in writers.values()]


def _trackio(location: RunLocation, run_id: str) -> Tracker:
    os.environ.setdefault(_TRACKIO, os.path.join(location.folder, "trackio"))
    import trackio

    name = run_id or f"{location.name}-{uuid.uuid4().hex[:8]}"
    options = {"config": location.settings, "resume": "allow", "embed": False}
    return _make_tracker(name, trackio.init(project=_PROJECT, name=name, **options))


def _wandb(location: RunLocation, run_id: str) -> Tracker:
    """Opens a run of Weights & Biases in W/wandb; `wandb sync` uploads it."""
    import wandb

    name = run_id or uuid.uuid4().hex
    options = {"config": location.settings, "resume": "allow", "dir": location.folder}
    options["settings"] = wandb.Settings(console="off", silent=True)
    if not os.environ.get("WANDB_MODE"):
        options["mode"] = "offline"
    return _make_tracker(name, wandb.init(project=_PROJECT, name=location.name, id=name, **options))


def _make_tracker(name: str, run: Any) -> Tracker:
    def log(group: str, step: int, values: Mapping[str, float]) -> None:
        run.log({f"{group}/{name}": value for name, value in values.items()}, step=step)

    return name, log, run.finish


def _mlflow(location: RunLocation, run_id: str) -> Tracker:
    """Opens a run of MLflow in W/mlflow, an SQLite file: MLflow no longer writes plain files."""
    from mlflow.entities import Metric
    from mlflow.tracking import MlflowClient

    folder = os.path.abspath(os.path.join(location.folder, "mlflow"))
    os.makedirs(folder, exist_ok=True)
    address = os.environ.get("MLFLOW_TRACKING_URI") or f"sqlite:///{folder}/mlflow.db"
    client, run = MlflowClient(address), run_id
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


_OPENERS: dict[str, Callable[[RunLocation, str], Tracker]] = {
    "tensorboard": _tensorboard,
    "trackio": _trackio,
    "wandb": _wandb,
    "mlflow": _mlflow,
}


def require_installed(names: tuple[str, ...]) -> None:
    """Raises InputError if one of these trackers is not installed."""
    for name in names:
        if importlib.util.find_spec(name) is None:
            raise InputError(
                f"run.trackers={name}: needs the [{name}] extra: pip install 'bert-jax[{name}]'"
            )


@contextlib.contextmanager
def run_trackers(
    names: tuple[str, ...], workdir: Workdir, experiment: Any, report: Callable[[str], None]
) -> Iterator[None]:
    """Sends the lines of a run to each tracker while entered, and the remaining ones at exit."""
    if not names:
        yield
        return
    has_ended = threading.Event()
    args = (names, workdir, experiment, report, has_ended)
    thread = threading.Thread(target=_send_lines, args=args, name="trackers", daemon=True)
    is_set = _TRACKIO in os.environ
    thread.start()
    try:
        yield
    finally:
        has_ended.set()
        thread.join(_END)
        if thread.is_alive():
            report(f"trackers: not done after {_END:.0f} s more; the remaining lines are not sent")
        if not is_set:
            os.environ.pop(_TRACKIO, None)


def _send_lines(
    names: tuple[str, ...],
    workdir: Workdir,
    experiment: Any,
    report: Callable[[str], None],
    has_ended: threading.Event,
) -> None:
    """Opens the trackers, sends them new lines until the run ends, and closes them."""
    path = workdir.root / "trackers.json"
    states: dict[str, dict[str, Any]] = {}  # the content of the file
    trackers: dict[str, Tracker] = {}

    @contextlib.contextmanager
    def without_on_failure(name: str) -> Iterator[None]:
        try:
            yield
        except Exception as error:
            trackers.pop(name, None)
            reason = f"{type(error).__name__}: {printable((str(error).splitlines() or [''])[0])}"
            report(f"trackers: {name}: {reason}; the run continues without it")

    def send() -> None:
        lines = _read_lines(workdir)
        before = json.dumps(states)
        for name, (_, log, _) in list(trackers.items()):
            with without_on_failure(name):
                sent = states[name]["sent"]
                for group, step, values in lines:
                    if step > sent.get(group, -1):
                        log(group, step, values)
                        sent[group] = step
        if json.dumps(states) != before:
            write_json(path, {"format_version": _FORMAT_VERSION, "trackers": states})

    with without_on_failure("trackers.json"):
        if path.exists():
            states |= read_json(path, _FORMAT_VERSION)["trackers"]
    settings = {
        path: value if isinstance(value, int | float | str) else str(value)
        for path, value in config.flatten(experiment)
    }
    location = RunLocation(os.fspath(workdir.root), experiment.name, settings)
    for name in names:
        with without_on_failure(name):
            state = states.setdefault(name, {"id": "", "sent": {}})
            trackers[name] = _OPENERS[name](location, state["id"])
            state["id"] = trackers[name][0]
    with without_on_failure("lines"):
        while trackers and not has_ended.wait(_INTERVAL):
            send()
        send()
    for name, (_, _, close) in list(trackers.items()):
        with without_on_failure(name):
            close()


def _read_lines(workdir: Workdir) -> list[tuple[str, int, dict[str, float]]]:
    """Returns (group, step, numbers) of all lines of a run, in the order of their steps."""
    # Timings first: a run writes metrics before timings, so a step's metrics are never later.
    timings = [line for line in JsonLines(workdir.timings).read() if line["kind"] == "train"]
    lines = [line | {"kind": "timings"} for line in timings]
    lines += JsonLines(workdir.metrics).read()
    parts = [(line.pop("kind"), line.pop("step"), _numbers(line)) for line in lines]
    return sorted(parts, key=lambda line: line[1])


def _numbers(line: dict[str, Any]) -> dict[str, float]:
    """Returns the numbers of a line; the name of a nested number is its path."""
    values = traverse_util.flatten_dict(line, sep="/").items()
    return {k: float(v) for k, v in values if isinstance(v, int | float) and k != "time"}
