"""What saving and restoring costs at the paper's size.

`python -m benchmarks.scale_checkpoint [--folder F]`. The state of BERT-LARGE with Adam's moments
(4 GB), cut over four processes as zero3 cuts it, is saved, restored and its checksums are compared.
CPU seconds are those of all processes, since machines are shared. It needs 10 GB of disk, which it
gives back, and 16 GB of memory.
"""

import argparse
import json
import pathlib
import resource
import subprocess
import sys
import tempfile
import zlib
from collections.abc import Callable

import jax
import numpy as np

from benchmarks import measure
from bert_jax import config
from bert_jax.checkpoints.save import Saver
from bert_jax.config import Run
from bert_jax.distributed import peers
from bert_jax.storage.workdir import Workdir
from bert_jax.training import mesh as mesh_lib
from bert_jax.training import step
from bert_jax.training.checksums import checksums
from bert_jax.training.objective import Pretraining

PROCESSES = 4
_DISK, _MEMORY = 2.5, 4.0  # times the state


def main() -> None:
    """Starts the processes, and adds up what each has found."""
    flags = measure.parser(
        __doc__,
        folder=("", "where the checkpoint goes; default: TMPDIR"),
        experiment=("bert_large_pod", "whose state it is"),
        member=("", argparse.SUPPRESS),
    ).parse_args()
    if flags.member:
        member(pathlib.Path(flags.member), flags.experiment)
        return
    with tempfile.TemporaryDirectory(dir=flags.folder or None) as name:
        folder = pathlib.Path(name)
        of = config.load(str(measure.ROOT / "experiments" / f"{flags.experiment}.py"))
        state = jax.eval_shape(lambda: step.init_state(Pretraining(of.model), of.optimizer, 0))
        size = sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(state))
        measure.require_room(folder, _DISK * size)
        lines = pathlib.Path("/proc/meminfo").read_text().splitlines()
        have = 1024 * next(int(line.split()[1]) for line in lines if "MemAvailable" in line)
        if have < _MEMORY * size:
            sys.exit(f"{have / 1e9:.1f} GB of memory are free, {_MEMORY * size / 1e9:.0f} needed")
        command = [
            *(sys.executable, "-m", "launch", "local", "--processes", str(PROCESSES)),
            *("--devices-per-process", "2", "--"),
            *(sys.executable, "-m", "benchmarks.scale_checkpoint", "--member", name),
            *("--experiment", flags.experiment),
        ]
        subprocess.run(command, cwd=measure.ROOT, check=True)
        found = [json.loads((folder / f"{i}.json").read_text()) for i in range(PROCESSES)]
    names = ("save", "restore", "checksums")
    figures = {
        "state_gigabytes": size / 1e9,
        "processes": PROCESSES,
        **{f"{name}_cpu_s": sum(one["cpu"][name] for one in found) for name in names},
        "save_blocking_wall_s": max(one["wall"]["blocking"] for one in found),
        "peak_gigabytes_a_process": max(one["peak"] for one in found) / 1e9,
    }
    measure.report("scale_checkpoint", figures, {"processes": found}, flags.out)


def member(folder: pathlib.Path, name: str) -> None:
    """What one process does; it writes down what it found."""
    with peers.connect_processes() as everyone:
        experiment = config.load(str(measure.ROOT / "experiments" / f"{name}.py"))
        mesh = mesh_lib.make_mesh(experiment.parallelism)
        everyone.connect_devices(mesh)
        of = (Pretraining(experiment.model), experiment.optimizer, experiment.parallelism)
        abstract = step.abstract_state(*of, mesh)
        held = {"state": jax.tree.map(_filled, abstract)}
        found = {"cpu": {}, "wall": {}}

        def timed(what: str, work: Callable[[], object]) -> None:
            found["cpu"][what], found["wall"][what] = measure.clocked(work)

        def restore() -> None:
            restored = saved.checkpoints.restore_newest(abstract, None, everyone.exchange_errors)
            if restored is None or restored.damaged:
                raise RuntimeError("what was saved was not restored")

        timed("compiling checksums", lambda: checksums(held))
        timed("checksums", lambda: checksums(held))
        with Saver(Workdir(folder), Run(), everyone, print) as saved:
            timed("blocking", lambda: saved.save(1, held["state"], {}))
            timed("rest", saved.wait)
            held.clear()
            timed("restore", restore)
        found["cpu"]["save"] = found["cpu"]["blocking"] + found["cpu"]["rest"]
        found["peak"] = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
        (folder / f"{everyone.number}.json").write_text(json.dumps(found))


def _filled(leaf: jax.ShapeDtypeStruct) -> jax.Array:
    """An array of random bits, made where they lie: what is all alike takes no place on a disk."""

    def part(index: tuple[slice, ...]) -> np.ndarray:
        shape = np.empty(leaf.shape, np.bool_)[index].shape
        values = np.random.default_rng(zlib.crc32(str(index).encode())).random(shape, np.float32)
        return values.astype(leaf.dtype)

    return jax.make_array_from_callback(leaf.shape, leaf.sharding, part)


if __name__ == "__main__":
    main()
