"""What is launched, wherever; what its slice is called where it is rented; what its end means.

A launcher renders a `Spec`: its command, once a host, in a folder that holds its experiment as
EXPERIMENT, with its environment. How the processes find each other is the place's own matter.
"""

import contextlib
import dataclasses
import hashlib
import os
import pathlib
import re
import shlex
import sys
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, NamedTuple

from bert_jax import config, errors
from bert_jax.config import Experiment, code
from bert_jax.errors import InputError
from bert_jax.storage.workdir import cache_folder

if TYPE_CHECKING:  # it imports jax, and `launch local` starts its processes sooner without
    from bert_jax.tools.plan.topology import Topology

# The resolved experiment's file, where the command runs.
EXPERIMENT = "experiment.json"

# Cloud TPU takes 63 characters; a cluster's pods add the number of the host and more to theirs.
_LONGEST = 40
_NAME = re.compile(r"[a-z]([-a-z0-9]*[a-z0-9])?")
_HASH = 8  # characters of the config's hash that tell names apart


@dataclasses.dataclass(frozen=True, kw_only=True)
class Spec:
    """One run, ready to be started."""

    name: str  # of what is rented for it: lower case, digits and hyphens
    experiment: Experiment  # resolved
    config: str  # the same as JSON, the text of the file EXPERIMENT
    sha256: str  # of that text, in hexadecimal
    workdir: str  # where the run keeps its files, as all hosts see it
    topology: "Topology | None"  # the slice that it runs on; None: this machine
    hosts: int  # how many, of all slices; one process each
    extend: bool  # whether a run that finished may go on to more steps
    environment: Mapping[str, str]  # variables of each process
    retries: int  # how many times it may be started again after a preemption or the loss of a host
    # {name: text} of the file of its own objective or encoder, next to EXPERIMENT.
    code: Mapping[str, str] = dataclasses.field(default_factory=dict)

    @property
    def rented_topology(self) -> "Topology":
        """Returns the topology of a run on rented machines, which always have one."""
        assert self.topology is not None
        return self.topology

    def command(self, experiment: str = EXPERIMENT) -> tuple[str, ...]:
        """Returns the command of each host, where `experiment` lies, with its code next to it."""
        command, code = "extend" if self.extend else "pretrain", ()
        for name in self.code:
            code += ("--code", os.path.join(os.path.dirname(experiment), name))
        return ("bert-jax", command, experiment, "--workdir", self.workdir, *code)


def specify(
    experiment: str,
    settings: Sequence[str],
    *,
    workdir: str,
    topology: "Topology | None",
    hosts: int | None = None,
    name: str | None = None,
    extend: bool = False,
    environment: Mapping[str, str] | None = None,
    retries: int = 0,
) -> Spec:
    """Returns the spec of an experiment's file, .py or .json, with settings as `--set` takes them.

    Without `hosts` it is one process a host of the topology; without a name the experiment's and
    the beginning of the config's hash.
    """
    resolved = config.override(config.load(experiment), settings)
    text = config.to_json(resolved)
    sha256 = hashlib.sha256(text.encode()).hexdigest()
    if name is not None and (len(name) > _LONGEST or not _NAME.fullmatch(name)):
        raise InputError(
            f"--name {name}: use at most {_LONGEST} of lower case letters, digits and hyphens, "
            "beginning with a letter and not ending with a hyphen"
        )
    if hosts is None:
        hosts = 1 if topology is None else slice_names(topology).hosts * topology.slices
    return Spec(
        name=_derived_name(resolved.name, sha256) if name is None else name,
        experiment=resolved,
        config=text,
        sha256=sha256,
        workdir=workdir,
        topology=topology,
        hosts=hosts,
        extend=extend,
        environment=dict(environment or {}),
        retries=retries,
        code=code.files(resolved),
    )


def _derived_name(name: str, sha256: str) -> str:
    plain = re.sub(r"[^a-z0-9]+", "-", name.lower()).strip("-")
    plain = plain if plain[:1].isalpha() else f"run-{plain}"
    return f"{plain[: _LONGEST - _HASH - 1].strip('-')}-{sha256[:_HASH]}"


def staging(name: str) -> pathlib.Path:
    """Returns the folder of this machine's cache where the files of a launch are put together."""
    return pathlib.Path(cache_folder()) / "launch" / name


def say(line: str) -> None:
    """Prints a line of ours; a terminal that has gone away ends nothing."""
    with contextlib.suppress(OSError, ValueError):
        print(f"launch: {errors.printable(line)}", file=sys.stderr, flush=True)


