"""The spec of a launch, the names of TPU slices at Cloud TPU and GKE, and the final exit codes.

A launcher runs the command of a `Spec` once per host, with its environment, in a folder that holds
the experiment's file EXPERIMENT_FILE. How the processes find each other is up to the launcher.
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

if TYPE_CHECKING:  # not at run time: it imports jax, which would delay `launch local`
    from bert_jax.tools.plan.topology import Topology

# Name of the resolved experiment's file, in the folder in which the command runs.
EXPERIMENT_FILE = "experiment.json"

# Cloud TPU allows 63 characters; the names of a cluster's pods also hold numbers.
_MAX_NAME_LENGTH = 40
_NAME = re.compile(r"[a-z]([-a-z0-9]*[a-z0-9])?")
_HASH_LENGTH = 8  # characters of the config's hash, which make names unique


@dataclasses.dataclass(frozen=True, kw_only=True)
class Spec:
    """Everything that a launcher needs to start a run."""

    name: str  # of the rented resources: lower case, digits and hyphens
    experiment: Experiment  # resolved
    config: str  # the experiment as JSON, the text of the file EXPERIMENT_FILE
    sha256: str  # of `config`, in hexadecimal
    workdir: str  # a path that all hosts see
    topology: "Topology | None"  # all slices of the run; None: this machine
    hosts: int  # of all slices; each runs one process
    extend: bool  # whether a finished run may train more steps
    environment: Mapping[str, str]  # variables of each process
    retries: int  # maximum number of restarts after a preemption or the loss of a host
    # {name: text} of the files of a custom objective or encoder, next to EXPERIMENT_FILE.
    code: Mapping[str, str] = dataclasses.field(default_factory=dict)

    @property
    def rented_topology(self) -> "Topology":
        """Returns the topology of a run on rented machines, which always have one."""
        assert self.topology is not None
        return self.topology

    def command(self, experiment: str = EXPERIMENT_FILE) -> tuple[str, ...]:
        """Returns the command of each host; custom code is in the folder of `experiment`."""
        command, code_flags = "extend" if self.extend else "pretrain", ()
        for name in self.code:
            code_flags += ("--code", os.path.join(os.path.dirname(experiment), name))
        return ("bert-jax", command, experiment, "--workdir", self.workdir, *code_flags)


def make_spec(
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
    """Returns the spec of an experiment's file, .py or .json, with settings written as for `--set`.

    The default of `hosts` is the number of hosts of the topology. The default name is that of the
    experiment with the beginning of the config's hash.
    """
    resolved = config.override(config.load(experiment), settings)
    text = config.to_json(resolved)
    sha256 = hashlib.sha256(text.encode()).hexdigest()
    if name is not None and (len(name) > _MAX_NAME_LENGTH or not _NAME.fullmatch(name)):
        raise InputError(
            f"--name {name}: use at most {_MAX_NAME_LENGTH} of lower case letters, digits and "
            "hyphens, beginning with a letter and not ending with a hyphen"
        )
    if hosts is None:
        hosts = 1 if topology is None else slice_names(topology).hosts * topology.slices
    return Spec(
        name=_default_name(resolved.name, sha256) if name is None else name,
        experiment=resolved,
        config=text,
        sha256=sha256,
        workdir=workdir,
        topology=topology,
        hosts=hosts,
        extend=extend,
        environment=dict(environment or {}),
        retries=retries,
        code=code.code_copy(resolved),
    )


def _default_name(name: str, sha256: str) -> str:
    slug = re.sub(r"[^a-z0-9]+", "-", name.lower()).strip("-")
    slug = slug if slug[:1].isalpha() else f"run-{slug}"
    return f"{slug[: _MAX_NAME_LENGTH - _HASH_LENGTH - 1].strip('-')}-{sha256[:_HASH_LENGTH]}"


def staging_folder(name: str) -> pathlib.Path:
    """Returns the folder in this machine's cache for the files of a launch."""
    return pathlib.Path(cache_folder()) / "launch" / name


def report(line: str) -> None:
    """Prints a line of the launcher; ignores a terminal that was closed."""
    with contextlib.suppress(OSError, ValueError):
        print(f"launch: {errors.printable(line)}", file=sys.stderr, flush=True)


def heredoc(path: pathlib.Path, text: str) -> Iterator[str]:
    """Returns lines of bash that write a text, which ends with a newline, to a file."""
    end = "END"
    while end in text.splitlines():  # the text itself must not end the heredoc
        end += "_"
    yield f"cat > {shlex.quote(str(path))} <<'{end}'"
    yield text.removesuffix("\n")
    yield end


# --- Exit codes ---------------------------------------------------------------------------------

