"""What the TPU compiler makes of the pod experiments, against what was reviewed.

    make plans                              compare with tests/golden/plans/; about 40 minutes
    python -m benchmarks.plans --write      write those files again; read the difference
    python -m benchmarks.plans --matrix     every generation of TPU, both sizes, both lengths

A golden plan is of one libtpu and one jax; others are refused, since they compile otherwise.
"""

import argparse
import functools
import json
import pathlib
import sys
from collections.abc import Iterator, Sequence
from typing import Any

from bert_jax import config
from bert_jax.errors import InputError
from bert_jax.tools.plan import compile as compile_lib
from bert_jax.tools.plan import estimate, report, topology
from bert_jax.tools.plan.compile import CompileJob

ROOT = pathlib.Path(__file__).parents[1]
GOLDEN = ROOT / "tests" / "golden" / "plans"
# Experiment, slice, and the settings that go with the slice.
PLANS = (
    ("bert_base", "v3:4x4", ()),
    ("bert_large", "v3:8x8", ()),
    ("bert_base_pod", "v3:4x4", ()),
    ("bert_base_pod", "v5e:4x4", ()),
    ("bert_base_pod", "v5e:4x4", ("run.check_every=100",)),  # two programs, one of them checked
    ("bert_base_pod", "v5p:2x2x4", ()),
    ("bert_base_pod", "tpu7x:2x2x4", ()),
    ("bert_large_pod", "v3:8x8", ()),
    ("bert_large_pod", "v5e:8x8", ()),
    ("bert_large_pod", "v5p:4x4x4", ()),
    ("bert_large_pod", "tpu7x:2x2x4", ()),
    # Rows a chip as in MLPerf v0.7, and a batch for few chips.
    ("bert_large_pod", "v3:4x4", ("phases.0.batch_size=448", "phases.1.batch_size=448")),
    ("bert_large_pod", "v6e:4x4", ("phases.0.batch_size=64", "phases.1.batch_size=64")),
)
# The compiler pads a program of two steps differently from one time to the next, by 512 bytes.
_CODE_UNIT = 1 << 16
MATRIX = {
    "bert_base_pod": ("v2:4x4", "v3:4x4", "v4:2x2x4", "v5e:4x4", "v5p:2x2x4", "v6e:4x4"),
    "bert_large_pod": (
        *("v2:8x8", "v3:8x8", "v4:4x4x4", "v5e:8x8", "v5p:4x4x4", "v6e:8x8", "tpu7x:2x2x4"),
    ),
}

_say = functools.partial(print, file=sys.stderr, flush=True)


def main(arguments: list[str] | None = None) -> int:
    """Returns 1 where something differs or does not compile, 2 where nothing can be compared."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    what = parser.add_mutually_exclusive_group()
    what.add_argument("--write", action="store_true", help="write the golden plans again")
    what.add_argument("--matrix", action="store_true", help="only: does everything compile and fit")
    args = parser.parse_args(arguments)
    try:
        if not (args.matrix or args.write):
            require_same_versions()
        wrong = misfits() if args.matrix else [compare(*plan, args.write) for plan in PLANS]
        return int(any(wrong))
    except InputError as error:
        print(f"plans: {error}", file=sys.stderr)
        return 2


def require_same_versions() -> None:
    """Raises InputError unless the golden plans are of the compiler that is installed."""
    for path in sorted(GOLDEN.glob("*.json")):
        versions = (json.loads(path.read_text())["versions"], compile_lib.versions())
        if versions[0] != versions[1]:
            then, now = (", ".join(f"{name} {v}" for name, v in of.items()) for of in versions)
            remedy = "take that version, or write the golden plans again"
            raise InputError(f"{path.name} is of {then}, here is {now}: {remedy}")


def compare(name: str, slice_: str, settings: tuple[str, ...], write: bool) -> int:
    """Prints what differs from the golden plan, or writes it; returns the number of differences."""
    path, now = golden_file(name, slice_, settings), golden(name, slice_, settings)
    if write:
        GOLDEN.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(now, indent=1) + "\n")
        print(f"written: {path.relative_to(ROOT)}", flush=True)
        return 0
    lines = list(differences(json.loads(path.read_text()), now)) if path.exists() else ["missing"]
    head = f"{path.stem}: {'as reviewed' if not lines else 'differs'}"
    print("\n  ".join([head, *lines]), flush=True)
    return len(lines)


def golden_file(name: str, slice_: str, settings: tuple[str, ...]) -> pathlib.Path:
    """Returns where the golden plan of an experiment for a slice is kept."""
    checked = "_checked" * any(setting.startswith("run.check_every=") for setting in settings)
    return GOLDEN / f"{name}_{slice_.replace(':', '_')}{checked}.json"


def jobs_of(name: str, slices: Sequence[str], settings: Sequence[str] = ()) -> list[CompileJob]:
    """Returns every phase of an experiment on every slice."""
    experiment = config.override(config.load(str(ROOT / "experiments" / f"{name}.py")), settings)
    phases = range(len(experiment.phases))
    return [
        CompileJob(experiment, number, topology.parse(one)) for one in slices for number in phases
    ]


def golden(name: str, slice_: str, settings: tuple[str, ...]) -> dict[str, Any]:
    """Returns what is kept of an experiment's plan for a slice.

    No hash of the experiment is: each new field would change it, and no step.
    """
    jobs = jobs_of(name, [slice_], settings)
    outcomes = compile_lib.compile_all(jobs, _say)
    phases = []
    for job, outcome in zip(jobs, outcomes, strict=True):
        entry = report.phase_entry(job.experiment, job.phase, job.topology, outcome)
        if memory := entry["memory"]:  # it has none if it was not compiled
            entry["memory"] = memory | {"code": memory["code"] // _CODE_UNIT * _CODE_UNIT}
        kept = ("outcome", "memory", "work", "kernels", "collectives", "checks")
        phases.append({key: entry[key] for key in kept if key in entry})
    return {
        "versions": compile_lib.versions(),
        "settings": list(settings),
        "phases": phases,
        "parameters": list(outcomes[0].parameters),
    }


def differences(then: Any, now: Any, where: str = "") -> Iterator[str]:
    """Yields leaves that are not the same, as `path: golden -> now`."""
    if isinstance(then, dict) and isinstance(now, dict):
        for key in dict.fromkeys([*then, *now]):
            yield from differences(then.get(key), now.get(key), f"{where}.{key}".lstrip("."))
    elif isinstance(then, list) and isinstance(now, list) and len(then) == len(now):
        for number, pair in enumerate(zip(then, now, strict=True)):
            yield from differences(*pair, f"{where}[{number}]")
    elif then != now:
        yield f"{where}: {json.dumps(then)} -> {json.dumps(now)}"


def misfits() -> list[str]:
    """Prints each outcome of the matrix; returns those that do not compile and fit."""
    wrong = []
    for name, slices in MATRIX.items():
        jobs = jobs_of(name, slices)
        for job, outcome in zip(jobs, compile_lib.compile_all(jobs, _say, "return"), strict=True):
            length = job.experiment.phases[job.phase].sequence_length
            line = f"{name} {job.topology.name} {length}: {outcome.kind}, {outcome.message}"
            if outcome.program is not None:
                seconds = estimate.estimate(outcome.program, job.topology, outcome.places)
                peak, step = outcome.memory["peak"] / 2**30, 1e3 * seconds.total
                line += f"{peak:.2f} GiB a device, {step:.1f} ms"
            print(line, flush=True)
            wrong += [line] * (outcome.kind != "compiled")
    return wrong


if __name__ == "__main__":
    sys.exit(main())
