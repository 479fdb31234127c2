"""Shows the progress of a run, measures where its time goes, and traces steps.

`Progress` shows lines and a bar. `Clock` measures time. `Profile` traces some steps for XProf and
Perfetto. JAX writes a trace to a temporary folder; complete files are then copied into the workdir:

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

from bert_jax import private_apis
from bert_jax.errors import InputError, Unavailable, duration
from bert_jax.model import losses
from bert_jax.process import logger
from bert_jax.storage.workdir import Workdir, create_folder, replace_atomically, translate_os_errors

# Name of the annotation around each step; XProf looks for its step number.
_STEP_ANNOTATION = "train"
# (label, field) of the values of a training line that are shown, in pre-training and fine-tuning.
_PRETRAINING_FIELDS = tuple(
    (label, f"{name}_loss") for name, label in (losses.TOKENS | losses.PAIRS).items()
)
_FINETUNING_FIELDS = (("loss", "loss"), ("accuracy", "accuracy"))


class LineConsole(Console):
    """A console that lets a run continue if its reader, terminal or disk space disappears.

    In a notebook the console prints plain text, so that all lines are one output of the cell.
    """

    def __init__(self, quiet: bool = False):
        # Without force_jupyter=False, rich displays each line in Jupyter as a separate output.
        super().__init__(quiet=quiet, force_jupyter=False)
        private_apis.on_write_error(self, self._on_write_error)  # uses a private name of rich

    def on_broken_pipe(self) -> None:
        """Drops all further output; rich would end the process, and unsaved steps would be lost."""
        self.quiet = True
        with open(os.devnull, "wb") as null_device:
            os.dup2(null_device.fileno(), sys.stdout.fileno())

    def _on_write_error(self, error: OSError) -> None:
        """Drops a line that cannot be written because of a full disk or a lost terminal."""
        if error.errno not in (errno.EIO, errno.ENOSPC, errno.EDQUOT):
            raise error
        # Python's buffer still holds the line. It is flushed to the null device; then the old
        # standard output is put back, unless the terminal is lost.
        old_stdout = os.dup(sys.stdout.fileno())
        self.on_broken_pipe()
        sys.stdout.flush()
        if error.errno != errno.EIO:  # the disk may have space for the next line
            os.dup2(old_stdout, sys.stdout.fileno())
            self.quiet = False
        os.close(old_stdout)


class Progress:
    """Shows lines of text and, on a terminal, a bar with the time left.

    Text is never read as markup, which would remove `[SEP]`.
    """

    def __init__(self, console: Console):
        self._console = console
        self._bar: Bar | None = None
        self._total = 0  # steps of the run
        # Steps since the bar began and their time, without compilation: for the time left.
        self._steps, self._seconds = 0, 0.0

    def silence(self) -> None:
        """Shows nothing from now on; called on processes other than process 0."""
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

    def show_training_line(self, line: dict[str, float], timings: dict[str, float]) -> None:
        """Shows a training line of metrics.jsonl and the line of timings.jsonl for its steps."""
        parts = self._describe(line, timings)
        if self._bar is not None:
            self._bar.update(
                self._bar.task_ids[0], completed=line["step"], description="  ".join(parts)
            )
        else:
            self._steps += int(timings.get("steps", 0))
            self._seconds += timings.get("seconds", 0.0) - timings.get("compilation_seconds", 0.0)
            step, time_left = f"step {line['step']}/{self._total}", self._time_left(line["step"])
            self.report("  ".join([step, *parts, f"{time_left} left"]))

    def _describe(self, line: dict[str, float], timings: dict[str, float]) -> list[str]:
        """Returns losses, speed and skipped steps of a training line in words."""
        is_pretraining = bool(losses.find_task(line, losses.TOKENS))
        fields = _PRETRAINING_FIELDS if is_pretraining else _FINETUNING_FIELDS
        parts = [f"{label} {line[name]:.3f}" for label, name in fields if name in line]
        if "padding" in timings:
            parts.append(
                f"{timings['real_tokens_per_second']:,.0f} tokens/s, {timings['padding']:.0%} "
                "padding"
            )
        if bad_share := line.get("bad_steps", 0.0):  # excluded steps are counted, too
            parts.append(f"{bad_share:.0%} of steps skipped, not finite")
        return parts

    def _time_left(self, done: float) -> str:
        seconds_per_step = self._seconds / max(self._steps, 1)
        return duration(seconds_per_step * (self._total - done))


class LoggedProgress(Progress):
    """Logs the lines of a run that was started from Python instead of printing them."""

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

    def show_training_line(self, line: dict[str, float], timings: dict[str, float]) -> None:
        super().show_training_line(line, timings)
        if self._step_bar is not None:
            description = "  ".join(self._describe(line, timings))
            self._step_bar.set_postfix_str(description, refresh=False)
            self._step_bar.update(line["step"] - self._step_bar.n)


# Categories of `Clock.waiting` that are not time of steps. All other time of a window is: also
# waiting for data, since it limits the speed of training. "prepare" and "restore" are not listed,
# since they never are in the window of a training line, but in those of starts and roll-backs.
NOT_STEP_TIME = ("compilation", "evaluation", "probes", "checkpoint", "profile")


@dataclasses.dataclass
class Counts:
    """The amounts that the steps of a window have processed."""

    steps: int = 0
    tokens: int = 0  # with padding
    flops: int = 0  # see model.flops; with padding


class Clock:
    """Counts steps and measures their time and waiting times, in windows.

    A window is the steps of one training line, or the time before another line of timings.jsonl.
    The devices run behind the loop that dispatches steps. So the counts of a window are taken when
    its last step is dispatched, and its time when that step is done.
    """

    def __init__(self, peak_flops: float | None = None):
        # Peak operations per second of all devices; None: unknown, so no utilisation is computed.
        self.peak_flops = peak_flops
        self._counts = Counts()
        # The start of the current window, and its waiting times in seconds by category.
        self._start = time.monotonic()
        self._waits: dict[str, float] = {}
        # CPU time at its start, and the CPU time of its waits in `NOT_STEP_TIME`.
        self._cpu_start, self._cpu_waits = time.process_time(), 0.0

    def count(self, tokens: int, flops: int) -> None:
        """Counts a dispatched step."""
        self._counts.steps += 1
        self._counts.tokens += tokens
        self._counts.flops += flops

    def take_counts(self) -> Counts:
        """Returns what was counted since the last call."""
        counts, self._counts = self._counts, Counts()
        return counts

    @contextlib.contextmanager
    def waiting(self, category: str) -> Iterator[None]:
        """Adds the time spent inside to this category, such as "data" or "evaluation"."""
        start, cpu = time.monotonic(), time.process_time()
        try:
            yield
        finally:
            self._waits[category] = self._waits.get(category, 0.0) + time.monotonic() - start
            if category in NOT_STEP_TIME:
                self._cpu_waits += time.process_time() - cpu

    def end_window(self, counts: Counts, filled: float | None = None) -> dict[str, float]:
        """Returns the timings of a window, for timings.jsonl; begins the next window.

        `cpu_seconds` is the CPU time of this process in steps, added up over all cores. The speed
        of a run is `real_tokens_per_second`; `tokens_per_second` and `utilisation` include
        `padding`, while `real_utilisation` does not. `filled` is the share of positions that hold a
        token; None: unknown.
        """
        now, cpu = time.monotonic(), time.process_time()
        seconds, self._start = now - self._start, now
        waits, self._waits = self._waits, {}
        step_seconds = max(seconds - sum(waits.get(name, 0.0) for name in NOT_STEP_TIME), 1e-9)
        cpu_seconds = max(cpu - self._cpu_start - self._cpu_waits, 0.0)
        self._cpu_start, self._cpu_waits = cpu, 0.0
        timings = {"seconds": seconds, "cpu_seconds": cpu_seconds, "steps": counts.steps}
        if counts.steps:
            timings["steps_per_second"] = counts.steps / step_seconds
            timings["tokens_per_second"] = counts.tokens / step_seconds
            if self.peak_flops is not None:
                timings["utilisation"] = counts.flops / step_seconds / self.peak_flops
            if filled is not None:
                timings["padding"] = 1 - filled
                for name in ("tokens_per_second", "utilisation"):
                    if name in timings:
                        timings[f"real_{name}"] = timings[name] * filled
        return timings | {f"{name}_seconds": value for name, value in sorted(waits.items())}


class Profile:
    """Traces some steps (run.profile_steps) on this process, in files of its own."""

    def __init__(
        self,
        steps: tuple[int, ...],  # numbers of the first step and of that after the last; (): none
        workdir: Workdir,
        process: int,
        report: Callable[[str], None],  # is given the path of a trace, or the reason for none
        clock: Clock,  # counts the time of tracing separately
    ):
        self._steps = range(*steps) if steps else range(0)  # to be traced
        self._workdir, self._process = workdir, process
        self._report, self._clock = report, clock
        self._local: epath.Path | None = None  # the temporary folder, during a trace
        self._cleanup = contextlib.ExitStack()  # removes the folder
        self._traced = range(0)  # the steps of the current trace, numbered from 0
        self._has_failed = False  # no trace could begin; no further one is tried

    @contextlib.contextmanager
    def step(self, done: int, state: Any) -> Iterator[None]:
        """Traces the step inside, and the wait for its batch, if it is to be traced.

        `done` steps were dispatched before it, and `state` is the result of the last of them. A
        trace begins and ends only after `state` is computed, so that it holds no other steps. Names
        of traces number steps from 1.
        """
        # A step that does not follow the previous one is a repeated one, after a roll-back.
        if self._local is not None and (done not in self._steps or done != self._traced.stop):
            self.end(state)
        if self._local is None and done in self._steps and not self._has_failed:
            self._begin(done, state)
        if self._local is None:
            yield
            return
        self._traced = range(self._traced.start, done + 1)
        with jax.profiler.StepTraceAnnotation(_STEP_ANNOTATION, step_num=done + 1):
            yield

    def _begin(self, done: int, state: Any) -> None:
        jax.block_until_ready(state)  # outside of `waiting`: this is time of steps
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
        """Ends and writes the trace, if there is one, once `state` is computed."""
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
            # Removes traces of the same steps from before a restart, perhaps on another host.
            for path in target.glob(f"process_{self._process}.*"):
                path.unlink()
            for path in sorted(local.glob("plugins/profile/*/*")):
                copy = target / f"process_{self._process}.{path.name}"
                copies.callback(copy.unlink, missing_ok=True)
                with replace_atomically(copy) as temporary:
                    shutil.copyfile(path, temporary)
            copies.pop_all()