# Exit codes after which a run is not restarted; neither is it after 0. Any other (74, 75, 134, a
# signal's) is a failure of a machine, the network or another process, and the run is restarted.
FINAL = (errors.FAILED, errors.BAD_INPUT, errors.INTERRUPTED)


def is_final(code: int) -> bool:
    """Returns whether a run with this exit code is not restarted."""
    return code == errors.FINISHED or code in FINAL


# --- Names of slices ----------------------------------------------------------------------------
#
# bert_jax names slices as v5e:8x8 (`bert_jax.tools.plan.topology`). Cloud TPU names the same slice
# by a generation and a number. On v5e and v6e, the number counts chips; on all others it counts
# cores, two per chip, although v4 and v5p join them into one device. Cloud TPU's own API does not
# offer TPU7x. GKE names the generation and the shape in two labels of a node.
#
# Sources: Cloud TPU's pages of each generation (cloud.google.com/tpu/docs/v2 to tpu7x: shapes,
# types, hosts and VMs), "TPU software versions" (tpu/docs/runtimes), "Plan TPUs in GKE"
# (kubernetes-engine/docs/concepts/plan-tpus: labels and machine types; it offers no v2), and "About
# Ironwood (TPU7x) in GKE" (concepts/tpu-ironwood).


class _Generation(NamedTuple):
    """The names of one generation of TPU."""

    prefix: str  # of accelerator types
    units_per_chip: int  # in the number of an accelerator type: the chip's cores, or 1
    gke: str = ""  # label of the nodes; "" if GKE does not offer the generation
    machine: str = ""  # machine type of the nodes in GKE, without the number of chips
    runtime: str = "tpu-ubuntu2204-base"  # machine image for JAX; "" if not in Cloud TPU's own API
    # Sizes of the slices that are one machine. All other slices have machines of 4 chips.
    single_host_chips: tuple[int, ...] = (4,)
    single_host: tuple[str, str] = ("", "")  # their label and machine type, if different


_CHIPS_PER_HOST = 4
_V3_HOST, _SINGLE_HOST_CHIPS = ("tpu-v3-device", "ct3-hightpu"), (1, 4, 8)
_V5E, _V6E = ("tpu-v5-lite-podslice", "ct5lp-hightpu"), ("tpu-v6e-slice", "ct6e-standard")

_GENERATIONS = {
    "v2": _Generation("v2", 2),
    "v3": _Generation("v3", 2, "tpu-v3-slice", "ct3p-hightpu", single_host=_V3_HOST),
    "v4": _Generation("v4", 2, "tpu-v4-podslice", "ct4p-hightpu"),
    "v5e": _Generation("v5litepod", 1, *_V5E, "v2-alpha-tpuv5-lite", _SINGLE_HOST_CHIPS),
    "v5p": _Generation("v5p", 2, "tpu-v5p-slice", "ct5p-hightpu", "v2-alpha-tpuv5"),
    "v6e": _Generation("v6e", 1, *_V6E, "v2-alpha-tpuv6e", _SINGLE_HOST_CHIPS),
    "tpu7x": _Generation("tpu7x", 2, "tpu7x", "tpu7x-standard", runtime=""),
}


@dataclasses.dataclass(frozen=True, kw_only=True)
class SliceNames:
    """The names and sizes of a slice at Cloud TPU and GKE."""

    accelerator_type: str  # of Cloud TPU, such as v5litepod-64
    runtime_version: str  # machine image of Cloud TPU; "" if its own API does not offer the slice
    hosts: int  # machines; each runs one process
    chips_per_host: int
    gke_accelerator: str  # label cloud.google.com/gke-tpu-accelerator; "" if GKE does not offer it
    gke_topology: str  # label cloud.google.com/gke-tpu-topology, 8x8
    gke_machine_type: str  # of GKE's nodes


def slice_names(topology: "Topology") -> SliceNames:
    """Returns the names and sizes of a slice; with several slices, those of each."""
    name, _, shape = topology.slice_name.partition(":")
    generation, chips = _GENERATIONS[name], topology.chips // topology.slices
    is_single = chips in generation.single_host_chips
    chips_per_host = chips if is_single else _CHIPS_PER_HOST
    label, machine = generation.gke, generation.machine
    if is_single and generation.single_host[0]:
        label, machine = generation.single_host
    return SliceNames(
        accelerator_type=f"{generation.prefix}-{chips * generation.units_per_chip}",
        runtime_version=generation.runtime,
        hosts=chips // chips_per_host,
        chips_per_host=chips_per_host,
        gke_accelerator=label,
        gke_topology=shape,
        gke_machine_type=f"{machine}-{chips_per_host}t" if machine else "",
    )
