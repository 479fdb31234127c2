"""Importing and calling bert_jax from Python leaves the state of the process as it was.

Each check runs in a process of its own. It imports the dependencies first, so that the changes
which they make on import are not counted.
"""

import gc
import importlib.util
import json
import logging
import os
import pathlib
import random
import signal
import sys
import threading
import types
import warnings
from collections.abc import Callable
from importlib import import_module
from typing import Any

import pytest
import small_run

LIBRARIES = (
    *("absl.flags", "absl.logging", "etils.epath", "flax.nnx", "fsspec", "gcsfs", "grain", "jax"),
    *("jax.experimental.multihost_utils", "numpy", "optax", "orbax.checkpoint", "pyarrow"),
    *("rich.progress", "safetensors.numpy", "scipy.stats", "sklearn.metrics", "sentencepiece"),
    *("tensorflow_datasets", "tensorstore", "tokenizers", "google.cloud.storage"),
    *("pyarrow.parquet", "array_record"),
)
# The packages whose functions and methods are compared, to find patches.
PATCHABLE = ("absl", "etils", "fsspec", "gcsfs", "jax", "orbax", "rich", "threading")


def functions() -> dict[str, Any]:
    """The functions and classes of other libraries, and what their classes and objects hold."""
    found: dict[str, Any] = {}
    for name, module in list(sys.modules.items()):
        if name.split(".")[0] not in PATCHABLE or not isinstance(module, types.ModuleType):
            continue
        for key, value in list(vars(module).items()):
            if not callable(value):
                continue
            found[f"{name}.{key}"] = value
            if isinstance(value, type) and value.__module__ == name:
                members = vars(value).items()
                methods = {k: v for k, v in members if isinstance(v, types.FunctionType)}
                found |= {f"{name}.{key}.{k}": v for k, v in methods.items()}
    return found


def loggers() -> dict[str, Any]:
    known = {"": logging.root, **logging.root.manager.loggerDict}
    return {
        name: (one.level, [*one.handlers], [*one.filters], one.propagate, one.disabled)
        for name, one in known.items()
        if isinstance(one, logging.Logger) and not name.startswith("bert_jax")
    } | {"disabled": logging.root.manager.disable}


# The arguments of mallopt: `call_everything` gives bert_jax.system a stand-in that records them.
mallopt_calls: list[Any] = []

# The parts of the state, each with a function that reads it. A dict may gain keys, since modules
# are imported later; its other keys must stay, with equal values.
PARTS: dict[str, Callable[[], Any]] = {
    "hooks": lambda: {
        **{name: value for name, value in vars(sys).items() if name.endswith("hook")},
        "threading": threading.excepthook,
        "tracing": (sys.gettrace(), sys.getprofile()),
    },
    "streams": lambda: [sys.stdin, sys.stdout, sys.stderr],
    "loggers": loggers,
    "own handlers": lambda: [
        (one.name, one.level, [*one.handlers], [*one.filters], one.propagate)
        for name, one in logging.root.manager.loggerDict.items()
        if name.startswith("bert_jax") and isinstance(one, logging.Logger)
        if one.level or one.handlers or one.filters or not one.propagate
    ],
    "warnings": lambda: [*warnings.filters],
    "fsspec": lambda: {
        "known": json.dumps(import_module("fsspec.registry").known_implementations),
        "config": json.dumps(import_module("fsspec").config.conf),
        "gcs": import_module("fsspec").get_filesystem_class("gcs"),
        "gs": import_module("fsspec").get_filesystem_class("gs"),
    },
    "etils": lambda: [
        {**vars(import_module("etils.epath.backend").fsspec_backend)},
        {**import_module("etils.epath.gpath")._PREFIX_TO_BACKEND},
    ],
    "environment": lambda: [f"{name}={value}" for name, value in sorted(os.environ.items())],
    "signals": lambda: [
        *[signal.getsignal(number) for number in sorted(signal.valid_signals())],
        signal.getitimer(signal.ITIMER_REAL),
    ],
    "absl": lambda: [
        import_module("absl.logging").get_verbosity(),
        import_module("absl.flags").FLAGS.is_parsed(),
    ],
    "paths": lambda: [*sys.path, *sys.path_hooks, *sys.meta_path, os.getcwd()],
    "functions": functions,
    "jax": lambda: dict(import_module("jax").config.values),
    "memory": lambda: list(mallopt_calls),
    "random": lambda: [random.getstate(), str(import_module("numpy").random.get_state())],
    "interpreter": lambda: [
        *(gc.get_threshold(), gc.isenabled(), sys.getrecursionlimit(), sys.getswitchinterval()),
        sys.dont_write_bytecode,
    ],
}


def changes(before: dict[str, Any]) -> dict[str, str]:
    """What differs now, by part."""
    found = {}
    for part, read in PARTS.items():
        old, new = before[part], read()
        if isinstance(old, dict):
            new = {name: new.get(name) for name in old}
            wrong = [name for name in old if old[name] is not new[name] and old[name] != new[name]]
            if wrong:
                found[part] = f"{wrong[0]}: {old[wrong[0]]} -> {new[wrong[0]]}"[:300]
        elif old != new:
            missing = [value for value in old if value not in new]
            added = [value for value in new if value not in old]
            found[part] = f"{missing} -> {added}"[:300]
    return found


