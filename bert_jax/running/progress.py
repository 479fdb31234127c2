"""What a person sees while a run goes on, a bar or plain lines; and where its time goes.

That is counted by name, and traced for some steps, as XProf and Perfetto read it. jax traces into a
temporary folder of this process, from which whole files go into the workdir:

    W/profile/plugins/profile/steps_11_to_20/process_0.HOST.xplane.pb
                                             process_0.HOST.trace.json.gz

What stands in the way of a trace is shown, and costs the run nothing.
"""

import contextlib
import dataclasses
import errno
import os
import shutil
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from typing import Any

import jax
from etils import epath
from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)
from rich.progress import Progress as Bar
from rich.text import Text

from bert_jax import foreign
from bert_jax.errors import InputError, Unavailable, duration
from bert_jax.model import losses
from bert_jax.process import logger
from bert_jax.storage.workdir import Workdir, create_folder, new_file, translate_os_errors

# Of the annotation around each step; XProf looks for a number of this kind.
_STEP = "train"
# What is shown of a training line, and its label.
_PRETRAINING = tuple(
    (label, f"{task}_loss") for task, label in (losses.PIECES | losses.PAIRS).items()
)
_TASK = (("loss", "loss"), ("accuracy", "accuracy"))


class LineConsole(Console):
    """A console that lets a run continue if its reader, terminal or disk space disappears.

    In a notebook the console prints plain text, so that all lines are one output of the cell.
    """

    def __init__(self, quiet: bool = False):
        # Otherwise rich displays each line in Jupyter as a separate output.
        super().__init__(quiet=quiet, force_jupyter=False)
        foreign.on_write_error(self, self._on_write_error)

    def on_broken_pipe(self) -> None:
        """Silences the console; rich would end the process, and lose steps that are not saved."""
        self.quiet = True
        with open(os.devnull, "wb") as nowhere:
            os.dup2(nowhere.fileno(), sys.stdout.fileno())

    def _on_write_error(self, error: OSError) -> None:
        """Drops a line that a full disk or a lost terminal does not take."""
        if error.errno not in (errno.EIO, errno.ENOSPC, errno.EDQUOT):
            raise error
        shown = os.dup(sys.stdout.fileno())
        self.on_broken_pipe()
        sys.stdout.flush()  # what is left of the line
        if error.errno != errno.EIO:  # the next one may find room
            os.dup2(shown, sys.stdout.fileno())
            self.quiet = False
        os.close(shown)


class Progress:
    """Shows lines and, on a terminal, a bar with the time left.

    Text is never read as markup: it would swallow `[SEP]`.
    """

    def __init__(self, console: Console):
        self._console = console
        self._bar: Bar | None = None
        self._total = self._steps = 0
        self._seconds = 0.0  # of so many steps, without what was spent on compiling them

    def be_silent(self) -> None:
        """Shows nothing from now on: of several processes one speaks."""
        self._console.quiet = True

    def say(self, line: str) -> None:
        """Shows a line."""
        self._console.print(Text(line), soft_wrap=True)

    @contextlib.contextmanager
    def bar(self, done: int, total: int) -> Iterator[None]:
        """Shows steps `done` to `total` while entered."""
        self._total, self._steps, self._seconds = total, 0, 0.0
        if not self._console.is_terminal:
            yield
            return
        self._bar = Bar(
            TextColumn("{task.description}", markup=False),
            BarColumn(),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
            TimeRemainingColumn(),
            console=self._console,
        )
        self._bar.add_task("step", total=total, completed=done)
        with self._bar:
            yield
        self._bar = None

    def train(self, line: dict[str, float], seconds: dict[str, float]) -> None:
        """Shows a training line of metrics.jsonl and its timings."""
        bad = line.get("bad_steps", 0.0)
        shown = _PRETRAINING if losses.learned(line, losses.PIECES) else _TASK
        words = [
            f"step {line['step']}/{self._total}",
            *(f"{label} {line[name]:.3f}" for label, name in shown if name in line),
        ]
        if "padding" in seconds:
            words.append(
                f"{seconds['real_tokens_per_second']:,.0f} tokens/s, {seconds['padding']:.0%} "
                "padding"
            )
        if bad:
            words.append(f"{bad:.0%} of steps skipped, not finite")
        if self._bar is not None:
            self._bar.update(
                self._bar.task_ids[0], completed=line["step"], description="  ".join(words[1:])
            )
        else:
            self._steps += int(seconds.get("steps", 0))
            self._seconds += seconds.get("seconds", 0.0) - seconds.get("compilation_seconds", 0.0)
            self.say("  ".join([*words, f"{self._left(line['step'])} left"]))

    def _left(self, done: float) -> str:
        pace = self._seconds / max(self._steps, 1)
        return duration(pace * (self._total - done))


