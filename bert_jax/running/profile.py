"""A trace of some steps, as XProf and Perfetto read it.

jax traces into a temporary folder of this process, from which whole files go into the workdir:

    W/profile/plugins/profile/steps_11_to_20/process_0.HOST.xplane.pb
                                             process_0.HOST.trace.json.gz

What stands in the way of a trace is shown, and costs the run nothing.
"""

import contextlib
import os
import shutil
import tempfile
from collections.abc import Iterator
from typing import Any

import jax
from etils import epath

from bert_jax.errors import InputError, Unavailable
from bert_jax.running.progress import Clock, Progress
from bert_jax.storage.workdir import made, named_errors, new_file

# Of the annotation around each step; XProf looks for a number of this kind.
_STEP = "train"


class Profile:
    """Traces the steps of a window that this process does, in files of its own."""

    def __init__(
        self,
        steps: tuple[int, ...],  # once so many are done, until so many are; empty: none
        folder: epath.Path,
        process: int,
        progress: Progress,  # shows where a trace is, or why there is none
        clock: Clock,  # counts the time that tracing takes apart from the steps
        named: epath.Path | None = None,  # what users call the folder; None: the same
    ):
        self._window = range(*steps) if steps else range(0)
        self._folder, self._named, self._process = folder, named or folder, process
        self._progress, self._clock = progress, clock
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
                self._progress.say(f"no profile: {error}")
                return
            self._local, self._traced = local, range(done, done)

    def end(self, state: Any = None) -> None:
        """Ends and writes the trace, if there is one, once `state` is there."""
        if self._local is None:
            return
        steps = f"steps_{self._traced.start + 1}_to_{self._traced.stop}"
        place = f"plugins/profile/{steps}"  # as XProf looks for it
        target = self._folder / place
        local, self._local = self._local, None
        jax.block_until_ready(state)
        with self._clock.waiting("profile"), self._scratch:
            try:
                with named_errors(local):
                    jax.profiler.stop_trace()
                with named_errors(target):
                    self._send(local, target)
            except (InputError, Unavailable, OSError, RuntimeError) as error:
                self._progress.say(f"no profile of {steps.replace('_', ' ')}: {error}")
            else:
                self._progress.say(f"profile of {steps.replace('_', ' ')}: {self._named / place}")

    def _send(self, local: epath.Path, target: epath.Path) -> None:
        """Copies the files that jax wrote, all or none."""
        root = self._folder.parent
        inside = os.path.relpath(target, root)
        if os.path.realpath(target) != os.path.join(os.path.realpath(root), inside):
            raise InputError(f"{self._folder}: is a link, or holds one; remove it")
        with made(target), contextlib.ExitStack() as sent:
            # Of the same steps, before a restart, perhaps on another host.
            for path in target.glob(f"process_{self._process}.*"):
                path.unlink()
            for path in sorted(local.glob("plugins/profile/*/*")):
                place = target / f"process_{self._process}.{path.name}"
                sent.callback(place.unlink, missing_ok=True)
                with new_file(place) as temporary:
                    shutil.copyfile(path, temporary)
            sent.pop_all()
