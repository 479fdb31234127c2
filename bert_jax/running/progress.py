"""Progress for people, as a bar or plain lines; the time that a run spends; profiles.

`Clock` counts waiting time by name. `Profile` traces some steps for XProf and Perfetto. JAX writes
the trace to a temporary folder; complete files are then copied into the workdir:

    W/profile/plugins/profile/steps_11_to_20/process_0.HOST.xplane.pb
                                             process_0.HOST.trace.json.gz

An error of a trace is reported; the run continues.
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
from tqdm import tqdm

from bert_jax import foreign
from bert_jax.errors import InputError, Unavailable, duration
from bert_jax.model import losses
from bert_jax.process import logger
from bert_jax.storage.workdir import Workdir, create_folder, replace_atomically, translate_os_errors

# Name of the annotation around each step; XProf looks for its step number.
_STEP = "train"
# (label, field) of the values that are shown of a training line.
_PRETRAINING = tuple(
    (label, f"{task}_loss") for task, label in (losses.TOKENS | losses.PAIRS).items()
)
_TASK = (("loss", "loss"), ("accuracy", "accuracy"))


class LineConsole(Console):
    """A console that lets a run continue if its reader, terminal or disk space disappears.

    In a notebook the console prints plain text, so that all lines are one output of the cell.
    """

    def __init__(self, quiet: bool = False):
        # Without force_jupyter=False, rich displays each line in Jupyter as a separate output.
        super().__init__(quiet=quiet, force_jupyter=False)
        foreign.on_write_error(self, self._on_write_error)

    def on_broken_pipe(self) -> None:
        """Silences the console; rich would end the process and lose steps that are not saved."""
        self.quiet = True
        with open(os.devnull, "wb") as null_device:
            os.dup2(null_device.fileno(), sys.stdout.fileno())

    def _on_write_error(self, error: OSError) -> None:
        """Drops a line that cannot be written because of a full disk or a lost terminal."""
        if error.errno not in (errno.EIO, errno.ENOSPC, errno.EDQUOT):
            raise error
        stdout = os.dup(sys.stdout.fileno())
        self.on_broken_pipe()
        sys.stdout.flush()  # drops the rest of the line
        if error.errno != errno.EIO:  # the disk may have space for the next line
            os.dup2(stdout, sys.stdout.fileno())
            self.quiet = False
        os.close(stdout)


class Progress:
    """Shows lines and, on a terminal, a bar with the time left.

    Text is never read as markup, which would remove `[SEP]`.
    """

    def __init__(self, console: Console):
        self._console = console
        self._bar: Bar | None = None
        self._total = self._steps = 0
        self._seconds = 0.0  # of these steps, without compilation

    def silence(self) -> None:
        """Shows nothing from now on: only process 0 reports."""
        self._console.quiet = True

    def report(self, line: str) -> None:
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
        parts = self._describe(line, seconds)
        if self._bar is not None:
            self._bar.update(
                self._bar.task_ids[0], completed=line["step"], description="  ".join(parts)
            )
        else:
            self._steps += int(seconds.get("steps", 0))
            self._seconds += seconds.get("seconds", 0.0) - seconds.get("compilation_seconds", 0.0)
            step, time_left = f"step {line['step']}/{self._total}", self._time_left(line["step"])
            self.report("  ".join([step, *parts, f"{time_left} left"]))

    def _describe(self, line: dict[str, float], seconds: dict[str, float]) -> list[str]:
        """Returns losses, speed and skipped steps of a training line in words."""
        fields = _PRETRAINING if losses.find_task(line, losses.TOKENS) else _TASK
        parts = [f"{label} {line[name]:.3f}" for label, name in fields if name in line]
        if "padding" in seconds:
            parts.append(
                f"{seconds['real_tokens_per_second']:,.0f} tokens/s, {seconds['padding']:.0%} "
                "padding"
            )
        if bad := line.get("bad_steps", 0.0):
            parts.append(f"{bad:.0%} of steps skipped, not finite")
        return parts

    def _time_left(self, done: float) -> str:
        seconds_per_step = self._seconds / max(self._steps, 1)
        return duration(seconds_per_step * (self._total - done))


class LoggedProgress(Progress):
    """Logs the lines of a run that was started from Python; prints nothing."""

    def __init__(self):
        super().__init__(Console(quiet=True, force_terminal=False, force_jupyter=False))
        self._is_silent = False

    def silence(self) -> None:
        self._is_silent = True

    def report(self, line: str) -> None:
        if not self._is_silent:
            logger.info("%s", line)


class BarProgress(LoggedProgress):
    """Also shows a bar on standard error, which a notebook or a terminal updates in place."""

    def __init__(self):
        super().__init__()
        self._step_bar: tqdm | None = None

    @contextlib.contextmanager
    def bar(self, done: int, total: int) -> Iterator[None]:
        with super().bar(done, total), tqdm(total=total, initial=done, unit=" steps") as bar:
            bar.disable = bar.disable or self._is_silent
            self._step_bar = bar
            yield
        self._step_bar = None

    def train(self, line: dict[str, float], seconds: dict[str, float]) -> None:
        super().train(line, seconds)
        if self._step_bar is not None:
            self._step_bar.set_postfix_str("  ".join(self._describe(line, seconds)), False)
            self._step_bar.update(line["step"] - self._step_bar.n)


# Names of waits that are no part of steps; the rest of a lap is. Waiting for data counts as steps,
# since it limits the speed of training.
NOT_STEPS = ("compilation", "evaluation", "probes", "checkpoint", "profile")


@dataclasses.dataclass
class Counts:
    """Steps, the positions of their rows (with padding) and their useful operations."""

    steps: int = 0
    tokens: int = 0
    flops: int = 0


class Clock:
    """Counts steps and waiting times, lap by lap; a lap is the steps of one line.

    The devices run behind the loop that dispatches steps. So the counts of a lap are taken when its
    last step is dispatched, and its time when that step is done.
    """

    def __init__(self, peak_flops: float | None = None):
        # Peak operations per second of all devices; None: unknown, so no utilisation is computed.
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
    def waiting(self, name: str) -> Iterator[None]:
        """Counts the time spent inside under this name."""
        start, cpu = time.monotonic(), time.process_time()
        try:
            yield
        finally:
            self._waits[name] = self._waits.get(name, 0.0) + time.monotonic() - start
            if name in NOT_STEPS:
                self._cpu_waits += time.process_time() - cpu

    def lap(self, counts: Counts, filled: float | None = None) -> dict[str, float]:
        """Returns the seconds of a lap, waiting times and rates of steps; begins the next lap.

        `cpu_seconds` are the seconds of all cores of this process in steps. The speed of a run is
        `real_tokens_per_second`; `tokens_per_second` and `utilisation` include `padding`, while
        `real_utilisation` does not. `filled` is the share of positions that hold a token; None:
        unknown.
        """
        now, cpu = time.monotonic(), time.process_time()
        seconds, self._start = now - self._start, now
        waits, self._waits = self._waits, {}
        step_seconds = max(seconds - sum(waits.get(name, 0.0) for name in NOT_STEPS), 1e-9)
        cpu_seconds = max(cpu - self._cpu_start - self._cpu_waits, 0.0)
        self._cpu_start, self._cpu_waits = cpu, 0.0
        rates = {"seconds": seconds, "cpu_seconds": cpu_seconds, "steps": counts.steps}
        if counts.steps:
            rates["steps_per_second"] = counts.steps / step_seconds
            rates["tokens_per_second"] = counts.tokens / step_seconds
            if self.peak_flops is not None:
                rates["utilisation"] = counts.flops / step_seconds / self.peak_flops
            if filled is not None:
                rates["padding"] = 1 - filled
                for name in ("tokens_per_second", "utilisation"):
                    if name in rates:
                        rates[f"real_{name}"] = rates[name] * filled
        return rates | {f"{name}_seconds": value for name, value in sorted(waits.items())}


class Profile:
    """Traces a window of steps on this process, in files of its own."""

    def __init__(
        self,
        steps: tuple[int, ...],  # steps done at the start and at the end; empty: no trace
        workdir: Workdir,
        process: int,
        report: Callable[[str], None],  # is given the path of a trace, or the reason for none
        clock: Clock,  # counts the time of tracing separately
    ):
        self._window = range(*steps) if steps else range(0)
        self._workdir, self._process = workdir, process
        self._report, self._clock = report, clock
        self._local: epath.Path | None = None  # the folder that JAX writes, during a trace
        self._cleanup = contextlib.ExitStack()  # removes the folder
        self._traced = range(0)  # numbers of steps done before each traced step
        self._has_failed = False

    @contextlib.contextmanager
    def step(self, done: int, state: Any) -> Iterator[None]:
        """Wraps the step after `done` steps, whose result is `state`, and the wait for its batch.

        At both ends of the window waits for dispatched steps: a trace holds only its own steps.
        """
        # After a roll-back, earlier steps are repeated.
        if self._local is not None and (done not in self._window or done != self._traced.stop):
            self.end(state)
        if self._local is None and done in self._window and not self._has_failed:
            self._begin(done, state)
        if self._local is None:
            yield
            return
        self._traced = range(self._traced.start, done + 1)
        with jax.profiler.StepTraceAnnotation(_STEP, step_num=done + 1):
            yield

    def _begin(self, done: int, state: Any) -> None:
        jax.block_until_ready(state)  # counts as time of the steps
        with self._clock.waiting("profile"):
            options = jax.profiler.ProfileOptions()
            # Tracing Python calls would slow the steps down and fill most of the file.
            options.python_tracer_level = 0
            try:
                local = epath.Path(self._cleanup.enter_context(tempfile.TemporaryDirectory()))
                jax.profiler.start_trace(local, profiler_options=options)
            except (OSError, RuntimeError) as error:
                self._cleanup.close()
                self._has_failed = True
                self._report(f"no profile: {error}")
                return
            self._local, self._traced = local, range(done, done)

    def end(self, state: Any = None) -> None:
        """Ends and writes the trace, if there is one, after `state` is computed."""
        if self._local is None:
            return
        steps = f"steps_{self._traced.start + 1}_to_{self._traced.stop}"
        folder = f"plugins/profile/{steps}"  # where XProf looks for traces
        target = self._workdir.profile / folder
        local, self._local = self._local, None
        jax.block_until_ready(state)
        with self._clock.waiting("profile"), self._cleanup:
            try:
                with translate_os_errors(local):
                    jax.profiler.stop_trace()
                with translate_os_errors(target):
                    self._copy(local, target)
            except (InputError, Unavailable, OSError, RuntimeError) as error:
                self._report(f"no profile of {steps.replace('_', ' ')}: {error}")
            else:
                path = self._workdir.address / "profile" / folder
                self._report(f"profile of {steps.replace('_', ' ')}: {path}")

    def _copy(self, local: epath.Path, target: epath.Path) -> None:
        """Copies the files that JAX wrote, all or none."""
        root = self._workdir.root
        relative = os.path.relpath(target, root)
        if os.path.realpath(target) != os.path.join(os.path.realpath(root), relative):
            raise InputError(f"{self._workdir.profile}: is a link, or holds one; remove it")
        with create_folder(target), contextlib.ExitStack() as copies:
            # Traces of the same steps before a restart, perhaps on another host.
            for path in target.glob(f"process_{self._process}.*"):
                path.unlink()
            for path in sorted(local.glob("plugins/profile/*/*")):
                copy = target / f"process_{self._process}.{path.name}"
                copies.callback(copy.unlink, missing_ok=True)
                with replace_atomically(copy) as temporary:
                    shutil.copyfile(path, temporary)
            copies.pop_all()