class LoggedProgress(Progress):
    """Logs the lines of a run that Python started, and prints nothing."""

    def __init__(self):
        super().__init__(Console(quiet=True, force_terminal=False, force_jupyter=False))
        self._is_silent = False

    def be_silent(self) -> None:
        """Logs nothing from now on."""
        self._is_silent = True

    def say(self, line: str) -> None:
        """Logs a line."""
        if not self._is_silent:
            logger.info("%s", line)


# What the loop waits for by name; the rest of a lap is steps. Waiting for data counts as steps:
# it is part of how fast a run trains.
NOT_STEPS = ("compilation", "evaluation", "probes", "checkpoint", "profile")


@dataclasses.dataclass
class Counts:
    """Steps, the places of their rows (padding included) and their useful operations."""

    steps: int = 0
    tokens: int = 0
    flops: int = 0


class Clock:
    """Counts steps and the seconds spent waiting.

    A device runs behind the loop that hands it steps. So a lap's counts are taken when its last
    step is handed over, and its time when that step is known to be done.
    """

    def __init__(self, peak_flops: float | None = None):
        # Operations a second that the devices can do at most; None, unknown: no utilisation.
        self.peak_flops = peak_flops
        self._counts = Counts()
        self._start = time.monotonic()
        self._waits: dict[str, float] = {}
        self._cpu_start, self._cpu_waits = time.process_time(), 0.0

    def count(self, tokens: int, flops: int) -> None:
        """Counts a step."""
        self._counts.steps += 1
        self._counts.tokens += tokens
        self._counts.flops += flops

    def take_counts(self) -> Counts:
        """Returns what was counted since the last call."""
        counts, self._counts = self._counts, Counts()
        return counts

    @contextlib.contextmanager
    def waiting(self, what: str) -> Iterator[None]:
        """Counts the time spent inside."""
        start, cpu = time.monotonic(), time.process_time()
        try:
            yield
        finally:
            self._waits[what] = self._waits.get(what, 0.0) + time.monotonic() - start
            if what in NOT_STEPS:
                self._cpu_waits += time.process_time() - cpu

    def lap(self, counts: Counts, filled: float | None = None) -> dict[str, float]:
        """Returns seconds, where they were waited, and rates over the rest; begins the next lap.

        `cpu_seconds` are those of this process in steps, on all its cores. The rate of a run is
        `real_tokens_per_second`; `tokens_per_second` and `utilisation` count `padding`, too, and
        `real_utilisation` is the latter's part without it. `filled` is the share of places that
        hold a piece; None: unknown.
        """
        now, cpu = time.monotonic(), time.process_time()
        seconds, self._start = now - self._start, now
        waits, self._waits = self._waits, {}
        busy = max(seconds - sum(waits.get(what, 0.0) for what in NOT_STEPS), 1e-9)
        in_steps = max(cpu - self._cpu_start - self._cpu_waits, 0.0)
        self._cpu_start, self._cpu_waits = cpu, 0.0
        rates = {"seconds": seconds, "cpu_seconds": in_steps, "steps": counts.steps}
        if counts.steps:
            rates["steps_per_second"] = counts.steps / busy
            rates["tokens_per_second"] = counts.tokens / busy
            if self.peak_flops is not None:
                rates["utilisation"] = counts.flops / busy / self.peak_flops
            if filled is not None:
                rates["padding"] = 1 - filled
                for name in ("tokens_per_second", "utilisation"):
                    if name in rates:
                        rates[f"real_{name}"] = rates[name] * filled
        return rates | {f"{what}_seconds": value for what, value in sorted(waits.items())}


