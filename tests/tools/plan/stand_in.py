"""Made-up outcomes of compilations, and what the real compiler wrote (make_modules.py)."""

import dataclasses
import gzip
import os
import pathlib
import signal
import time

import numpy as np

from bert_jax.tools.plan import topology
from bert_jax.tools.plan.compile import Outcome
from bert_jax.tools.plan.schedule import Collective, Program

MODULES = pathlib.Path(__file__).parent / "modules"
VERSIONS = {"libtpu": "1.2", "jax": "3.4", "jaxlib": "3.4"}


def text(name: str) -> str:
    return gzip.decompress((MODULES / f"{name}.txt.gz").read_bytes()).decode()


def program(cycles: int) -> Program:
    gather = Collective(
        kind="all-gather",
        count=2,
        payload=90_000_000,
        group=tuple(range(8)),
        where="loop",
    )
    gathering = (("start", 0, "gather"), ("done", "gather"))
    return Program(
        schedule=(("work", "other", cycles, 0), ("loop", 2, gathering)),
        kernels=(),
        collectives=(gather,),
        operations={"fusion": 3},
        endless=0,
    )


def compiled(topology_: topology.Topology, cycles: int = 15_000_000) -> Outcome:
    axes = [range(length) for length in topology_.shape]
    grid = np.stack(np.meshgrid(*axes, indexing="ij"), -1).reshape(-1, len(axes))
    cores = range(topology_.tpu.devices_per_chip)
    return Outcome(
        kind="compiled",
        memory={"peak": 2**30, "arguments": 2**28, "temporaries": 2**29, "code": 2**20},
        program=program(cycles),
        places=tuple((*map(int, place), core) for place in grid for core in cores),
        whole_batch=(),
    )


TOO_LARGE = Outcome(
    kind="too large", message="RESOURCE_EXHAUSTED", wanted=20 * 2**30, available=16 * 2**30
)


# --- what a worker does instead of `compile_job` ---


def crash(job, dump):
    os.kill(os.getpid(), signal.SIGSEGV)


def leave(job, dump):
    """Ends as libtpu does where it cannot start."""
    print("first\nlast line", flush=True)
    os._exit(1)


def exceed(job, dump):
    return TOO_LARGE


def exceed_slowly(job, dump):
    return dataclasses.replace(TOO_LARGE, cpu_seconds=90.0)


def refuse(job, dump):
    return Outcome(kind="refused", message="phases.0.batch_size=3: not a multiple")


def refuse_the_second(job, dump):
    """The first phase takes for ever."""
    return refuse(job, dump) if job.phase else time.sleep(600)
