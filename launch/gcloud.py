"""The words of every gcloud command that a launch on TPU VMs takes."""

import dataclasses
import shlex
from collections.abc import Sequence

from launch import hosts

# A command with an answer of its own; and those that wait for machines: copies, installation.
QUICK, SLOW = 300.0, 3600.0


@dataclasses.dataclass(frozen=True, kw_only=True)
class Gcloud:
    """What gcloud is told about one queued resource, and its one node of the same name.

    Attributes:
      name: of the queued resource.
      zone: where.
      project: whose; "": gcloud's own setting.
    """

    name: str
    zone: str
    project: str

    def create(
        self,
        accelerator_type: str,
        runtime_version: str,
        tier: str,
        valid_until: str,
    ) -> list[str]:
        """Asks for machines.

        Args:
          accelerator_type: v5litepod-64.
          runtime_version: the image of the machines.
          tier: "spot", "reserved", or "" for neither.
          valid_until: how long to wait for them at most, 24h.
        """
        return [
            *self._queued("create"),
            f"--node-id={self.name}",
            f"--accelerator-type={accelerator_type}",
            f"--runtime-version={runtime_version}",
            f"--valid-until-duration={valid_until}",
            *([f"--{tier}"] if tier else []),
            *self._where(),
        ]

    def state(self) -> list[str]:
        """Says the state of the request."""
        return [*self._queued("describe"), "--format=value(state.state)", *self._where()]

    def delete(self) -> list[str]:
        """Gives the machines back, and takes the request out of the queue."""
        return [*self._queued("delete"), "--force", *self._where()]

    def make_folder(self) -> list[str]:
        """Makes the folder on all hosts."""
        return self.on_hosts(("mkdir", "-p", hosts.folder(self.name)))

    def copy(self, files: Sequence[str]) -> list[str]:
        """Copies local files there."""
        return [
            *("gcloud", "compute", "tpus", "tpu-vm", "scp", *files),
            f"{self.name}:{hosts.folder(self.name)}/",
            "--worker=all",
            *self._where(),
        ]

    def script(self, script: str, *arguments: str, host: int | None = None) -> list[str]:
        """Runs one of the scripts that lie there.

        Args:
          script: its name.
          arguments: its words.
          host: None: all of them.
        """
        path = f"{hosts.folder(self.name)}/{script}"
        return self.on_hosts(("bash", path, *arguments), host)

    def on_hosts(self, words: Sequence[str], host: int | None = None) -> list[str]:
        """Runs a command on one host, or (None) on all.

        Each host's shell splits the words anew, so they are quoted here; the result needs to be
        quoted once more for a shell of ours.
        """
        return [
            *("gcloud", "compute", "tpus", "tpu-vm", "ssh", self.name),
            f"--worker={'all' if host is None else host}",
            f"--command={shlex.join(words)}",
            *self._where(),
        ]

    def _queued(self, verb: str) -> list[str]:
        return ["gcloud", "compute", "tpus", "queued-resources", verb, self.name]

    def _where(self) -> list[str]:
        project = [f"--project={self.project}"] if self.project else []
        return [f"--zone={self.zone}", *project, "--quiet"]
