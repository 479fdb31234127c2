"""What a TPU slice like v5e:8x8 is called where it is rented.

One spelling is used everywhere else (`bert_jax.plan.topology`). Cloud TPU calls the same slice by
a generation and a number, which counts cores up to v5p (two a chip; v4 and v5p join them to one
device, but count on) and chips on v5e and v6e. GKE names the generation and the shape in two
labels of a node.

Sources: Cloud TPU's pages of each generation (cloud.google.com/tpu/docs/v2 to v6e: shapes, types,
hosts and VMs), "TPU software versions" (tpu/docs/runtimes), "Plan TPUs in GKE"
(kubernetes-engine/docs/concepts/plan-tpus: labels and machine types; it offers no v2).
"""

import dataclasses

from bert_jax.errors import InputError
from bert_jax.plan.topology import Topology


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Generation:
    """How one generation is named.

    Attributes:
      prefix: of its accelerator types.
      counts: what their number counts on a chip: its cores, or it alone.
      runtime: the image of its machines that is meant for JAX.
      whole_hosts: sizes in chips of slices that are one machine with as many chips. All others
        have machines of 4.
      gke: label of its nodes; "" where GKE does not offer it.
      gke_single: the same of slices of one machine, where it is another.
      machine: type of its nodes in GKE, for {} chips a machine.
      machine_single: the same of slices of one machine, where it is another.
    """

    prefix: str
    counts: int
    runtime: str
    whole_hosts: tuple[int, ...] = (4,)
    gke: str = ""
    gke_single: str = ""
    machine: str = ""
    machine_single: str = ""


_CHIPS_A_HOST = 4

_GENERATIONS = {
    "v2": _Generation(prefix="v2", counts=2, runtime="tpu-ubuntu2204-base"),
    "v3": _Generation(
        prefix="v3",
        counts=2,
        runtime="tpu-ubuntu2204-base",
        gke="tpu-v3-slice",
        gke_single="tpu-v3-device",
        machine="ct3p-hightpu-{}t",
        machine_single="ct3-hightpu-{}t",
    ),
    "v4": _Generation(
        prefix="v4",
        counts=2,
        runtime="tpu-ubuntu2204-base",
        gke="tpu-v4-podslice",
        machine="ct4p-hightpu-{}t",
    ),
    "v5e": _Generation(
        prefix="v5litepod",
        counts=1,
        runtime="v2-alpha-tpuv5-lite",
        whole_hosts=(1, 4, 8),
        gke="tpu-v5-lite-podslice",
        machine="ct5lp-hightpu-{}t",
    ),
    "v5p": _Generation(
        prefix="v5p",
        counts=2,
        runtime="v2-alpha-tpuv5",
        gke="tpu-v5p-slice",
        machine="ct5p-hightpu-{}t",
    ),
    "v6e": _Generation(
        prefix="v6e",
        counts=1,
        runtime="v2-alpha-tpuv6e",
        whole_hosts=(1, 4, 8),
        gke="tpu-v6e-slice",
        machine="ct6e-standard-{}t",
    ),
}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Names:
    """One slice as it is rented.

    Attributes:
      accelerator_type: of Cloud TPU, v5litepod-64.
      runtime_version: of Cloud TPU, the image of its machines.
      hosts: machines; each runs one process.
      chips_per_host: of each machine.
    """

    accelerator_type: str
    runtime_version: str
    hosts: int
    chips_per_host: int


@dataclasses.dataclass(frozen=True, kw_only=True)
class GkeNames:
    """One slice as GKE's nodes are labelled.

    Attributes:
      accelerator: of cloud.google.com/gke-tpu-accelerator.
      topology: of cloud.google.com/gke-tpu-topology, 8x8.
      machine_type: of its nodes.
    """

    accelerator: str
    topology: str
    machine_type: str


def names(topology: Topology) -> Names:
    """What Cloud TPU calls a slice, and what it is made of."""
    generation = _GENERATIONS[_word(topology)]
    one_host = topology.chips in generation.whole_hosts
    chips_per_host = topology.chips if one_host else _CHIPS_A_HOST
    return Names(
        accelerator_type=f"{generation.prefix}-{topology.chips * generation.counts}",
        runtime_version=generation.runtime,
        hosts=topology.chips // chips_per_host,
        chips_per_host=chips_per_host,
    )


def gke_names(topology: Topology) -> GkeNames:
    """What GKE calls a slice.

    Raises:
      InputError: GKE does not offer its generation.
    """
    generation = _GENERATIONS[_word(topology)]
    if not generation.gke:
        offered = ", ".join(word for word, known in _GENERATIONS.items() if known.gke)
        raise InputError(
            f"--topology {topology.name}: GKE has no {_word(topology)}; choose one of {offered}, "
            "or `launch tpu_vm`"
        )
    found = names(topology)
    label, machine = generation.gke, generation.machine
    if found.hosts == 1:
        label, machine = generation.gke_single or label, generation.machine_single or machine
    return GkeNames(
        accelerator=label,
        topology=topology.name.partition(":")[2],
        machine_type=machine.format(found.chips_per_host),
    )


def _word(topology: Topology) -> str:
    return topology.name.partition(":")[0]
