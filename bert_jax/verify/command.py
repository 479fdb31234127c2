"""`bert-jax verify-resume`: the undisturbed run, the killed one, and what they have in common.

W/verify.json          what was asked for; this folder may be made anew
W/experiment.json      the claim, with its corpus in W/corpus
W/corpus/              made without a kill
W/undisturbed/         the run without a kill
W/killed/              the run that was killed; killed-2 goes on where its end came too early
W/prepared/N/          the corpus of round N, if it differs
W/elsewhere/           the run over other devices and processes
W/NAME.log, .notes     what the starts of each said, and noted (see verify.notes)
"""

import contextlib
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
from bert_jax.errors import InputError
from bert_jax.storage.workdir import Workdir, lock, named_errors, require_local, write_atomic
from bert_jax.training.lines import Lines
from bert_jax.verify import compare, elsewhere, rounds, tell
from bert_jax.verify.children import Children
from bert_jax.verify.compare import Comparison
from bert_jax.verify.lineage import Lineage, newest_checkpoint
from bert_jax.verify.notes import Execution, Notes
from bert_jax.verify.orders import Order
from bert_jax.verify.rounds import Calendar, Round
from bert_jax.verify.tell import Row

FORMAT_VERSION = 1

_MARK = "verify.json"
_OURS = re.compile(
    rf"lock|{_MARK}|\.({_MARK}|experiment\.json)\.\d+\.tmp|experiment\.json|"
    r"(corpus|undisturbed|killed(-\d+)?|prepared|elsewhere)(\.log|\.notes)?"
)

# A start takes as long as the undisturbed run at most, and this many times more on a busy machine.
_PATIENCE, _LEAST_PATIENCE = 3.0, 600.0

Say = Callable[[str], None]


def verify(experiment: Experiment, root: epath.Path, count: int, seed: int, say: Say) -> int:
    """Runs the experiment undisturbed and killed `count` times; returns how many things differ.

    Args:
      experiment: the claim, with `run.corpus_dir` put aside: the corpus is made here.
      root: W, a folder of this machine: new, empty, or of an earlier `verify-resume`.
      count: of kills.
      seed: of where they come.
      say: is given each line.

    Raises:
      InputError: a run or a folder that this cannot be done with, or an undisturbed run that fails.
    """
    _require_possible(experiment, root, count)
    folder = pathlib.Path(root).absolute()
    with lock(root):
        begun = time.monotonic()
        _clear(folder, experiment, count, seed)
        run = dataclasses.replace(experiment.run, corpus_dir=str(folder / "corpus"))
        experiment = dataclasses.replace(experiment, run=run)
        claim = folder / "experiment.json"
        write_atomic(epath.Path(claim), config.to_json(experiment))
        not_finite = rounds.steps_without_loss(experiment, seed)
        verification = Verification(experiment, folder, Children(claim), not_finite, say)
        verification.undisturbed()
        verification.kill(count, seed)
        verification.compare()
        return verification.told(time.monotonic() - begun)


def _require_possible(experiment: Experiment, root: epath.Path, count: int) -> None:
    if count < 1:
        raise InputError(f"--rounds {count}: must be at least 1")
    require_local(root)
    if os.environ.get("JAX_NUM_PROCESSES", "1") != "1":
        raise InputError(
            "JAX_NUM_PROCESSES: this command starts processes of its own; start it alone, without"
        )
    for name in ("checkpoint_every", "eval_every"):
        every, total = getattr(experiment.run, name), experiment.total_steps
        if every >= total:
            raise InputError(
                f"run.{name}={every}: comes only at the end of {total} steps; set it lower, so "
                "that there is one to be killed in"
            )
    with named_errors(root):
        names = sorted(path.name for path in root.iterdir()) if root.exists() else []
    strange = [name for name in names if not _OURS.fullmatch(name)]
    if strange or (names not in ([], ["lock"]) and _MARK not in names):
        raise InputError(
            f"{root}: holds {(strange or names)[0]}, which `verify-resume` did not make; choose "
            "another folder with --workdir"
        )


def _clear(folder: pathlib.Path, experiment: Experiment, count: int, seed: int) -> None:
    """Removes an earlier verification, and begins another."""
    asked = {
        "format_version": FORMAT_VERSION,
        "experiment": experiment.name,
        "rounds": count,
        "seed": seed,
    }
    write_atomic(epath.Path(folder / _MARK), json.dumps(asked, indent=2) + "\n")
    _remove(folder, keep=_MARK)


def _remove(folder: pathlib.Path, keep: str = "") -> None:
    """Removes all but the lock and what is to be kept."""
    with named_errors(folder):
        for path in folder.iterdir():
            if path.is_dir():
                shutil.rmtree(path)
            elif path.name not in ("lock", keep):
                path.unlink()


