"""The words of every kubectl command that a launch on GKE takes, and what its complaints mean."""

import dataclasses
import json
from collections.abc import Sequence
from typing import Any

from bert_jax.errors import InputError
from launch import jobset, tools
from launch.tools import Done

# A command with an answer of its own.
QUICK = 120.0

UNKNOWN_KIND = "the server doesn't have a resource type"

# A part of what kubectl says (in lower case): what it means, and what to do.
_MEANINGS = (
    ("no matches for kind", "the cluster has no JobSet; install it, see docs/running_on_tpu.md"),
    (UNKNOWN_KIND, "the cluster has no JobSet; install it, see docs/running_on_tpu.md"),
    ("exceeded quota", "the namespace's quota is used up; raise it, or name another --namespace"),
    ("forbidden", "you may not do this; ask for the role Kubernetes Engine Developer"),
    ("unauthorized", "sign in with `gcloud auth login`"),
    ("current-context is not set", "name the --cluster, its --zone and --project"),
    ("does not exist", "`gcloud container clusters get-credentials` the cluster"),
    ("connection to the server", "is the cluster running, and can it be reached from here?"),
    ("unable to connect", "is the cluster running, and can it be reached from here?"),
    ("i/o timeout", "is the cluster running, and can it be reached from here?"),
)


def context(cluster: str, zone: str, project: str) -> str:
    """The name that `gcloud container clusters get-credentials` gives a cluster.

    Args:
      cluster: "": the one that kubectl is set to.
      zone: of the cluster, or its region.
      project: of the cluster.

    Raises:
      InputError: only some of them are named, or kubectl is set to none.
    """
    if cluster and zone and project:
        return f"gke_{project}_{zone}_{cluster}"
    if cluster or zone or project:
        raise InputError("name --cluster, --zone and --project together, or none of them")
    done = tools.run(["kubectl", "config", "current-context"], QUICK)
    if done.code:
        raise InputError(meaning("kubectl", done))
    return done.out.strip()


def meaning(what: str, done: Done) -> str:
    """A failure in one line, with what to do where that is known."""
    said = done.err.lower()
    remedy = next((f"; {remedy}" for part, remedy in _MEANINGS if part in said), "")
    return f"{what}: {done.complaint}{remedy}"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Kubectl:
    """What kubectl is told about one JobSet.

    Attributes:
      name: of the JobSet and its ConfigMap.
      context: the cluster, as kubectl knows it; "": the one it is set to.
      namespace: where they live.
    """

    name: str
    context: str
    namespace: str

    def get(self) -> list[str]:
        """Tells the JobSet as JSON; nothing if there is none."""
        return self._words("get", "jobset", self.name, "--ignore-not-found", "--output=json")

    def pods(self) -> list[str]:
        """Tells its pods as JSON."""
        return self._words("get", "pods", f"--selector={jobset.OWNER}={self.name}", "--output=json")

    def apply(self, path: str) -> list[str]:
        """Makes what the file says."""
        return self._words("apply", f"--filename={path}")

    def delete(self, seconds: float, kinds: str = "jobset,configmap") -> list[str]:
        """Ends all pods as their grace allows, and waits until they are gone.

        Args:
          seconds: to wait.
          kinds: what is deleted. kubectl deletes nothing at all if the cluster does not know one.
        """
        return self._words(
            *("delete", kinds, self.name, "--ignore-not-found"),
            *("--cascade=foreground", f"--timeout={round(seconds)}s"),
        )

    def logs(self, host: int, follow: bool) -> list[str]:
        """Shows what a pod has said."""
        return self._words(
            *("logs", f"--selector={jobset.OWNER}={self.name},{jobset.INDEX}={host}"),
            *(f"--container={jobset.CONTAINER}", "--tail=-1"),
            *(["--follow"] if follow else []),
        )

    def _words(self, *words: str) -> list[str]:
        cluster = [f"--context={self.context}"] if self.context else []
        return ["kubectl", *cluster, f"--namespace={self.namespace}", *words]


def ask(argv: Sequence[str], what: str) -> dict[str, Any]:
    """What a command tells as JSON; empty if it tells nothing.

    Raises:
      InputError: it fails, or tells something else.
    """
    done = tools.run(argv, QUICK)
    if done.code:
        raise InputError(meaning(what, done))
    try:
        found = json.loads(done.out or "{}")
    except (ValueError, RecursionError):
        found = None
    if not isinstance(found, dict):
        raise InputError(f"{what}: kubectl does not answer with JSON")
    return found
