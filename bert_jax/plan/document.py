"""A plan as JSON: what was compiled, what it takes, what it costs."""

import dataclasses
import hashlib
import json
from collections.abc import Sequence
from typing import Any

from bert_jax import config
from bert_jax.config import Experiment
from bert_jax.model import flops
from bert_jax.plan import compile as compile_lib
from bert_jax.plan import estimate, variants
from bert_jax.plan.compile import Outcome
from bert_jax.plan.program import Program
from bert_jax.plan.topology import Topology

FORMAT_VERSION = 1

Entry = dict[str, Any]


def document(
    experiment: Experiment, slices: list[Entry], price_per_chip_hour: float | None
) -> Entry:
    """The whole plan.

    Args:
      experiment: what is planned.
      slices: as `slice_entry` gives them.
      price_per_chip_hour: in any currency; None: costs are left out.
    """
    return {
        "format_version": FORMAT_VERSION,
        "experiment": experiment.name,
        "config_sha256": config_sha256(experiment),
        "versions": compile_lib.versions(),
        "assumptions": {
            "random_bytes_per_cycle": estimate.RANDOM_BYTES_PER_CYCLE,
            "hop_seconds": estimate.HOP_SECONDS,
        },
        "price_per_chip_hour": price_per_chip_hour,
        "slices": slices,
    }


def config_sha256(experiment: Experiment) -> str:
    """Of all that a plan follows from: the resolved experiment but for its `run`."""
    fields = json.loads(config.to_json(experiment))
    del fields["run"]
    return hashlib.sha256(json.dumps(fields).encode()).hexdigest()


def slice_entry(
    experiment: Experiment,
    topology: Topology,
    outcomes: Sequence[Outcome],
    price_per_chip_hour: float | None,
) -> Entry:
    """All phases on one slice.

    Args:
      experiment: what is planned.
      topology: where.
      outcomes: of each phase.
      price_per_chip_hour: see `document`.
    """
    phases = [
        phase_entry(experiment, number, topology, outcome)
        for number, outcome in enumerate(outcomes)
    ]
    hours = [entry["hours"] for entry in phases]
    whole = None if None in hours else sum(hours)
    cost = None
    if whole is not None and price_per_chip_hour is not None:
        cost = whole * topology.chips * price_per_chip_hour
    return {
        "topology": topology.name,
        "device_kind": topology.tpu.kind,
        "chips": topology.chips,
        "devices": topology.devices,
        "device_memory": topology.device_memory,
        "phases": phases,
        "hours": whole,
        "chip_hours": None if whole is None else whole * topology.chips,
        "cost": cost,
    }


def phase_entry(experiment: Experiment, number: int, topology: Topology, outcome: Outcome) -> Entry:
    """One phase on one slice; times in seconds, sizes in bytes of a device.

    What is not known, because it was not compiled, is None.
    """
    phase = experiment.phases[number]
    entry: Entry = {
        "phase": number,
        "sequence_length": phase.sequence_length,
        "batch_size": phase.batch_size,
        "rows_per_device": phase.batch_size / variants.shards_of(experiment, topology),
        "steps": phase.steps,
        "layout": variants.variant_of(experiment, number)._asdict(),
        "outcome": outcome.kind,
        "message": outcome.message,
        "wanted": outcome.wanted,
        "available": outcome.available,
        "memory": outcome.memory,
        "hours": None,
    }
    if outcome.program is None:
        return entry
    program, dtype = outcome.program, experiment.model.compute_dtype
    seconds = estimate.estimate(program, topology, outcome.places, dtype)
    model_flops = flops.train_step_flops(
        experiment.model, phase.batch_size, phase.sequence_length, phase.max_predictions_per_seq
    )
    peak = topology.peak_flops(dtype)
    return entry | {
        "hours": phase.steps * seconds.total / 3600,
        "seconds": dataclasses.asdict(seconds) | {"total": seconds.total},
        "cycles": program.cycles,
        "clock_hz": topology.tpu.clock_hz,
        "random_bytes": program.random_bytes,
        "kernels": [dataclasses.asdict(kernel) for kernel in program.kernels],
        "model_flops": model_flops,
        "peak_flops": peak,
        "utilisation": model_flops / (seconds.total * peak),
        "collectives": collectives(program),
        "operations": program.operations,
        "checks": {
            "whole_batch": None if outcome.whole_batch is None else list(outcome.whole_batch),
            "largest_all_reduce": max(
                (c.payload for c in program.collectives if c.kind == "all-reduce"), default=0
            ),
            "in_loops": sum(c.count for c in program.collectives if c.where == "loop"),
            "endless_loops": program.endless,
        },
    }


def collectives(program: Program) -> list[Entry]:
    """By kind: how many a step, bytes of their whole arrays, the share that runs beside work."""
    found = []
    for kind in dict.fromkeys(c.kind for c in program.collectives):
        mine = [c for c in program.collectives if c.kind == kind]
        sizes = [c.count * c.payload for c in mine]
        beside = sum(c.count * c.payload for c in mine if c.cover is not None)
        found.append(
            {
                "kind": kind,
                "count": sum(c.count for c in mine),
                "bytes": sum(sizes),
                "asynchronous_share": beside / sum(sizes) if sum(sizes) else 0.0,
            }
        )
    return found
