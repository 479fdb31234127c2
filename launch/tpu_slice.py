"""Machines of one queued resource: asked for, filled, started, watched, given back.

gcloud may fail for a moment, an SSH connection may drop at any time, and machines may be taken
away: what is asked is asked again, and only what the service says of the request counts as the
loss of the machines.
"""

import shlex
from collections.abc import Callable, Sequence

from bert_jax.errors import InputError
from launch import hosts, tools
from launch.gcloud import QUICK, SLOW, Gcloud
from launch.hosts import HostState

ACTIVE = "ACTIVE"
# The service takes the machines away, or has.
_LOST = ("SUSPENDING", "SUSPENDED", "DELETING")
# States in which a request holds nothing and will never hold anything.
DEAD = ("FAILED", *_LOST)

# Seconds between looks at the request, and at the hosts.
_POLL = 30.0
# A connection for the log is made anew so often, so that one that died unseen is noticed.
_FOLLOW = 300
# The same while some hosts have ended and others have not.
_FOLLOW_PARTIAL = 30
_CONNECT = 60.0
# For what a run that has ended said last.
LAST_WORDS = 30
# How often what may fail for a moment is tried; and the question whether a run's machines are
# there, since this machine may have lost its network for hours, and the run goes on without it.
_TRIES, _PATIENT = 5, 480
# Looks after which hosts that still run while others have ended are told to, then killed: jax
# itself takes 100 seconds to miss a peer.
_GRACE, _KILL = 4, 8
# Looks without a word from any host after which they count as lost; and from some while the others
# run. Those would end by themselves if they had lost a peer, so that a run is ended for it late.
_SILENT, _UNHEARD = 10, 120
# What the service says of a request that it would refuse again.
_REFUSALS = ("RESOURCE_EXHAUSTED", "QUOTA", "PERMISSION_DENIED", "INVALID_ARGUMENT")


class Lost(Exception):
    """The machines are gone, or no longer answer. The message says what is known."""