class Profile:
    """Traces the steps of a window that this process does, in files of its own."""

    def __init__(
        self,
        steps: tuple[int, ...],  # once so many are done, until so many are; empty: none
        workdir: Workdir,
        process: int,
        say: Callable[[str], None],  # shows where a trace is, or why there is none
        clock: Clock,  # counts the time that tracing takes apart from the steps
    ):
        self._window = range(*steps) if steps else range(0)
        self._workdir, self._process = workdir, process
        self._say, self._clock = say, clock
        self._local: epath.Path | None = None  # where jax writes, while there is a trace
        self._scratch = contextlib.ExitStack()  # which removes it
        self._traced = range(0)  # steps done before each traced one
        self._gave_up = False

    @contextlib.contextmanager
    def step(self, done: int, state: Any) -> Iterator[None]:
        """Wraps the step after `done` steps, which came to `state`, and the wait for its batch.

        At the edges of the window it waits for the steps under way, so that a trace holds its own.
        """
        # After a roll-back the steps begin again further down.
        if self._local is not None and (done not in self._window or done != self._traced.stop):
            self.end(state)
        if self._local is None and done in self._window and not self._gave_up:
            self._begin(done, state)
        if self._local is None:
            yield
            return
        self._traced = range(self._traced.start, done + 1)
        with jax.profiler.StepTraceAnnotation(_STEP, step_num=done + 1):
            yield

    def _begin(self, done: int, state: Any) -> None:
        jax.block_until_ready(state)  # which is time of the steps
        with self._clock.waiting("profile"):
            options = jax.profiler.ProfileOptions()
            # Each call of Python would take some time of the steps, and most of the file.
            options.python_tracer_level = 0
            try:
                local = epath.Path(self._scratch.enter_context(tempfile.TemporaryDirectory()))
                jax.profiler.start_trace(local, profiler_options=options)
            except (OSError, RuntimeError) as error:
                self._scratch.close()
                self._gave_up = True
                self._say(f"no profile: {error}")
                return
            self._local, self._traced = local, range(done, done)

    def end(self, state: Any = None) -> None:
        """Ends and writes the trace, if there is one, once `state` is there."""
        if self._local is None:
            return
        steps = f"steps_{self._traced.start + 1}_to_{self._traced.stop}"
        place = f"plugins/profile/{steps}"  # as XProf looks for it
        target = self._workdir.profile / place
        local, self._local = self._local, None
        jax.block_until_ready(state)
        with self._clock.waiting("profile"), self._scratch:
            try:
                with translate_os_errors(local):
                    jax.profiler.stop_trace()
                with translate_os_errors(target):
                    self._send(local, target)
            except (InputError, Unavailable, OSError, RuntimeError) as error:
                self._say(f"no profile of {steps.replace('_', ' ')}: {error}")
            else:
                named = self._workdir.named / "profile" / place
                self._say(f"profile of {steps.replace('_', ' ')}: {named}")

    def _send(self, local: epath.Path, target: epath.Path) -> None:
        """Copies the files that jax wrote, all or none."""
        root = self._workdir.root
        inside = os.path.relpath(target, root)
        if os.path.realpath(target) != os.path.join(os.path.realpath(root), inside):
            raise InputError(f"{self._workdir.profile}: is a link, or holds one; remove it")
        with create_folder(target), contextlib.ExitStack() as sent:
            # Of the same steps, before a restart, perhaps on another host.
            for path in target.glob(f"process_{self._process}.*"):
                path.unlink()
            for path in sorted(local.glob("plugins/profile/*/*")):
                place = target / f"process_{self._process}.{path.name}"
                sent.callback(place.unlink, missing_ok=True)
                with new_file(place) as temporary:
                    shutil.copyfile(path, temporary)
            sent.pop_all()
