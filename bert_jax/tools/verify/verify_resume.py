"""`bert-jax verify-resume`: the undisturbed run, the killed one, and what they have in common.

W/verify.json          what was asked for; a folder with it may be made again
W/experiment.json      the experiment, with its corpus in W/corpus
W/corpus/              made without a kill
W/undisturbed/         the run without a kill
W/killed/              the run that was killed; killed-2 goes on where its end came too early
W/prepared/N/          the corpus of round N, if it differs
W/NAME.log, .journal   what the starts of each printed, and journaled (see tools.verify.child)
"""

import dataclasses
import json
import os
import pathlib
import re
import shutil
import signal
import time
from collections.abc import Callable

from etils import epath

from bert_jax import config, errors
from bert_jax.config import Experiment
from bert_jax.errors import InputError, pluralize, printable
from bert_jax.storage.workdir import lock, require_local, translate_os_errors, write_atomic
from bert_jax.tools.verify import compare, resume
from bert_jax.tools.verify.compare import Journal, StateComparison
from bert_jax.tools.verify.faults import Plan
from bert_jax.tools.verify.resume import Children, Killed, ResumedRun, Round, Undisturbed

FORMAT_VERSION = 1

_MARK = "verify.json"
# Earlier versions made the last two.
_OURS = re.compile(
    rf"lock|{_MARK}|\.({_MARK}|experiment\.json)\.\d+\.tmp|experiment\.json|"
    r"(corpus|undisturbed|killed(-\d+)?|prepared|nudged|elsewhere)(\.log|\.journal)?"
)

# A start takes as long as the undisturbed run at most, and this many times more on a busy machine.
_PATIENCE, _LEAST_PATIENCE = 3.0, 600.0

_HEADER = f"{'round':>5}  {'kind':<27} {'from step':>9} {'killed at':>9} {'exit':>5} {'seconds':>8}"

Say = Callable[[str], None]
Outcome = tuple[Round, Killed]


def verify(experiment: Experiment, root: epath.Path, count: int, seed: int, say: Say) -> int:
    """Runs the experiment undisturbed and killed `count` times; returns how many things differ.

    `root` is W, a folder of this machine: new, empty, or of an earlier `verify-resume`. The corpus
    is made there; `seed` draws the steps at which the kills come.
    """
    _require_possible(experiment, root, count)
    folder = pathlib.Path(root).absolute()
    with lock(root):
        begun = time.monotonic()
        asked = {"experiment": experiment.name, "rounds": count, "seed": seed}
        mark = json.dumps({"format_version": FORMAT_VERSION, **asked}, indent=2)
        write_atomic(epath.Path(folder / _MARK), mark + "\n")
        _clear(folder, keep=_MARK)
        run = dataclasses.replace(experiment.run, corpus_dir=str(folder / "corpus"))
        experiment = dataclasses.replace(experiment, run=run)
        write_atomic(epath.Path(folder / "experiment.json"), config.to_json(experiment))
        not_finite = resume.steps_without_loss(experiment, seed)
        undisturbed, children, ends = _undisturbed(experiment, folder, not_finite, say)
        outcomes, runs = _kill(folder, undisturbed, children, count, seed, say)
        for one in runs:
            ends += _finished(experiment, folder, one)
        return _report(outcomes, ends, time.monotonic() - begun, say)


def _require_possible(experiment: Experiment, root: epath.Path, count: int) -> None:
    if count < 1:
        raise InputError(f"--rounds {count}: must be at least 1")
    require_local(root)
    if os.environ.get("JAX_NUM_PROCESSES", "1") != "1":
        raise InputError(
            "JAX_NUM_PROCESSES: this command starts processes of its own; unset it, and start the "
            "command once"
        )
    for name in ("checkpoint_every", "eval_every"):
        every, total = getattr(experiment.run, name), experiment.total_steps
        if every >= total:
            why = f"must be below the {total} steps of the run, so that a kill can hit one"
            raise InputError(f"run.{name}={every}: {why}; set it lower")
    with translate_os_errors(root):
        names = sorted(path.name for path in root.iterdir()) if root.exists() else []
    strange = [name for name in names if not _OURS.fullmatch(name)]
    if strange or (names not in ([], ["lock"]) and _MARK not in names):
        raise InputError(
            f"{root}: holds {(strange or names)[0]}, which `verify-resume` did not make; choose "
            "another folder with --workdir"
        )


def _clear(folder: pathlib.Path, keep: str = "") -> None:
    """Removes all but the lock and what is to be kept."""
    with translate_os_errors(folder):
        for path in folder.iterdir():
            if path.is_dir():
                shutil.rmtree(path)
            elif path.name not in ("lock", keep):
                path.unlink()


