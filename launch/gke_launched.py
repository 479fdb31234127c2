"""A run on GKE that was launched: how it stands, what it says, its end."""

import shlex
from collections.abc import Mapping
from typing import Any, Literal

from bert_jax import errors
from bert_jax.errors import InputError, printable
from launch import console, kubectl, target, tools
from launch.kubectl import Kubectl
from launch.target import Record, State

# Beyond the time in which the pods must be gone: to be told so.
_MARGIN = 60.0
# A log is followed for a day at a time.
_FOLLOW = 86_400.0


class Launched:
    """See `target.Target`.

    Args:
      record: of the launch.
    """

    def __init__(self, record: Record):
        place = record.place
        self._record = record
        self._kubectl = Kubectl(
            name=record.name, context=place["context"], namespace=place["namespace"]
        )

    def state(self) -> State:
        """See `target.Target`.

        Raises:
          InputError: the cluster cannot be asked.
        """
        found = kubectl.ask(self._kubectl.get(), self._record.name)
        if not found:
            return State(word="gone", detail="no such JobSet")
        status = found.get("status", {})
        restarts = status.get("restarts", 0)
        again = f"; restarted {restarts} of {_most(found)} times" if restarts else ""
        if terminal := status.get("terminalState"):
            reason = _message(status, terminal)
            return State(word="ended", detail=printable(f"JobSet {terminal}{reason}{again}"))
        pods = kubectl.ask(self._kubectl.pods(), self._record.name).get("items", [])
        phases = [pod.get("status", {}).get("phase") for pod in pods]
        running = phases.count("Running")
        begun = running + phases.count("Succeeded") + phases.count("Failed")
        detail = f"{running} of {self._record.hosts} pods run{_waits_for(pods)}{again}"
        word: Literal["running", "waiting"] = (
            "running" if begun >= self._record.hosts else "waiting"
        )
        return State(word=word, detail=printable(detail))

    def logs(self, host: int, follow: bool) -> int:
        """See `target.Target`. What a pod said before a restart is in Cloud Logging alone.

        Raises:
          InputError: there is no such host.
        """
        if not 0 <= host < self._record.hosts:
            raise InputError(f"--host {host}: {self._record.name} has {self._record.hosts}, from 0")
        argv = self._kubectl.logs(host, follow)
        if follow:
            code = tools.stream(argv, _FOLLOW, console.shower())
            if code:
                console.say(
                    f"{self._record.name}: kubectl has ended with exit code {code}; without "
                    "--follow it says why"
                )
            return errors.FAILED if code else errors.FINISHED
        done = tools.run(argv, kubectl.QUICK)
        if done.code:
            raise InputError(kubectl.meaning(self._record.name, done))
        console.shower()(done.out.encode())
        if not done.out:
            console.say(f"{self._record.name}: the pod of host {host} has said nothing, or waits")
        return errors.FINISHED

    def stop(self, seconds: float) -> int:
        """See `target.Target`.

        Raises:
          InputError: the pods may still be there.
        """
        target.mark_stopped(self._record)
        console.say(f"deleting {self._record.name}; its pods save first")
        self.delete(seconds)
        console.say(
            f"{self._record.name} is deleted; `bert-jax checkpoints {self._record.workdir}` lists "
            "what is saved"
        )
        return errors.FINISHED

    def delete(self, seconds: float) -> None:
        """Deletes all that was made, once the pods have ended.

        Raises:
          InputError: they may still be there.
        """
        argv = self._kubectl.delete(seconds)
        try:
            done = tools.run(argv, seconds + _MARGIN)
            if kubectl.UNKNOWN_KIND in done.err:  # then there is no JobSet, but may be the other
                argv = self._kubectl.delete(seconds, "configmap")
                done = tools.run(argv, seconds + _MARGIN)
            complaint = kubectl.meaning("kubectl", done) if done.code else ""
        except (InputError, KeyboardInterrupt) as error:
            complaint = str(error) or "interrupted"
        if complaint:
            raise InputError(
                f"{self._record.name}: may still be there and cost money ({complaint}); delete it "
                f"with: {shlex.join(argv)}"
            )


def _most(found: Mapping[str, Any]) -> int:
    return found.get("spec", {}).get("failurePolicy", {}).get("maxRestarts", 0)


def _message(status: Mapping[str, Any], kind: str) -> str:
    """What a condition of that kind says of itself, after a colon."""
    said = [c.get("message") for c in status.get("conditions", []) if c.get("type") == kind]
    return f": {said[-1]}" if said and said[-1] else ""


def _waits_for(pods: list[dict[str, Any]]) -> str:
    """Why the first pod that waits does, after a semicolon."""
    for pod in pods:
        status = pod.get("status", {})
        for condition in status.get("conditions", []):
            if condition.get("type") == "PodScheduled" and condition.get("status") == "False":
                return f"; no machines: {condition.get('message', '')}".rstrip(": ")
        for container in status.get("containerStatuses", []):
            waiting = container.get("state", {}).get("waiting", {})
            if waiting.get("reason"):
                said = waiting.get("message", "")
                return f"; {waiting['reason']}{': ' if said else ''}{said}"
    return ""
