"""A run on TPU VMs that was launched: how it stands, what it says, its end."""

from collections.abc import Callable

from bert_jax import errors
from bert_jax.errors import InputError
from launch import console, hosts, target, tools
from launch.gcloud import QUICK, Gcloud
from launch.target import Record, State
from launch.tpu_slice import ACTIVE, DEAD, LAST_WORDS, Log, Slice
from launch.verdict import ending_word, verdict

# To save, after Ctrl-C or `launch stop`.
SAVE_SECONDS = 900.0

# A stretch of the log that is followed over one connection, and the pause before the next.
_FOLLOW, _PAUSE = 300, 5.0


class Launched:
    """See `target.Target`.

    Args:
      record: of the launch.
      sleep: waits so many seconds.
    """

    def __init__(self, record: Record, sleep: Callable[[float], None]):
        place = record.place
        gcloud = Gcloud(name=record.name, zone=place["zone"], project=place["project"])
        self._record, self._sleep = record, sleep
        self._slice = Slice(gcloud, record.hosts, sleep, console.say)

    def state(self) -> State:
        """See `target.Target`."""
        state = self._slice.state()
        if state == "":
            return State(word="gone", detail="no such queued resource")
        if state in DEAD:
            return State(word="ended", detail=f"queued resource {state}")
        if state != ACTIVE:
            return State(word="waiting", detail=f"queued resource {state}")
        found = self._slice.hosts()
        running = sum(host.running for host in found.values())
        codes = sorted({str(host.code) for host in found.values() if host.code is not None})
        detail = f"queued resource ACTIVE; {running} of {self._record.hosts} hosts run"
        silent = self._record.hosts - len(found)
        detail += f", {silent} do not answer" if silent else ""
        detail += f", exit codes {', '.join(codes)}" if codes else ""
        if running:
            return State(word="running", detail=detail)
        # Copies and the installation come before a host has anything to say.
        absent = sum(host.absent for host in found.values())
        detail += f", {absent} are made ready" if absent else ""
        return State(word="ended" if found and not absent else "waiting", detail=detail)

    def logs(self, host: int, follow: bool) -> int:
        """See `target.Target`.

        Raises:
          InputError: there is no such host, or no machine.
        """
        if not 0 <= host < self._record.hosts:
            raise InputError(f"--host {host}: {self._record.name} has {self._record.hosts}, from 0")
        state = self._slice.state()
        if state != ACTIVE:
            raise InputError(f"{self._record.name}: {state or 'gone'}, so that it says nothing")
        show = console.shower()
        gcloud = self._slice.gcloud
        if not follow:
            words = ("cat", f"{hosts.folder(gcloud.name)}/run.log")
            code = tools.stream(gcloud.on_hosts(words, host), QUICK, show)
            if code:
                console.say(f"{self._record.name}: host {host} does not answer, or has no log yet")
            return errors.FAILED if code else errors.FINISHED
        log = Log(show)
        while True:
            self._slice.follow(log, _FOLLOW, host)
            found = self._slice.hosts()
            if found and not any(one.running or one.absent for one in found.values()):
                self._slice.follow(log, LAST_WORDS, host)
                return errors.FINISHED
            if self._slice.state() != ACTIVE:
                return errors.FINISHED
            self._sleep(_PAUSE)

    def stop(self, seconds: float) -> int:
        """See `target.Target`.

        Raises:
          InputError: the machines may still be there.
        """
        # Whoever launched it looks here before starting it again.
        target.mark_stopped(self._record)
        code: int = errors.FINISHED
        state = self._slice.state()
        if state == "":
            console.say(f"{self._record.name} is not there")
            return code
        if state == ACTIVE:
            code = saved(self._slice, seconds)
        self._slice.delete()
        return code


def saved(rented: Slice, seconds: float) -> int:
    """Has a run save and end; Ctrl-C, or a gcloud that fails, cuts the wait short.

    Args:
      rented: where it runs.
      seconds: to wait for it.

    Returns:
      Its exit code; INTERRUPTED if it was not waited for.
    """
    try:
        codes = rented.stop(seconds)
    except (KeyboardInterrupt, InputError):
        console.say("not waiting for the run to save")
        return errors.INTERRUPTED
    code = verdict(codes)
    console.say(f"the run {ending_word(code, codes)}")
    return code
