"""One queued resource and its hosts, by gcloud: asked for, filled, watched, given back.

gcloud may fail for a moment, and an SSH connection may drop at any time: what is asked is asked
again, and only what the service says of the request counts as the loss of the machines.
"""

import dataclasses
import shlex
import time
from collections.abc import Sequence

from bert_jax import errors
from bert_jax.errors import InputError

from . import hosts
from .commands import run, say
from .spec import ending, verdict

# States of a queued resource: there; refused; taken away, or being; deleted by somebody, or being.
ACTIVE, FAILED = "ACTIVE", "FAILED"
SUSPENDED = ("SUSPENDING", "SUSPENDED")
DELETED = ("", "DELETING")

# Seconds of a command with an answer of its own; and of copies, of an installation.
QUICK, SLOW = 300.0, 3600.0
# Seconds between looks at the request and at the hosts, and between tries.
POLL = 30.0
TRIES = 5
# How often a running launch asks for the state: this machine may have lost its network for hours,
# and the run goes on without it.
_PATIENCE = 480
# Seconds for a run to save, after Ctrl-C or `launch stop`.
_SAVE = 900.0
# What the service says of a request that it would refuse again.
_QUOTA = ("RESOURCE_EXHAUSTED", "QUOTA")
_REFUSALS = (*_QUOTA, "PERMISSION_DENIED", "INVALID_ARGUMENT")


class Lost(Exception):
    """The machines were taken away, or no longer answer. The message says what is known."""


class Deleted(Exception):
    """The machines are gone: somebody else has deleted them, `launch stop` for one."""