def script_that_writes(path: pathlib.Path, text: str) -> Iterator[str]:
    """Returns lines of bash that write a text, which ends with a newline, to a file."""
    end = "END"
    while end in text.splitlines():  # a text of somebody else's may hold that line
        end += "_"
    yield f"cat > {shlex.quote(str(path))} <<'{end}'"
    yield text.removesuffix("\n")
    yield end


# --- Exit codes ---------------------------------------------------------------------------------

# Exit codes that are the run's end; 0 is, too. Every other (74, 75, 134, a signal's) is the end of
# a machine, its network or its neighbour, and the run is started again.
FINAL = (errors.FAILED, errors.BAD_INPUT, errors.INTERRUPTED)


def is_final(code: int) -> bool:
    """Returns whether a run that ended so is not started again."""
    return code == errors.FINISHED or code in FINAL


# --- What a slice is called ---------------------------------------------------------------------
#
# One spelling, v5e:8x8, is used everywhere else (`bert_jax.tools.plan.topology`). Cloud TPU calls
# the same slice by a generation and a number, which counts cores up to v5p (two a chip; v4 and v5p
# join them to one device, but count on) and chips on v5e and v6e. GKE names the generation and the
# shape in two labels of a node.
#
# Sources: Cloud TPU's pages of each generation (cloud.google.com/tpu/docs/v2 to v6e: shapes, types,
# hosts and VMs), "TPU software versions" (tpu/docs/runtimes), "Plan TPUs in GKE"
# (kubernetes-engine/docs/concepts/plan-tpus: labels and machine types; it offers no v2).


class _Generation(NamedTuple):
    """How one generation is named."""

    prefix: str  # of its accelerator types
    counts: int  # what their number counts on a chip: its cores, or it alone
    gke: str = ""  # label of its nodes; "" where GKE does not offer it
    machine: str = ""  # type of its nodes in GKE, before the chips of one
    runtime: str = "tpu-ubuntu2204-base"  # the image of its machines that is meant for JAX
    # Sizes in chips of slices that are one machine with as many chips. All others have machines of
    # 4.
    whole_hosts: tuple[int, ...] = (4,)
    single: tuple[str, str] = ("", "")  # label and type of a slice of one machine, if others


_CHIPS_A_HOST = 4
_V3_SINGLE, _WHOLE = ("tpu-v3-device", "ct3-hightpu"), (1, 4, 8)
_V5E, _V6E = ("tpu-v5-lite-podslice", "ct5lp-hightpu"), ("tpu-v6e-slice", "ct6e-standard")

_GENERATIONS = {
    "v2": _Generation("v2", 2),
    "v3": _Generation("v3", 2, "tpu-v3-slice", "ct3p-hightpu", single=_V3_SINGLE),
    "v4": _Generation("v4", 2, "tpu-v4-podslice", "ct4p-hightpu"),
    "v5e": _Generation("v5litepod", 1, *_V5E, "v2-alpha-tpuv5-lite", _WHOLE),
    "v5p": _Generation("v5p", 2, "tpu-v5p-slice", "ct5p-hightpu", "v2-alpha-tpuv5"),
    "v6e": _Generation("v6e", 1, *_V6E, "v2-alpha-tpuv6e", _WHOLE),
}


@dataclasses.dataclass(frozen=True, kw_only=True)
class SliceNames:
    """One slice as it is rented."""

    accelerator_type: str  # of Cloud TPU, v5litepod-64
    runtime_version: str  # of Cloud TPU, the image of its machines
    hosts: int  # machines; each runs one process
    chips_per_host: int  # of each machine
    # Label cloud.google.com/gke-tpu-accelerator of GKE's nodes; "" where GKE does not offer the
    # generation.
    gke_accelerator: str
    gke_topology: str  # label cloud.google.com/gke-tpu-topology, 8x8
    gke_machine_type: str  # of GKE's nodes


def slice_names(topology: "Topology") -> SliceNames:
    """Returns what Cloud TPU and GKE call a slice, of several each, and what it is made of."""
    word, _, shape = topology.slice_name.partition(":")
    generation, chips = _GENERATIONS[word], topology.chips // topology.slices
    is_single = chips in generation.whole_hosts
    chips_per_host = chips if is_single else _CHIPS_A_HOST
    label, machine = generation.gke, generation.machine
    if is_single and generation.single[0]:
        label, machine = generation.single
    return SliceNames(
        accelerator_type=f"{generation.prefix}-{chips * generation.counts}",
        runtime_version=generation.runtime,
        hosts=chips // chips_per_host,
        chips_per_host=chips_per_host,
        gke_accelerator=label,
        gke_topology=shape,
        gke_machine_type=f"{machine}-{chips_per_host}t" if machine else "",
    )
