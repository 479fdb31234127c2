"""The same run over other devices and processes: the same batches, losses to rounding."""

import pathlib
import signal
from dataclasses import replace

from bert_jax import errors
from bert_jax.config import Experiment
from bert_jax.verify import compare
from bert_jax.verify.children import Children
from bert_jax.verify.compare import Comparison
from bert_jax.verify.lineage import other_batches
from bert_jax.verify.notes import Execution, Notes
from bert_jax.verify.orders import Death, Order

# How far losses may be off, relatively, in lines of the first steps: sums over devices are added
# in another order, and a run multiplies what rounding does to it. Those of experiments/tiny.py were
# off by 2e-7 up to step 300, 4e-6 at 350, 2e-4 at 400, and in the end by 1e-3, of next sentence by
# a tenth. So the meshes take turns in these steps, and later lines say nothing of them.
TOLERANCE, STEPS = 1e-4, 300

# As a shell, and so the local pod, says that a process was killed.
_KILLED = 128 + signal.SIGKILL


def left_out(experiment: Experiment, platform: str) -> str:
    """Why the run cannot be laid over other devices here, in words; "" if it can.

    Args:
      experiment: the claim.
      platform: of the devices that the undisturbed run had.
    """
    if platform != "cpu":
        return f"virtual devices are of a CPU, and this run had {platform}"
    if experiment.parallelism.tensor > 1:
        return f"parallelism.tensor={experiment.parallelism.tensor} asks for more than two devices"
    if experiment.model.dropout_rng != "threefry8":
        return f"the noise of model.dropout_rng={experiment.model.dropout_rng} is the mesh's own"
    optimizer = experiment.optimizer
    if optimizer.clip == "per_replica" and optimizer.reference_replicas % 2:
        replicas = optimizer.reference_replicas
        return f"optimizer.reference_replicas={replicas} cannot be halved"
    for number, phase in enumerate(experiment.phases):
        parts = experiment.parallelism.accumulation_of(number)
        if phase.batch_size % (2 * parts):
            return f"phases.{number}.batch_size={phase.batch_size} cannot be halved"
    return ""


def run(
    children: Children,
    experiment: Experiment,
    workdir: pathlib.Path,
    undisturbed: pathlib.Path,
    planned: dict[int, Execution],
    not_finite: range,
) -> list[Comparison]:
    """Two devices, stopped; two processes, of which one is killed; one device, to the end.

    Args:
      children: start the command.
      experiment: the claim.
      workdir: where.
      undisturbed: the workdir of the run that is compared with.
      planned: {step: what it did there}.
      not_finite: steps whose loss is made not to be.
    """
    notes, compared = workdir.with_name(workdir.name + ".notes"), min(experiment.total_steps, STEPS)
    told = Order(None, str(notes), not_finite=tuple(not_finite))
    stop, kill = (
        Death("step", signal.SIGTERM, compared // 3),
        Death("step", step=2 * compared // 3, process=1),
    )
    stages = (
        ("2 devices", 2, replace(told, start=1, death=stop), errors.STOPPED),
        ("2 processes", 1, replace(told, start=2, death=kill, processes=2), _KILLED),
        ("1 device", 1, replace(told, start=3), errors.FINISHED),
    )
    ends = []
    for what, devices, order, code in stages:
        ended = children.run("pretrain", workdir, order, devices=devices)
        if ended.code != code:
            said = "; ".join(ended.tail)
            ends.append(f"on {what}: ended with exit code {ended.code}, not {code}: {said}")
    whose = f"{workdir.name} ({', '.join(what for what, *_ in stages)})"
    if ends:
        return [Comparison(whose, "started and stopped", ends)]
    found = Notes.read(notes)
    seen = " + ".join(str(len(found.of_start(start))) for start in (1, 2, 3))
    # The step in which a process was killed was noted by those that came to it alone.
    whole = [e for e in found.executions if e.start != 2 or e.step < found.killed[2]]
    worst, where = compare.losses(workdir, undisturbed, compared)
    off = [] if worst <= TOLERANCE else [f"{where} is off by {worst:.2g}"]
    return [
        Comparison(whose, f"{seen} batches by hash", other_batches(whole, planned)),
        compare.rows(whose, experiment, found.survivors()),
        Comparison(
            whose,
            f"losses up to step {compared} off by {worst:.1e} at most, {TOLERANCE:.0e} allowed",
            off,
        ),
    ]