def snapshot() -> dict[str, Any]:
    return {part: read() for part, read in PARTS.items()}


def prepare() -> None:
    """Imports the dependencies and starts jax's devices."""
    for name in LIBRARIES:
        if importlib.util.find_spec(name.split(".")[0]) is not None:
            import_module(name)
    from orbax.checkpoint import v1  # an attribute, which Orbax makes when it is first read

    assert v1.Context
    import_module("jax").devices()


def call_everything(folder: str, changed: dict[str, Any]) -> None:
    """Imports and calls what the documents show, and notes what each changed."""
    prepare()
    before = snapshot()

    def check(what: str) -> None:
        if found := changes(before):
            changed[what] = found

    import bert_jax

    for path in (pathlib.Path(bert_jax.__file__).parent).rglob("*.py"):
        name = ".".join(path.relative_to(pathlib.Path(bert_jax.__file__).parents[1]).parts)[:-3]
        if name.split(".")[1] not in ("experiments", "launch") and "__main__" not in name:
            import_module(name)
    check("import")
    from bert_jax import system

    system._mallopt = mallopt_calls.append
    model = bert_jax.load("run")
    check("load")
    model.fill("wa wb [MASK] xc .")
    model.embed(["wa wb", "xc ."])
    check("fill and embed")
    bert_jax.batches("small.py", 5, f"{folder}/run")
    check("batches")
    bert_jax.pretrain("small.py", f"{folder}/run")
    check("pretrain")


def finetune(folder: str, changed: dict[str, Any]) -> None:
    """A short fine-tuning with a worker process."""
    prepare()
    import tuned

    from bert_jax import config
    from bert_jax.config import Finetuning
    from bert_jax.running.progress import LoggedProgress
    from bert_jax.tasks.finetuning_job import finetune

    tuned.write_base("base")
    tuned.write_task(pathlib.Path(), "classify")
    before = snapshot()
    settings = ("epochs=1", "run.data_workers=1")
    experiment = config.override(config.load("task.py", Finetuning), settings)
    assert finetune(experiment, "base", f"{folder}/run", LoggedProgress()) == "finished"
    if found := changes(before):
        changed["finetune"] = found


def use_bucket(folder: str, changed: dict[str, Any]) -> None:
    """Trains a short run in a bucket; counts the requests through `RetryingFileSystem`."""
    prepare()
    import bert_jax
    from bert_jax import config
    from bert_jax.storage import gcs

    request, requests = gcs.RetryingFileSystem._call, []

    async def counted(self, *args, **kwargs):
        requests.append(args)
        return await request(self, *args, **kwargs)

    gcs.RetryingFileSystem._call = counted
    before = snapshot()
    short = ("phases.0.steps=3", "phases.1.steps=1", "run.corpus_dir=", "run.eval_every=4")
    experiment = config.override(config.load("small.py"), short)
    assert bert_jax.pretrain(experiment, "gs://bucket/run").step == 4
    requests_of_run = len(requests)
    assert requests_of_run and bert_jax.load("gs://bucket/run").step == 4
    assert len(requests) > requests_of_run
    if found := changes(before):
        changed["bucket"] = found


def run_scenario(scenario: str, folder: str, report: str) -> None:
    """Calls a function of this module, in a process of its own, and writes what changed."""
    changed: dict[str, Any] = {}
    globals()[scenario](folder, changed)
    pathlib.Path(report).write_text(json.dumps(changed, default=str))


def run(scenario: str, folder: pathlib.Path, cwd: pathlib.Path) -> dict[str, Any]:
    """Runs a scenario in a process of its own, which must print nothing; returns what changed."""
    report = folder / "report.json"
    code = f"import sys; sys.path[:] = {sys.path!r}; import os; os.chdir({str(cwd)!r});"
    arguments = (scenario, str(folder), str(report))
    code += f"import test_side_effects as t; t.run_scenario(*{arguments!r})"
    # Grain's workers leave shared memory behind, of which Python's tracker warns at the end.
    done = small_run.command("-c", code, devices=1, PYTHONWARNINGS="ignore::UserWarning")
    assert done.returncode == 0, done.stderr.decode()
    # TensorStore logs the variable that its credentials for the fake bucket come from; Orbax logs
    # that a save takes seconds, as on a busy machine.
    logged = (b"GOOGLE_AUTH_TOKEN_FOR_TESTING", b"Waiting for previous save to complete took")
    lines = [x for x in done.stderr.splitlines() if not any(text in x for text in logged)]
    assert (done.stdout, lines) == (b"", [])
    return json.loads(report.read_text())


@pytest.mark.long
def test_what_python_imports_and_calls_changes_nothing(copy_of_run, tmp_path):
    assert run("call_everything", tmp_path, copy_of_run) == {}


@pytest.mark.nightly
def test_a_fine_tuning_from_python_changes_nothing(tmp_path):
    assert run("finetune", tmp_path, tmp_path) == {}


@pytest.mark.nightly
def test_a_run_in_a_bucket_from_python_changes_nothing(objects, copy_of_run, tmp_path):
    """Orbax uses our file system, and does not read the bucket's metadata."""
    kinds = set()
    objects.fault = lambda method, name, kind: kinds.add(kind)
    assert run("use_bucket", tmp_path, copy_of_run) == {}
    assert "write" in kinds and "bucket" not in kinds
    assert objects.files("run/checkpoints/4/")
