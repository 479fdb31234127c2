"""`bert-jax verify-resume`: compares a run that is killed repeatedly with an undisturbed run.

W/verify.json          the command's arguments; marks a folder that the command may clear and reuse
W/experiment.json      the experiment, with its corpus in W/corpus
W/corpus/              the corpus, made without a kill
W/undisturbed/         the run without a kill
W/killed/              the run that is killed; if it ends before the last kill, killed-2 follows
W/prepared/N/          the corpus of a killed and repeated `prepare`, round N, if it differs
W/NAME.log, .journal   output and journal of all starts in a folder NAME (see tools.verify.child)
"""

import dataclasses
import json
import os
import re
import shutil
import signal
import time
from collections.abc import Callable
from pathlib import Path

from etils import epath

from bert_jax import config, errors
from bert_jax.config import Experiment
from bert_jax.errors import InputError, pluralize, printable
from bert_jax.storage.locks import lock
from bert_jax.storage.workdir import require_local, translate_os_errors, write_atomic
from bert_jax.tools.verify import compare, kills
from bert_jax.tools.verify.compare import Journal, RunCheck
from bert_jax.tools.verify.faults import Plan
from bert_jax.tools.verify.kills import Attempt, Launcher, ResumedRun, Round, Undisturbed

FORMAT_VERSION = 1

_MARKER_FILE = "verify.json"
# Names of what this command makes; earlier versions made two more runs, `nudged` and `elsewhere`.
_KNOWN_NAMES = re.compile(
    rf"lock|{_MARKER_FILE}|\.({_MARKER_FILE}|experiment\.json)\.\d+\.tmp|experiment\.json|"
    r"(corpus|undisturbed|killed(-\d+)?|prepared|nudged|elsewhere)(\.log|\.journal)?"
)

# A start counts as hung after factor x seconds of the undisturbed run, or the minimum if longer.
_TIMEOUT_FACTOR, _MIN_TIMEOUT = 3.0, 600.0

_HEADER = f"{'round':>5}  {'kind':<27} {'from step':>9} {'killed at':>9} {'exit':>5} {'seconds':>8}"

Print = Callable[[str], None]
Outcome = tuple[Round, Attempt]


def verify(experiment: Experiment, root: epath.Path, count: int, seed: int, report: Print) -> int:
    """Runs the experiment undisturbed and killed `count` times; returns how many things differ.

    `root` is W, a folder of this machine: new, empty, or of an earlier `verify-resume`. The corpus
    is made in W; `seed` draws the steps at which the kills come.
    """
    _check_preconditions(experiment, root, count)
    folder = Path(root).absolute()
    with lock(root):
        start_time = time.monotonic()
        arguments = {"experiment": experiment.name, "rounds": count, "seed": seed}
        mark = json.dumps({"format_version": FORMAT_VERSION, **arguments}, indent=2)
        write_atomic(epath.Path(folder / _MARKER_FILE), mark + "\n")
        _clear(folder, keep=_MARKER_FILE)
        settings = dataclasses.replace(experiment.run, corpus_dir=str(folder / "corpus"))
        experiment = dataclasses.replace(experiment, run=settings)
        write_atomic(epath.Path(folder / "experiment.json"), config.to_json(experiment))
        bad_steps = kills.draw_nonfinite_steps(experiment, seed)
        undisturbed, launcher, checks = _run_undisturbed(experiment, folder, bad_steps, report)
        rounds = kills.draw(undisturbed, count, seed)
        outcomes, runs = _kill(folder, undisturbed, launcher, rounds, report)
        for resumed in runs:
            checks += _finish(experiment, folder, resumed)
        return _report(outcomes, checks, time.monotonic() - start_time, report)


def _check_preconditions(experiment: Experiment, root: epath.Path, count: int) -> None:
    if count < 1:
        raise InputError(f"--rounds {count}: must be at least 1")
    require_local(root)
    if os.environ.get("JAX_NUM_PROCESSES", "1") != "1":
        raise InputError(
            "JAX_NUM_PROCESSES: this command starts processes of its own; unset the variable, and "
            "start the command once"
        )
    for name, event in (("checkpoint_every", "save"), ("eval_every", "evaluation")):
        every, total = getattr(experiment.run, name), experiment.total_steps
        if every >= total:
            rule = f"must be below the {total} steps of the run: kills need an earlier {event}"
            raise InputError(f"run.{name}={every}: {rule}; use a smaller number")
    with translate_os_errors(root):
        names = sorted(path.name for path in root.iterdir()) if root.exists() else []
    unknown = [name for name in names if not _KNOWN_NAMES.fullmatch(name)]
    if unknown or (names not in ([], ["lock"]) and _MARKER_FILE not in names):
        raise InputError(
            f"{root}: holds {(unknown or names)[0]}, which `verify-resume` did not make; choose "
            "another folder with --workdir"
        )


def _clear(folder: Path, keep: str = "") -> None:
    """Removes everything except the lock and the file `keep`."""
    with translate_os_errors(folder):
        for path in folder.iterdir():
            if path.is_dir():
                shutil.rmtree(path)
            elif path.name not in ("lock", keep):
                path.unlink()