def sleep(seconds: float) -> None:
    """Waits; a place for tests to wait less."""
    time.sleep(seconds)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Slice:
    """A TPU slice: a queued resource, and its node of the same name."""

    name: str  # of the queued resource
    zone: str  # where
    project: str  # whose; "": gcloud's own setting

    # --- words of commands

    def create_words(
        self, accelerator_type: str, runtime_version: str, tier: str, valid_until: str
    ) -> list[str]:
        """Returns the command that asks for machines.

        Args:
          accelerator_type: v5litepod-64.
          runtime_version: the image of the machines.
          tier: "spot", "reserved", or "" for neither.
          valid_until: how long to wait for them at most, 24h.
        """
        return self._queued(
            "create",
            f"--node-id={self.name}",
            f"--accelerator-type={accelerator_type}",
            f"--runtime-version={runtime_version}",
            f"--valid-until-duration={valid_until}",
            *([f"--{tier}"] if tier else []),
        )

    def state_words(self) -> list[str]:
        """Returns the command that prints the state of the request."""
        return self._queued("describe", "--format=value(state.state)")

    def delete_words(self) -> list[str]:
        """Returns the command that deletes the machines, and their request in the queue."""
        return self._queued("delete", "--force")

    def copy_words(self, files: Sequence[str]) -> list[str]:
        """Returns the command that copies local files to the launch's folder of all hosts."""
        return [
            *("gcloud", "compute", "tpus", "tpu-vm", "scp", *files),
            f"{self.name}:{hosts.folder(self.name)}/",
            "--worker=all",
            *self._where(),
        ]

    def script_words(self, script: str) -> list[str]:
        """Returns the command that runs one of the scripts that lie there, on all hosts."""
        return self.ssh_words(("bash", f"{hosts.folder(self.name)}/{script}"))

    def ssh_words(self, words: Sequence[str], host: int | None = None) -> list[str]:
        """Returns the command that runs another on one host, or (None) on all.

        Each host's shell splits the words again, so they are quoted here; the result needs to be
        quoted once more for a shell of ours.
        """
        return [
            *("gcloud", "compute", "tpus", "tpu-vm", "ssh", self.name),
            f"--worker={'all' if host is None else host}",
            f"--command={shlex.join(words)}",
            *self._where(),
        ]

    def log_words(self, host: int, *flags: str) -> list[str]:
        """Returns the command that prints the output of a host's run, by tail with these flags."""
        path = f"{hosts.folder(self.name)}/run.log"
        return self.ssh_words(("tail", *flags, path), host)

    def _queued(self, verb: str, *flags: str) -> list[str]:
        words = ["gcloud", "compute", "tpus", "queued-resources", verb, self.name]
        return [*words, *flags, *self._where()]

    def _where(self) -> list[str]:
        project = [f"--project={self.project}"] if self.project else []
        return [f"--zone={self.zone}", *project, "--quiet"]

    # --- what is done with them

    def state(self, tries: int = _PATIENCE) -> str:
        """Returns what the service says of the request; "" if there is none.

        Args:
          tries: how often it is asked.
        """
        for attempt in range(tries):
            if attempt:
                sleep(POLL)
            done = run(self.state_words(), QUICK)
            if done.code == 0:
                return done.out.strip()
            if "NOT_FOUND" in done.err:
                return ""
            if attempt == TRIES:
                say(f"gcloud does not answer ({done.complaint}); trying again")
        raise InputError(f"{self.name}: gcloud cannot tell its state ({done.complaint})")

    def require_active(self) -> None:
        """Checks that the machines are there.

        Raises:
          Lost: they were taken away.
          Deleted: somebody has deleted them.
        """
        now = self.state()
        if now in DELETED:
            raise Deleted
        if now != ACTIVE:
            raise Lost(f"{self.name} is {now}")

    def states(self) -> dict[str, str]:
        """Returns how the run stands on the hosts that answer; see `hosts.parse_states`."""
        return hosts.parse_states(run(self.script_words("state.sh"), QUICK).out)

    def insist(self, argv: Sequence[str], seconds: float, what: str) -> None:
        """Runs a command on the hosts, again if it fails for a moment.

        Args:
          argv: its words.
          seconds: that it may take.
          what: cannot be done if it fails.

        Raises:
          Lost: the machines were taken away.
          Deleted: somebody has deleted them.
        """
        for attempt in range(TRIES):
            if attempt:
                sleep(POLL)
                self.require_active()
            done = run(argv, seconds)
            if done.code == 0:
                return
        raise InputError(f"{self.name}: its hosts cannot be {what} ({done.complaint})")

    def create(self, argv: Sequence[str]) -> None:
        """Requests the machines, again if that fails for a moment.

        Args:
          argv: as `create_words` gives it.
        """
        remedy = ""
        for attempt in range(TRIES):
            if attempt:
                sleep(POLL)
            done = run(argv, QUICK)
            # The request before may have been taken after all.
            if done.code == 0 or (attempt and "ALREADY_EXISTS" in done.err):
                return
            refusal = next((word for word in _REFUSALS if word in done.err.upper()), "")
            if refusal in _QUOTA:
                remedy = "; ask for more quota of this type in this zone, or name another"
            if refusal:
                break
        raise InputError(f"{self.name}: not created: {done.complaint}{remedy}")

    def save(self, count: int) -> int:
        """Stops a run once it has saved; Ctrl-C cuts the wait short.

        Args:
          count: hosts.

        Returns:
          Its exit code, also if it had ended before; INTERRUPTED if it never ran, or was not
          waited for.
        """
        try:
            if self.state(TRIES) != ACTIVE:
                return errors.INTERRUPTED
            for attempt in range(TRIES):
                if attempt:
                    sleep(POLL)
                if states := self.states():
                    break
            if "running" not in states.values():
                ended = states and "absent" not in states.values()
                codes = hosts.exit_codes(states, count)
                return verdict(codes) if ended else errors.INTERRUPTED
            say("asking the run to save and stop")
            run(self.script_words("stop.sh"), QUICK)
            for _ in range(round(_SAVE / POLL)):
                states = self.states()
                if states and "running" not in states.values():
                    code = verdict(hosts.exit_codes(states, count))
                    say(f"the run {ending(code)}")
                    return code
                sleep(POLL)
        except (InputError, KeyboardInterrupt):
            pass
        say("not waiting for the run to save")
        return errors.INTERRUPTED

    def delete(self) -> None:
        """Deletes the machines, and makes sure of it."""
        say(f"deleting {self.name}")
        try:
            for _ in range(TRIES):
                done = run(self.delete_words(), SLOW)
                if done.code:  # nothing there, perhaps: a request may still be on its way
                    sleep(POLL)
                if self.state() == "":
                    say(f"{self.name} is deleted")
                    return
            complaint = done.complaint if done.code else "it is still there"
        except (InputError, KeyboardInterrupt) as error:
            complaint = str(error) or "interrupted"
        raise InputError(
            f"{self.name}: may still be there and cost money ({complaint}); delete it with: "
            f"{shlex.join(self.delete_words())}"
        )
