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
import shutil
import subprocess
import sys
import tempfile
import time
import zlib
from collections.abc import Callable
from typing import Any

import jax
import numpy as np
from etils import epath

from benchmarks import measure
from bert_jax import config
from bert_jax.config import Run
from bert_jax.running import peers
from bert_jax.running.checkpoint import Checkpoints
from bert_jax.training import mesh as mesh_lib
from bert_jax.training import step
from bert_jax.training.checksums import checksums
from bert_jax.training.objective import Pretraining

ROOT = pathlib.Path(__file__).parents[1]
PROCESSES = 4
_DISK, _MEMORY = 10e9, 16e9


def main() -> int:
    """Returns 1 where a process failed, 2 where there is too little disk or memory."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--folder", default="", help="where the checkpoint goes; default: TMPDIR")
    parser.add_argument("--experiment", default="bert_large_pod", help="whose state it is")
    parser.add_argument("--out", default="", help="folder of the result; default: results/")
    parser.add_argument("--member", default="", help=argparse.SUPPRESS)
    flags = parser.parse_args()
    if flags.member:
        member(pathlib.Path(flags.member), flags.experiment)
        return 0
    with tempfile.TemporaryDirectory(dir=flags.folder or None) as name:
        folder = pathlib.Path(name)
        lacking = [
            f"{have / 1e9:.1f} GB of {what}, {needed / 1e9:.0f} are needed"
            for what, have, needed in (
                (f"disk in {folder.parent}", shutil.disk_usage(folder).free, _DISK),
                ("memory", _available_memory(), _MEMORY),
            )
            if have < needed
        ]
        if lacking:
            print(f"scale_checkpoint: there are {'; '.join(lacking)}", file=sys.stderr)
            return 2
        command = [
            *(sys.executable, "-m", "launch", "local", "--processes", str(PROCESSES)),
            *("--devices-per-process", "2", "--"),
            *(sys.executable, "-m", "benchmarks.scale_checkpoint", "--member", name),
            *("--experiment", flags.experiment),
        ]
        if subprocess.run(command, cwd=ROOT, check=False).returncode:
            return 1
        found = [json.loads((folder / f"{i}.json").read_text()) for i in range(PROCESSES)]
    report(found, flags.out)
    return 0


def report(found: list[dict[str, Any]], out: str) -> None:
    """Prints the line, and keeps it with what each process found."""
    names = ("save", "restore", "checksums")
    figures = {
        "state_gigabytes": found[0]["bytes"] / 1e9,
        "processes": len(found),
        **{f"{name}_cpu_s": sum(one["cpu"][name] for one in found) for name in names},
        "save_blocking_wall_s": max(one["wall"]["blocking"] for one in found),
        "peak_gigabytes_a_process": max(one["peak"] for one in found) / 1e9,
    }
    measure.report("scale_checkpoint", figures, {"processes": found}, out)


def member(folder: pathlib.Path, name: str) -> None:
    """What one process does; it writes down what it found."""
    with peers.connected() as everyone:
        experiment = config.load(str(ROOT / "experiments" / f"{name}.py"))
        mesh = mesh_lib.make_mesh(experiment.parallelism)
        everyone.connect(mesh)
        objective = Pretraining(experiment.model)
        abstract = step.abstract_state(
            objective, experiment.optimizer, experiment.parallelism, mesh
        )
        held = {"state": jax.tree.map(_filled, abstract)}
        found: dict[str, Any] = {"cpu": {}, "wall": {}}
        found["bytes"] = sum(leaf.nbytes for leaf in jax.tree.leaves(held))

        def timed(what: str, work: Callable[[], Any]) -> Any:
            cpu, wall = time.process_time(), time.monotonic()
            done = work()
            found["cpu"][what] = time.process_time() - cpu
            found["wall"][what] = time.monotonic() - wall
            return done

        def agreed(what: str, complaint: str) -> str:
            return everyone.first_error(what, complaint)

        timed("compiling checksums", lambda: checksums(held))
        timed("checksums", lambda: checksums(held))
        with Checkpoints(epath.Path(folder / "checkpoints"), Run(), "write") as saved:
            timed("blocking", lambda: saved.save(1, held["state"], {}))
            timed("rest", saved.finish)
            held.clear()
            restored = timed("restore", lambda: saved.newest(abstract, None, agreed))
            if restored is None or restored.damaged:
                raise RuntimeError("what was saved was not restored")
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


def _available_memory() -> float:
    with open("/proc/meminfo", encoding="ascii") as file:
        fields = dict(line.split(":", 1) for line in file)
    return float(fields["MemAvailable"].split()[0]) * 1024


if __name__ == "__main__":
    sys.exit(main())