class Slice:
    """The machines.

    Args:
      gcloud: where they are.
      count: hosts.
      sleep: waits so many seconds.
      say: is told what happens.
    """

    def __init__(
        self,
        gcloud: Gcloud,
        count: int,
        sleep: Callable[[float], None],
        say: Callable[[str], None],
    ):
        self.gcloud = gcloud
        self._count, self._sleep, self._say = count, sleep, say
        self._under_way = False  # a request of which we have not heard whether it was taken

    def state(self, tries: int = _TRIES) -> str:
        """What the service says of the request; "" if there is none.

        Args:
          tries: how often it is asked, half a minute apart.

        Raises:
          InputError: it says nothing, though asked several times.
        """
        for attempt in range(tries):
            if attempt:
                self._sleep(_POLL)
            done = tools.run(self.gcloud.state(), QUICK)
            if done.code == 0:
                return done.out.strip()
            if "NOT_FOUND" in done.err:
                return ""
            if attempt == _TRIES - 1 < tries - 1:
                self._say(f"gcloud cannot be asked ({done.complaint}); asking on")
        raise InputError(f"{self.gcloud.name}: gcloud cannot tell its state ({done.complaint})")

    def create(self, argv: Sequence[str]) -> None:
        """Asks for the machines, again if that fails for a moment.

        Args:
          argv: as `Gcloud.create` gives it.

        Raises:
          InputError: the request is refused.
        """
        remedy = ""
        for attempt in range(_TRIES):
            if attempt:
                self._sleep(_POLL)
            self._under_way = True
            done = tools.run(argv, QUICK)
            there = "ALREADY_EXISTS" in done.err
            if done.code == 0 or (there and attempt):  # the one before was taken after all
                self._under_way = False
                return
            refusal = next((word for word in _REFUSALS if word in done.err.upper()), "")
            if refusal in ("RESOURCE_EXHAUSTED", "QUOTA"):
                remedy = "; ask for more quota of this type in this zone, or name another"
            if refusal or there:
                self._under_way = attempt > 0
                break
        raise InputError(f"{self.gcloud.name}: not created: {done.complaint}{remedy}")

    def gone(self) -> bool:
        """Whether there is no request.

        One that may be on its way still is looked for twice, a while apart.

        Raises:
          InputError: the service does not say.
        """
        if self.state() != "":
            return False
        if self._under_way:
            self._sleep(_POLL)
            self._under_way = self.state() != ""
        return not self._under_way

    def wait(self, seconds: float) -> None:
        """Waits for the machines.

        Args:
          seconds: at most.

        Raises:
          Lost: they were taken away before they were there.
          InputError: the request failed, or it took too long.
        """
        before = None
        for _ in range(round(seconds / _POLL) + 1):
            state = self.state(_PATIENT)
            if state != before:
                self._say(f"{self.gcloud.name}: {state or 'no such request'}")
                before = state
            if state == ACTIVE:
                return
            if state in ("", *_LOST):
                raise Lost(f"{self.gcloud.name} was taken away while it was waited for")
            if state == "FAILED":
                raise InputError(
                    f"{self.gcloud.name}: the request failed: no machines in time, or a problem "
                    "with it, which `gcloud compute tpus queued-resources describe` names"
                )
            self._sleep(_POLL)
        raise InputError(f"{self.gcloud.name}: no machines within {seconds / 3600:g} hours")

    def prepare(self, files: Sequence[str]) -> None:
        """Copies files to all hosts, and installs.

        Raises:
          Lost: the machines are gone.
          InputError: they do not do it.
        """
        self._insist(self.gcloud.make_folder(), QUICK, "reached")
        self._say(f"copying {len(files)} files to {self._count} hosts")
        self._insist(self.gcloud.copy(files), SLOW, "filled")
        self._say("installing")
        self._insist(self.gcloud.script("install.sh"), SLOW, "filled: install.sh fails")

    def start(self) -> None:
        """Starts the run on all hosts where it does not run; raises as `prepare`."""
        self._insist(self.gcloud.script("start.sh"), QUICK, "started")

    def _insist(self, argv: Sequence[str], seconds: float, what: str) -> None:
        for attempt in range(_TRIES):
            if attempt:
                self._sleep(_POLL)
                self._require_active()
            done = tools.run(argv, seconds)
            if done.code == 0:
                return
        raise InputError(f"{self.gcloud.name}: its hosts cannot be {what} ({done.complaint})")

    def _require_active(self) -> None:
        state = self.state(_PATIENT)
        if state != ACTIVE:
            raise Lost(f"{self.gcloud.name} is {state or 'gone'}")

    def hosts(self) -> dict[str, HostState]:
        """How the run stands on the hosts that answer."""
        return hosts.parse_states(tools.run(self.gcloud.script("state.sh"), QUICK).out)

    def running(self) -> bool:
        """Whether it runs on any host that answers."""
        return any(host.running for host in self.hosts().values())

    def watch(self, show: Callable[[bytes], None]) -> list[int | None]:
        """Follows host 0 until the run has ended on all hosts.

        If it has on some and does not on others, those are ended.

        Args:
          show: is given pieces of the log.

        Returns:
          The exit code of each host; None for one that was lost.

        Raises:
          Lost: the machines are gone, or none answers.
          InputError: gcloud cannot tell.
        """
        log = Log(show)
        partial = silent = unheard = 0
        while True:
            code = self.follow(log, _FOLLOW_PARTIAL if partial else _FOLLOW)
            found = self.hosts()
            running = [name for name, host in found.items() if host.running]
            if len(found) >= self._count and not running:
                self.follow(log, LAST_WORDS)  # what was said while the connection was lost
                return [host.code for host in found.values()]
            self._require_active()
            silent = 0 if found else silent + 1
            unheard = unheard + 1 if len(found) < self._count else 0
            if silent > _SILENT:
                raise Lost(f"{self.gcloud.name}: no host answers")
            if found and (len(found) > len(running) or unheard > _UNHEARD):
                partial += 1
                if partial in (_GRACE, _KILL):
                    missing = self._count - len(found)
                    self._say(
                        f"{len(found) - len(running)} of {self._count} hosts have ended, {missing} "
                        "do not answer; ending the others"
                    )
                    self.signal("TERM" if partial == _GRACE else "KILL")
                if partial > _KILL:
                    return self._codes(found)
            else:
                partial = 0
            if code:
                self._say("the connection for the log was lost; the run goes on")
            self._sleep(_POLL if code or partial else 1.0)

    def follow(self, log: "Log", seconds: int, host: int = 0) -> int:
        """Shows what a host's run has said since, and says, until it ends or time is up.

        Returns:
          The exit code of the connection.
        """
        argv = self.gcloud.script("follow.sh", str(log.next), str(seconds), host=host)
        return tools.stream(argv, seconds + _CONNECT, log.put)

    def _codes(self, found: dict[str, HostState]) -> list[int | None]:
        lost: list[int | None] = [None] * (self._count - len(found))
        return [*(host.code for host in found.values()), *lost]

    def signal(self, name: str) -> None:
        """Sends the run's processes a signal, on all hosts that can be reached."""
        tools.run(self.gcloud.script("stop.sh", name), QUICK)

    def stop(self, seconds: float) -> list[int | None]:
        """Has the run save and end.

        Args:
          seconds: to wait for it.

        Returns:
          The exit code of each host; None where it is not known.
        """
        found = self.hosts()
        if any(host.running for host in found.values()):
            self._say("asking the run to save and stop")
            self.signal("TERM")
        for _ in range(round(seconds / _POLL) + 1):
            if found and not any(host.running for host in found.values()):
                break
            self._sleep(_POLL)
            found = self.hosts()
        return self._codes(found)

    def delete(self) -> None:
        """Gives the machines back, and makes sure of it.

        Raises:
          InputError: the service does not say that they are gone.
        """
        self._say(f"deleting {self.gcloud.name}")
        argv = self.gcloud.delete()
        complaint = ""
        try:
            for attempt in range(_TRIES):
                if attempt:
                    self._sleep(_POLL)
                done = tools.run(argv, SLOW)
                complaint = done.complaint if done.code else "it is still there"
                if self.gone():
                    self._say(f"{self.gcloud.name} is deleted")
                    return
        except (InputError, KeyboardInterrupt) as error:
            complaint = str(error) or "interrupted"
        raise InputError(
            f"{self.gcloud.name}: may still be there and cost money ({complaint}); delete it with: "
            f"{shlex.join(argv)}"
        )


class Log:
    """A log that is shown piece by piece, over several connections."""

    def __init__(self, show: Callable[[bytes], None]):
        self.next = 1  # the byte to go on from, as tail counts
        self._show = show

    def put(self, piece: bytes) -> None:
        """Takes the next piece."""
        self.next += len(piece)
        self._show(piece)