def _undisturbed(
    experiment: Experiment, folder: pathlib.Path, not_finite: range, say: Say
) -> tuple[Undisturbed, Children, list[StateComparison]]:
    """Makes the corpus and the run that all others are compared with, and looks at its rows."""
    place, journal = folder / "undisturbed", folder / "undisturbed.journal"
    children = Children(folder / "experiment.json")
    plan = Plan(None, str(journal), not_finite=tuple(not_finite))
    ended = children.run("pretrain", place, plan)
    if ended.code == errors.BAD_INPUT:
        _clear(folder)
        raise InputError("; ".join(ended.tail[-1:]).removeprefix("bert-jax: "))
    if ended.code != errors.FINISHED:
        raise InputError(f"{place}.log: the undisturbed run {ended}")
    say(f"undisturbed: {ended.seconds:.1f} s")
    patience = max(_LEAST_PATIENCE, _PATIENCE * ended.seconds)
    undisturbed = Undisturbed.of(experiment, place, Journal.read(journal), not_finite)
    ends = [compare.rows(place.name, experiment, undisturbed.planned)]
    if not_finite:
        steps = f"{not_finite[0]} to {not_finite[-1]}"
        what = f"went back over steps {steps}, whose loss was made not finite"
        ends.append(
            StateComparison(place.name, what, [] if undisturbed.rolled_back else ["it did not"])
        )
    return undisturbed, dataclasses.replace(children, patience=patience), ends


def _kill(
    folder: pathlib.Path, run: Undisturbed, children: Children, count: int, seed: int, say: Say
) -> tuple[list[Outcome], list[ResumedRun]]:
    """Kills `count` times; returns what came of each, and the runs that were killed."""
    if run.rolled_back is None:
        say(
            "left out: kills at a roll-back: this run has none (optimizer.after_bad_steps=stop), "
            "or too few steps after its first checkpoint (optimizer.bad_steps_in_a_row)"
        )
    say(_HEADER)
    outcomes: list[Outcome] = []
    runs: list[ResumedRun] = []
    for number, one in enumerate(resume.draw(run, count, seed), 1):
        if one.kind == "in prepare":
            killed = _kill_prepare(folder, number, one, children)
        else:
            # A run that came to its end without being killed is left; another is, from the start.
            for _ in range(2):
                if not runs or runs[-1].is_at_its_end:
                    name = f"killed-{len(runs) + 1}" if runs else "killed"
                    runs.append(ResumedRun(children, folder / name, run))
                killed = runs[-1].kill(one)
                if not runs[-1].is_at_its_end:
                    break
            else:
                killed.differences.append("came to its end twice without being killed")
        outcomes.append((one, killed))
        steps = ("-" if at is None else str(at) for at in (killed.began, killed.done))
        where = " ".join(f"{at:>9}" for at in steps)
        code, seconds = killed.ended.code, killed.ended.seconds
        say(f"{number:>5}  {one.kind:<27} {where} {code:>5} {seconds:>8.1f}")
        for difference in killed.differences:
            say(f"      difference: {printable(difference)}")
    return outcomes, runs


def _kill_prepare(folder: pathlib.Path, number: int, one: Round, children: Children) -> Killed:
    """Kills `prepare`, runs it to its end, and compares its corpus."""
    place, within = folder / "prepared" / str(number), ("run.corpus_dir=",)
    place.parent.mkdir(exist_ok=True)
    ended = children.run("prepare", place, Plan(one.fault), within)
    again = children.run("prepare", place, Plan(), within)
    differences = [] if ended.code == -signal.SIGKILL else [f"was to be killed and {ended}"]
    if again.code != errors.FINISHED:
        differences.append(f"afterwards {again}")
    else:
        differences += compare.corpora(place / "corpus", folder / "corpus")
    if not differences:
        shutil.rmtree(place)
        place.with_name(place.name + ".log").unlink(missing_ok=True)
    return Killed(ended, None, None, differences)


def _finished(
    experiment: Experiment, folder: pathlib.Path, run: ResumedRun
) -> list[StateComparison]:
    """Ends a killed run, and compares it with the undisturbed one."""
    place, undisturbed = run.workdir, folder / "undisturbed"
    ends = [StateComparison(place.name, "went on to its end", run.finish())]
    if resume.newest_checkpoint(place) != experiment.total_steps:
        return ends  # it did not come there
    return [
        *ends,
        compare.states(experiment, place, undisturbed),
        compare.texts("metrics.jsonl", place, undisturbed),
        compare.texts("predictions.jsonl", place, undisturbed),
        compare.rows(place.name, experiment, Journal.read(run.journal).survivors()),
    ]


def _report(outcomes: list[Outcome], ends: list[StateComparison], seconds: float, say: Say) -> int:
    """Says kinds with their kills and differences, then comparisons; returns all differences."""
    say("")
    say(f"{'kind':<27} {'kills':>5} {'differences':>12}")
    for kind in dict.fromkeys(one.kind for one, _ in outcomes):
        of_kind = [killed for one, killed in outcomes if one.kind == kind]
        differing = sum(len(killed.differences) for killed in of_kind)
        say(f"{kind:<27} {len(of_kind):>5} {differing:>12}")
    say("")
    say("differences")
    for end in ends:
        say(f"{len(end.differences):>11}  {end.whose}: {end.what}")
        for difference in end.differences:
            say(f"{'':>13}{printable(difference)}")
    say("")
    differences = sum(len(x.differences) for x in (*(killed for _, killed in outcomes), *ends))
    say(f"{seconds / 60:.1f} minutes")
    say(
        f"verify-resume: {pluralize(len(outcomes), 'kill')}, {pluralize(differences, 'difference')}"
    )
    return differences