class Verification:
    """The runs of one folder, and what was found of them.

    Args:
      experiment: the claim.
      folder: W.
      children: start the command.
      not_finite: steps in a row whose loss is made not to be, in all runs alike.
      say: is given each line.
    """

    def __init__(
        self,
        experiment: Experiment,
        folder: pathlib.Path,
        children: Children,
        not_finite: range,
        say: Say,
    ):
        self._experiment, self._folder = experiment, folder
        self._children, self._not_finite, self._say = children, not_finite, say
        self._notes = Notes([], {}, {}, None)  # of the undisturbed run
        self._planned: dict[int, Execution] = {}  # {step: what it did there}
        self._lineages: list[Lineage] = []
        self._rows: list[Row] = []
        self._ends: list[Comparison] = []

    def undisturbed(self) -> None:
        """The corpus and the run that all others are compared with."""
        place = self._folder / "undisturbed"
        notes = place.with_name("undisturbed.notes")
        order = Order(None, str(notes), not_finite=tuple(self._not_finite))
        ended = self._children.run("pretrain", place, order)
        if ended.code != errors.FINISHED:
            said = "; ".join(ended.tail[-1:])
            if ended.code == errors.BAD_INPUT:
                _remove(self._folder)
                raise InputError(said.removeprefix("bert-jax: "))
            raise InputError(
                f"{place}.log: the undisturbed run ended with exit code {ended.code}: {said}"
            )
        self._say(f"undisturbed: {ended.seconds:.1f} s")
        self._notes = Notes.read(notes)
        self._planned = self._notes.survivors()
        patience = max(_LEAST_PATIENCE, _PATIENCE * ended.seconds)
        self._children = dataclasses.replace(self._children, patience=patience)
        self._ends.append(compare.rows(place.name, self._experiment, self._planned))
        if self._not_finite:
            went = [] if self._notes.rolled_back else ["it did not"]
            steps = f"{self._not_finite[0]} to {self._not_finite[-1]}"
            what = f"went back over steps {steps}, whose loss was made not finite"
            self._ends.append(Comparison(place.name, what, went))

    def kill(self, count: int, seed: int) -> None:
        """So many kills."""
        calendar = Calendar.of(self._experiment, self._folder / "undisturbed", self._notes)
        for kind, why in rounds.absent_kinds(calendar).items():
            self._say(f"left out: {kind}: {why}")
        self._say(tell.HEADER)
        for number, one in enumerate(rounds.draw(calendar, count, seed), 1):
            row = self._prepare(number, one) if one.kind == "in prepare" else self._run(number, one)
            self._rows.append(row)
            self._say(tell.row(row))
            for difference in row.differences:
                self._say(f"      difference: {difference}")

    def _run(self, number: int, one: Round) -> Row:
        """A kill of the run; of another one from its beginning on if this one is at its end."""
        for _ in range(2):
            if not self._lineages:
                self._new_lineage()
            killed = self._lineages[-1].kill(one)
            if killed.done is not None or killed.differences:
                return Row(number, one.kind, killed)
            self._new_lineage()
        killed.differences.append("came to its end twice without meeting its death")
        return Row(number, one.kind, killed)

    def _new_lineage(self) -> None:
        number = len(self._lineages) + 1
        place = self._folder / ("killed" if number == 1 else f"killed-{number}")
        every = self._experiment.run.checkpoint_every
        caught, _ = next(iter(self._notes.rolled_back.values()), (0, 0))
        self._lineages.append(
            Lineage(self._children, place, every, self._planned, self._not_finite, caught)
        )

    def _prepare(self, number: int, one: Round) -> Row:
        """A kill of `prepare`, which is then run to its end."""
        place = self._folder / "prepared" / str(number)
        place.parent.mkdir(exist_ok=True)
        within = ("run.corpus_dir=",)
        ended = self._children.run("prepare", place, Order(one.death), within)
        again = self._children.run("prepare", place, Order(None), within)
        found = tell.ended_only(ended)
        if ended.code != -signal.SIGKILL:
            found.differences.append(f"was to be killed, exit code {ended.code}")
        if again.code != 0:
            found.differences.append(f"exit code {again.code} afterwards: {again.tail[-1:]}")
        else:
            found.differences += compare.corpora(place / "corpus", self._folder / "corpus")
        if not found.differences:
            shutil.rmtree(place)
            with contextlib.suppress(OSError):
                place.with_name(place.name + ".log").unlink()
        return Row(number, one.kind, found)

    def compare(self) -> None:
        """Ends the killed runs, runs elsewhere, and compares all with the undisturbed one."""
        undisturbed = self._folder / "undisturbed"
        for lineage in self._lineages:
            place = lineage.workdir
            self._ends.append(Comparison(place.name, "went on to its end", lineage.finish()))
            if newest_checkpoint(place) != self._experiment.total_steps:
                continue  # it did not come there
            survivors = Notes.read(lineage.notes).survivors()
            self._ends += [
                compare.states(self._experiment, place, undisturbed),
                compare.texts("metrics.jsonl", place, undisturbed),
                compare.texts("predictions.jsonl", place, undisturbed),
                compare.rows(place.name, self._experiment, survivors),
            ]
        workdir = Workdir(undisturbed)
        starts = [line for line in Lines(workdir.timings).read() if line["kind"] == "start"]
        kind = starts[-1]["environment"]["devices"][0]
        why = elsewhere.left_out(self._experiment, kind)
        if why:
            self._say(f"left out: other devices and processes: {why}")
            return
        self._ends += elsewhere.run(
            self._children,
            self._experiment,
            self._folder / "elsewhere",
            undisturbed,
            self._planned,
            self._not_finite,
        )

    def told(self, seconds: float) -> int:
        """Says what was found; returns how many differences there are."""
        for line in tell.table(self._rows, self._ends):
            self._say(line)
        differences = sum(len(found.differences) for found in (*self._rows, *self._ends))
        self._say(f"{seconds / 60:.1f} minutes")
        self._say(f"verify-resume: {len(self._rows)} kills, {differences} differences")
        return differences
