"""Compiles one step for one slice, in a process of its own: the compiler may take it down.

    python -m bert_jax.plan.worker JOB.json OUTCOME.json

`plan.compile` starts it, in an environment without devices, and says what the files hold.
"""

import dataclasses
import json
import re
import sys
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
from etils import epath
from jax.experimental import topologies

from bert_jax import config, system
from bert_jax.config import Experiment, Phase
from bert_jax.errors import InputError
from bert_jax.plan import checks, hlo, program, topology
from bert_jax.storage.workdir import write_atomic
from bert_jax.training import mesh as mesh_lib
from bert_jax.training import step
from bert_jax.training.objective import Pretraining
from bert_jax.training.pretraining import require_runnable

_UNITS = {"": 1, "K": 2**10, "M": 2**20, "G": 2**30, "T": 2**40}
_SIZE = r"([\d.]+)([KMGT]?)"
# As the compiler words it: of temporaries alone, or of all that a program needs.
_TOO_LARGE = (
    re.compile(rf"\({_SIZE}\) exceeds available HBM \({_SIZE}\)"),
    re.compile(rf"Used {_SIZE} of {_SIZE} hbm"),
)


def main(job_file: str, outcome_file: str) -> None:
    """Reads a job, compiles it and writes what came of it; dies with the process that asked."""
    system.die_with_parent()
    job = json.loads(epath.Path(job_file).read_text())
    experiment = config.from_json(json.dumps(job["experiment"]), job_file)
    asked = topology.parse(job["topology"])
    described = topologies.get_topology_desc(
        platform="tpu", topology_name=asked.name, **asked.compiler_options
    )
    try:
        outcome = compile_step(experiment, job["phase"], described.devices)
    except InputError as error:
        outcome = {"kind": "refused", "message": str(error)}
    except jax.errors.JaxRuntimeError as error:
        outcome = failure(str(error))
    write_atomic(epath.Path(outcome_file), json.dumps(outcome))


def compile_step(
    experiment: Experiment, number: int, devices: Sequence[jax.Device]
) -> dict[str, Any]:
    """What came of compiling the training step of a phase for devices that need not be there.

    Raises:
      InputError: the experiment cannot be laid over so many devices.
      jax.errors.JaxRuntimeError: the compiler refuses.
    """
    mesh = mesh_lib.make_mesh(experiment.parallelism, devices)
    require_runnable(experiment, mesh)
    objective = Pretraining(experiment.model)
    state = step.abstract_state(objective, experiment.optimizer, experiment.parallelism, mesh)
    compiled = lower_step(experiment, number, mesh, state).compile()
    memory = compiled.memory_analysis()
    peak, code = memory.peak_memory_in_bytes, memory.generated_code_size_in_bytes
    if experiment.run.check_every:
        options = step.self_checks(mesh.devices.flat[0].device_kind)
        checked = lower_step(experiment, number, mesh, state, options).compile().memory_analysis()
        # Both programs are loaded, and one of them runs.
        peak = max(peak, checked.peak_memory_in_bytes)
        code += checked.generated_code_size_in_bytes
    module = hlo.parse(compiled.as_text())
    shards = mesh_lib.data_shards(mesh)
    return {
        "kind": "compiled",
        "memory": {
            "peak": peak,
            "arguments": memory.argument_size_in_bytes,
            "temporaries": memory.temp_size_in_bytes,
            "code": code,
            "donated": memory.alias_size_in_bytes,
        },
        "program": dataclasses.asdict(program.read_module(module)),
        "places": [[*device.coords, device.core_on_chip] for device in mesh.devices.flat],
        "parameters": parameter_table(state["params"]),
        "whole_batch": checks.whole_batch_arrays(module, experiment, number, shards),
    }


def lower_step(
    experiment: Experiment,
    number: int,
    mesh: jax.sharding.Mesh,
    state: step.State,
    compiler_options: step.CompilerOptions = (),
) -> jax.stages.Lowered:
    """The training step of a phase, traced for a mesh and an abstract state."""
    replicated = mesh_lib.replicated(mesh)
    objective = Pretraining(experiment.model)
    train_step = step.make_train_step(
        objective,
        experiment.optimizer,
        experiment.parallelism,
        experiment.parallelism.accumulation_of(number),
        experiment.total_steps,
        mesh,
        compiler_options,
    )
    key = jax.eval_shape(lambda: step.phase_key(experiment.model, experiment.seed, number))
    return train_step.lower(
        state,
        _placed(jax.eval_shape(lambda: step.empty_window(objective)), replicated),
        _placed(abstract_batch(experiment.phases[number]), mesh_lib.batch_sharding(mesh)),
        _placed(key, replicated),
    )


def parameter_table(params: Any) -> list[str]:
    """A line for each parameter: path, shape, type, and the shape of what one device holds."""
    lines = []
    for path, leaf in jax.tree.leaves_with_path(params):
        name = "/".join(key.key for key in path)
        mine = leaf.sharding.shard_shape(leaf.shape)
        lines.append(f"{name} {list(leaf.shape)} {leaf.dtype}, on a device {list(mine)}")
    return lines


def abstract_batch(phase: Phase) -> dict[str, jax.ShapeDtypeStruct]:
    """Shapes and types of what `data.batches` gives for a step of the phase."""
    rows, length, masked = phase.batch_size, phase.sequence_length, phase.max_predictions_per_seq
    shapes = {
        "rows": ((rows,), np.uint32),
        "row_weights": ((rows,), np.float32),
        "input_ids": ((rows, length), np.int32),
        "segment_ids": ((rows, length), np.int32),
        "input_mask": ((rows, length), np.int32),
        "masked_lm_positions": ((rows, masked), np.int32),
        "masked_lm_ids": ((rows, masked), np.int32),
        "masked_lm_weights": ((rows, masked), np.float32),
        "next_sentence_labels": ((rows,), np.int32),
    }
    return {name: jax.ShapeDtypeStruct(*value) for name, value in shapes.items()}


def _placed(tree: Any, sharding: jax.sharding.Sharding) -> Any:
    return jax.tree.map(
        lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding), tree
    )


def failure(message: str) -> dict[str, Any]:
    """The outcome for what the compiler says when it refuses.

    A program that wants too much memory gives `wanted` and `available`, bytes of a device.
    """
    line = message.strip().split("\n")[0]
    if not line.startswith("RESOURCE_EXHAUSTED"):
        return {"kind": "failed", "message": line}
    outcome: dict[str, Any] = {"kind": "too large", "message": line}
    for pattern in _TOO_LARGE:
        found = pattern.search(message)
        if found:
            wanted, available = (float(found[i]) * _UNITS[found[i + 1]] for i in (1, 3))
            outcome |= {"wanted": wanted, "available": available}
            break
    return outcome


if __name__ == "__main__":
    main(*sys.argv[1:])
