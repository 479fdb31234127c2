"""Checks before anything is rented; `--force` skips checks by name."""

import os
import pathlib
import subprocess
from collections.abc import Callable

from bert_jax.errors import InputError, printable
from bert_jax.storage import buckets, mirror
from bert_jax.storage.storage import storage_of
from bert_jax.storage.workdir import COMPLETE

from .spec import Spec, report

# In the order in which they run: the quick ones first.
NAMES = ("commit", "workdir", "doctor", "plan")

# The checkout that has launch/ at its top; the package's folder if bert_jax is installed.
ROOT = pathlib.Path(__file__).resolve().parents[1]


def parse_force(text: str) -> frozenset[str]:
    """Returns the checks that `--force` skips."""
    names = [name.strip() for name in text.split(",") if name.strip()]
    for name in names:
        if name not in NAMES:
            raise InputError(f"--force {name}: no such check; the checks are {', '.join(NAMES)}")
    return frozenset(names)


def run_checks(spec: Spec, skipped: frozenset[str], price_per_chip_hour: float | None) -> None:
    """Runs all checks that are not in `skipped`; prints their names and the plan.

    The price is in any currency; None: no costs are shown.
    """
    checks: dict[str, Callable[[], None]] = {
        "commit": require_clean_commit,
        "workdir": lambda: require_writable_workdir(spec),
        "doctor": lambda: require_healthy_corpus(spec),
        "plan": lambda: require_large_enough_slice(spec, price_per_chip_hour),
    }
    for name in NAMES:
        if name in skipped:
            report(f"check {name}: left out (--force)")
            continue
        report(f"check {name}")
        try:
            checks[name]()
        except InputError as error:
            raise InputError(f"{error}; --force {name} launches anyway") from error


def head_commit() -> str:
    """Returns the commit that rented machines install, in hexadecimal."""
    if not (ROOT / ".git").exists():  # an installed package, perhaps inside another checkout
        raise InputError(
            f"{ROOT}: no git checkout, whose commit rented machines would install; clone "
            "bert_jax, and use `python -m launch` there"
        )
    return _git("rev-parse", "HEAD").strip()


def require_clean_commit() -> None:
    """Raises InputError if the checkout has changes that are not committed."""
    head_commit()
    if changed := _git("status", "--porcelain").splitlines():
        raise InputError(
            f"{ROOT}: {len(changed)} files differ from the commit to install, such as "
            f"{printable(changed[0][3:])}; commit them"
        )


def _git(*arguments: str) -> str:
    """Returns the output of a git command in the checkout."""
    command = ["git", "-C", os.fspath(ROOT), *arguments]
    try:
        return subprocess.run(
            command, stdin=subprocess.DEVNULL, capture_output=True, text=True, check=True
        ).stdout
    except OSError as error:
        raise InputError(f"git: cannot be run ({error.strerror}); install it") from error
    except subprocess.CalledProcessError as error:
        raise InputError(f"{ROOT}: git cannot read it ({error.stderr.strip()})") from error


def require_writable_workdir(spec: Spec) -> None:
    """Raises InputError if rented machines could not write the workdir or not read an input."""
    experiment = spec.experiment
    if experiment.init_from:  # a base can only be read from a disk
        raise InputError(
            f"init_from={experiment.init_from}: rented machines do not see it; start the run on "
            "this machine, and launch it after it has saved a checkpoint"
        )
    if experiment.run.probes:  # files of tasks and of their examples
        raise InputError(
            f"run.probes={','.join(experiment.run.probes)}: rented machines do not see it; "
            "remove it with --set run.probes="
        )
    path = experiment.run.corpus_dir
    if path and not path.startswith("gs://"):
        raise InputError(f"run.corpus_dir={path}: rented machines do not see it; name a bucket")
    workdir = mirror.open_workdir(spec.workdir, path, to_write=True)
    buckets.require_writable(workdir.address)


def require_healthy_corpus(spec: Spec) -> None:
    """Raises InputError if the corpus is not prepared, or `doctor` finds a problem in it."""
    from bert_jax.tools import doctor
    from bert_jax.tools.doctor import corpus_findings

    corpus = mirror.open_workdir(spec.workdir, spec.experiment.run.corpus_dir, to_write=True).corpus
    if not storage_of(corpus).exists(corpus / COMPLETE):
        raise InputError(
            f"{corpus}: no prepared corpus, which takes long to make on rented machines; run "
            f"`bert-jax prepare` with --workdir {spec.workdir} first"
        )
    lengths = tuple(sorted({phase.sequence_length for phase in spec.experiment.phases}))
    if doctor.print_findings(corpus_findings.examine(corpus, lengths)):
        raise InputError(f"{corpus}: `doctor` finds problems, see above")


def require_large_enough_slice(spec: Spec, price_per_chip_hour: float | None) -> None:
    """Raises InputError unless every phase compiles and fits; prints the plan."""
    from bert_jax.tools.plan.report import lines, make_plan

    plan = make_plan(spec.experiment, [spec.rented_topology], "plan", price_per_chip_hour)
    for line in lines(plan):
        report(line)
    for phase in plan["slices"][0]["phases"]:
        if phase["outcome"] != "compiled":
            raise InputError(
                f"plan: phase {phase['phase']} does not run on {spec.rented_topology.name} "
                f"({phase['outcome']}, see above)"
            )