def _run_undisturbed(
    experiment: Experiment, folder: Path, bad_steps: range, report: Print
) -> tuple[Undisturbed, Launcher, list[RunCheck]]:
    """Makes the corpus and the run that all others are compared with, and checks its rows."""
    workdir, journal = folder / "undisturbed", folder / "undisturbed.journal"
    launcher = Launcher(folder / "experiment.json")
    plan = Plan(None, str(journal), nonfinite_steps=tuple(bad_steps))
    result = launcher.run("pretrain", workdir, plan)
    if result.code == errors.BAD_INPUT:
        _clear(folder)
        raise InputError("; ".join(result.tail[-1:]).removeprefix("bert-jax: "))
    if result.code != errors.FINISHED:
        raise InputError(f"{workdir}.log: the undisturbed run {result}")
    report(f"undisturbed: {result.seconds:.1f} s")
    timeout = max(_MIN_TIMEOUT, _TIMEOUT_FACTOR * result.seconds)
    undisturbed = Undisturbed.of(experiment, workdir, Journal.read(journal), bad_steps)
    checks = [compare.rows(workdir.name, experiment, undisturbed.executions)]
    if bad_steps:
        steps = f"{bad_steps[0]} to {bad_steps[-1]}"
        description = f"rolled back over steps {steps}, whose loss was made not finite"
        differences = [] if undisturbed.rolled_back else ["the run did not roll back"]
        checks.append(RunCheck(workdir.name, description, differences))
    return undisturbed, dataclasses.replace(launcher, timeout=timeout), checks


def _kill(
    folder: Path, undisturbed: Undisturbed, launcher: Launcher, rounds: list[Round], report: Print
) -> tuple[list[Outcome], list[ResumedRun]]:
    """Kills once a round; returns the outcome of each kill, and the killed runs."""
    if undisturbed.rolled_back is None:
        report(
            "left out: kills at a roll-back: the run does not roll back (optimizer.after_bad_steps="
            "stop, or too few steps for optimizer.bad_steps_in_a_row after the first checkpoint)"
        )
    report(_HEADER)
    outcomes: list[Outcome] = []
    runs: list[ResumedRun] = []
    for number, round_ in enumerate(rounds, 1):
        if round_.kind == "in prepare":
            attempt = _kill_prepare(folder, number, round_, launcher)
        else:
            # If a run ends before it is killed, a new run is started and killed instead.
            for _ in range(2):
                if not runs or runs[-1].is_complete:
                    name = f"killed-{len(runs) + 1}" if runs else "killed"
                    runs.append(ResumedRun(launcher, folder / name, undisturbed))
                attempt = runs[-1].kill(round_)
                if not runs[-1].is_complete:
                    break
            else:
                attempt.differences.append("came to its end twice without being killed")
        outcomes.append((round_, attempt))
        steps = ("-" if step is None else str(step) for step in (attempt.restored, attempt.done))
        cells = " ".join(f"{step:>9}" for step in steps)
        code, seconds = attempt.result.code, attempt.result.seconds
        report(f"{number:>5}  {round_.kind:<27} {cells} {code:>5} {seconds:>8.1f}")
        for difference in attempt.differences:
            report(f"      difference: {printable(difference)}")
    return outcomes, runs


def _kill_prepare(folder: Path, number: int, round_: Round, launcher: Launcher) -> Attempt:
    """Kills `prepare`, repeats it to its end, and compares the corpus with the undisturbed one."""
    workdir, settings = folder / "prepared" / str(number), ("run.corpus_dir=",)
    workdir.parent.mkdir(exist_ok=True)
    result = launcher.run("prepare", workdir, Plan(round_.fault), settings)
    repeated = launcher.run("prepare", workdir, Plan(), settings)
    differences = [] if result.code == -signal.SIGKILL else [f"was to be killed, but {result}"]
    if repeated.code != errors.FINISHED:
        differences.append(f"the repeated `prepare` {repeated}")
    else:
        differences += compare.corpora(workdir / "corpus", folder / "corpus")
    if not differences:
        shutil.rmtree(workdir)
        workdir.with_name(workdir.name + ".log").unlink(missing_ok=True)
    return Attempt(result, None, None, differences)


def _finish(experiment: Experiment, folder: Path, run: ResumedRun) -> list[RunCheck]:
    """Finishes a killed run, and compares it with the undisturbed run."""
    workdir, undisturbed = run.workdir, folder / "undisturbed"
    checks = [RunCheck(workdir.name, "resumed to its end", run.finish())]
    if kills.newest_checkpoint(workdir) != experiment.total_steps:
        return checks  # the run did not reach its end
    return [
        *checks,
        compare.states(experiment, workdir, undisturbed),
        compare.json_lines("metrics.jsonl", workdir, undisturbed),
        compare.json_lines("predictions.jsonl", workdir, undisturbed),
        compare.rows(workdir.name, experiment, Journal.read(run.journal).survivors()),
    ]


def _report(outcomes: list[Outcome], checks: list[RunCheck], seconds: float, report: Print) -> int:
    """Reports kills by kind, then checks; returns the number of all differences."""
    report(f"\n{'kind':<27} {'kills':>5} {'differences':>12}")
    for kind in dict.fromkeys(round_.kind for round_, _ in outcomes):
        counts = [len(attempt.differences) for round_, attempt in outcomes if round_.kind == kind]
        report(f"{kind:<27} {len(counts):>5} {sum(counts):>12}")
    report("\ndifferences")
    for check in checks:
        count = len(check.differences)
        report(f"{count:>11}  {check.run_name}: {check.description}")
        for difference in check.differences:
            report(f"{'':>13}{printable(difference)}")
    checked = (*(attempt for _, attempt in outcomes), *checks)
    total = sum(len(result.differences) for result in checked)
    report(f"\n{seconds / 60:.1f} minutes")
    report(f"verify-resume: {pluralize(len(outcomes), 'kill')}, {pluralize(total, 'difference')}")
    return total
