"""What is looked at before anything is rented; each can be overruled by name."""

import os
import pathlib
import subprocess
from collections.abc import Callable

from bert_jax.errors import InputError, printable
from bert_jax.storage import buckets, mirror
from bert_jax.storage.storage import storage_of
from bert_jax.storage.workdir import COMPLETE

from .spec import Spec, say

# In the order in which they are done: the quick ones first.
NAMES = ("commit", "workdir", "doctor", "plan")

ROOT = pathlib.Path(__file__).resolve().parents[1]


def forced(text: str) -> frozenset[str]:
    """Returns the checks that `--force` overrules."""
    given = [name.strip() for name in text.split(",") if name.strip()]
    for name in given:
        if name not in NAMES:
            raise InputError(f"--force {name}: no such check; the checks are {', '.join(NAMES)}")
    return frozenset(given)


def check(spec: Spec, force: frozenset[str], price_per_chip_hour: float | None) -> None:
    """Runs all checks but those that `force` names; prints what is looked at, and the plan.

    The price is in any currency; None: costs are left out.
    """
    steps: dict[str, Callable[[], None]] = {
        "commit": commit_is_clean,
        "workdir": lambda: workdir_is_writable(spec),
        "doctor": lambda: corpus_is_healthy(spec),
        "plan": lambda: slice_is_large_enough(spec, price_per_chip_hour),
    }
    for name in NAMES:
        if name in force:
            say(f"check {name}: left out (--force)")
            continue
        say(f"check {name}")
        try:
            steps[name]()
        except InputError as error:
            raise InputError(f"{error}; --force {name} launches all the same") from error


def head() -> str:
    """Returns the commit that is shipped, in hexadecimal."""
    if not (ROOT / ".git").exists():  # installed, perhaps in somebody's checkout of something else
        raise InputError(
            f"{ROOT}: no git checkout, and what is shipped is a commit of one; clone bert_jax, and "
            "use `python -m launch` there"
        )
    return _git("rev-parse", "HEAD").strip()


def commit_is_clean() -> None:
    """Raises InputError if the checkout holds changes that would not be shipped."""
    head()
    if changed := _git("status", "--porcelain").splitlines():
        raise InputError(
            f"{ROOT}: {len(changed)} files differ from the commit that is shipped, such as "
            f"{printable(changed[0][3:])}; commit them"
        )


def _git(*words: str) -> str:
    """Returns what git answers about the checkout."""
    command = ["git", "-C", os.fspath(ROOT), *words]
    try:
        return subprocess.run(
            command, stdin=subprocess.DEVNULL, capture_output=True, text=True, check=True
        ).stdout
    except OSError as error:
        raise InputError(f"git: cannot be run ({error.strerror}); install it") from error
    except subprocess.CalledProcessError as error:
        raise InputError(f"{ROOT}: git cannot read it ({error.stderr.strip()})") from error


def workdir_is_writable(spec: Spec) -> None:
    """Raises InputError if the workdir cannot be written from here, or files lie out of reach."""
    experiment = spec.experiment
    if experiment.init_from:  # a base is read from a disk, never from a bucket
        raise InputError(
            f"init_from={experiment.init_from}: rented machines do not see it; begin the run on "
            "this machine, and launch it once it has saved a checkpoint"
        )
    if experiment.run.probes:  # task files, and the examples that they name
        raise InputError(
            f"run.probes={','.join(experiment.run.probes)}: rented machines do not see it; "
            "--set run.probes= leaves it out"
        )
    place = experiment.run.corpus_dir
    if place and not place.startswith("gs://"):
        raise InputError(f"run.corpus_dir={place}: rented machines do not see it; name a bucket")
    workdir = mirror.open_to_write(spec.workdir, place)
    buckets.require_writable(workdir.named)


def corpus_is_healthy(spec: Spec) -> None:
    """Raises InputError if there is no prepared corpus, or `doctor` has found a problem in it."""
    from bert_jax.tools import doctor
    from bert_jax.tools.doctor import prepared_corpus

    corpus = mirror.open_to_write(spec.workdir, spec.experiment.run.corpus_dir).corpus
    if not storage_of(corpus).exists(corpus / COMPLETE):
        raise InputError(
            f"{corpus}: no prepared corpus, which machines that cost by the hour would make first; "
            f"run `bert-jax prepare` with --workdir {spec.workdir} on another machine"
        )
    lengths = tuple(sorted({phase.sequence_length for phase in spec.experiment.phases}))
    if doctor.print_findings(prepared_corpus.examine(corpus, lengths)):
        raise InputError(f"{corpus}: `doctor` finds problems, see above")


def slice_is_large_enough(spec: Spec, price_per_chip_hour: float | None) -> None:
    """Raises InputError if not every phase compiles and fits; prints the plan."""
    from bert_jax.tools.plan import report

    plan = report.make_plan(spec.experiment, [spec.rented_topology], "plan", price_per_chip_hour)
    for line in report.lines(plan):
        say(line)
    for phase in plan["slices"][0]["phases"]:
        if phase["outcome"] != "compiled":
            raise InputError(
                f"plan: phase {phase['phase']} does not run on {spec.rented_topology.name} "
                f"({phase['outcome']}, see above)"
            )
