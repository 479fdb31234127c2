"""What is started, whatever starts it: processes on this machine, TPU VMs or a cluster.

A launcher renders a `Spec`: its command, once a host, in a folder that holds its experiment as
EXPERIMENT, with its environment. How the processes find each other is the place's own matter.
"""

import dataclasses
import hashlib
import re
from collections.abc import Mapping, Sequence

from bert_jax import config
from bert_jax.config import Experiment
from bert_jax.errors import InputError
from bert_jax.plan.topology import Topology
from launch import names as names_lib

# The resolved experiment's file, where the command runs.
EXPERIMENT = "experiment.json"

# Cloud TPU takes 63 characters; a cluster's pods add the number of the host and more to theirs.
_LONGEST = 40
_NAME = re.compile(r"[a-z]([-a-z0-9]*[a-z0-9])?")
_HASH = 8  # characters of the config's hash that tell names apart


@dataclasses.dataclass(frozen=True, kw_only=True)
class Spec:
    """One run, ready to be started.

    Attributes:
      name: of what is rented for it: lower case, digits and hyphens.
      claim: the resolved experiment.
      config: the same as JSON, the text of the file EXPERIMENT.
      sha256: of that text, in hexadecimal.
      workdir: where the run keeps its files, as all hosts see it.
      topology: the slice that it runs on; None: this machine.
      hosts: how many; one process each.
      extend: whether a run that finished may go on to more steps.
      environment: variables of each process.
      retries: how many times it may be started again after a preemption or the loss of a host.
    """

    name: str
    claim: Experiment
    config: str
    sha256: str
    workdir: str
    topology: Topology | None
    hosts: int
    extend: bool
    environment: Mapping[str, str]
    retries: int

    def command(self, experiment: str = EXPERIMENT) -> tuple[str, ...]:
        """The command of each host.

        Args:
          experiment: the path of the resolved experiment there.
        """
        more = ("--extend",) if self.extend else ()
        return ("bert-jax", "pretrain", experiment, "--workdir", self.workdir, *more)


def specify(
    experiment: str,
    settings: Sequence[str],
    *,
    workdir: str,
    topology: Topology | None,
    hosts: int | None = None,
    name: str | None = None,
    extend: bool = False,
    environment: Mapping[str, str] | None = None,
    retries: int = 0,
) -> Spec:
    """A spec from what a user names.

    Args:
      experiment: a file, .py or .json.
      settings: changes to it, as `--set` takes them.
      workdir: see `Spec`.
      topology: see `Spec`.
      hosts: processes; None: one a host of the topology.
      name: None: the experiment's name and the beginning of the config's hash.
      extend: see `Spec`.
      environment: see `Spec`; None: no variables.
      retries: see `Spec`.

    Raises:
      InputError: no such experiment, or a setting or name that cannot be used.
    """
    claim = config.override(config.load(experiment), settings)
    resolved = config.to_json(claim)
    sha256 = hashlib.sha256(resolved.encode()).hexdigest()
    if hosts is None:
        hosts = 1 if topology is None else names_lib.names(topology).hosts
    return Spec(
        name=_derived(claim.name, sha256) if name is None else checked_name(name),
        claim=claim,
        config=resolved,
        sha256=sha256,
        workdir=workdir,
        topology=topology,
        hosts=hosts,
        extend=extend,
        environment=dict(environment or {}),
        retries=retries,
    )


def checked_name(name: str) -> str:
    """The name.

    Raises:
      InputError: Cloud TPU or Kubernetes would not take it.
    """
    if len(name) > _LONGEST or not _NAME.fullmatch(name):
        raise InputError(
            f"--name {name}: use at most {_LONGEST} of lower case letters, digits and hyphens, "
            "beginning with a letter and not ending with a hyphen"
        )
    return name


def _derived(name: str, sha256: str) -> str:
    plain = re.sub(r"[^a-z0-9]+", "-", name.lower()).strip("-")
    plain = plain if plain[:1].isalpha() else f"run-{plain}"
    return f"{plain[: _LONGEST - _HASH - 1].strip('-')}-{sha256[:_HASH]}"
