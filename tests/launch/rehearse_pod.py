"""A pod with a bucket over a network that fails, rehearsed on this machine: `make rehearse-pod`.

BERT-LARGE's pod experiment in its real form (zero3, bfloat16, both phases) at toy width: four
processes of two devices, started by the command and the variables of the rendered JobSet, a cache
folder each, corpus and workdir in a bucket. It is prepared, run, preempted twice and moved to new
machines, while calls fail at random and the bucket is away for a while; what JobSet would start
again is started again, and nothing else is done by hand. The end must be that of a run that nothing
disturbed, bit for bit. With --faults the rounds go on until so many were injected.
"""

import argparse
import collections
import os
import pathlib
import random
import subprocess
import sys
import tempfile
import threading
import time
from typing import NamedTuple

import cluster
import fake_gcs
import rehearse
from fake_gcs import Fault
from small_run import settings, write_text

from bert_jax import errors
from bert_jax.tools.plan import topology
from launch import spec

HERE = pathlib.Path(__file__).resolve().parent
ROOT = HERE.parents[1]
HOSTS, DEVICES = 4, 2
STEPS = (24, 12)
TOY = (
    *("model.vocab_size=45", "model.hidden_size=32", "model.num_hidden_layers=2"),
    *("model.num_attention_heads=2", "model.intermediate_size=64"),
    *("model.max_position_embeddings=48", "corpus.layout=sentences_by_line"),
    *("corpus.validation_share=0.3", "data.eval_sequence_length=16", "data.eval_rows=24"),
    *("data.eval_max_predictions_per_seq=3", "optimizer.warmup_steps=4"),
    *(f"phases.0.steps={STEPS[0]}", "phases.0.sequence_length=16"),
    *("phases.0.max_predictions_per_seq=3", "phases.0.batch_size=16"),
    *(f"phases.1.steps={STEPS[1]}", "phases.1.sequence_length=32"),
    *("phases.1.max_predictions_per_seq=5", "phases.1.batch_size=16"),
    *("run.log_every=3", "run.eval_every=6", "run.eval_batch_size=16", "run.checkpoint_every=4"),
    "run.hang_after_seconds=900",
)
# Each start of a disturbed run until its last: which machines, which host is sent SIGTERM before
# which step; and that an outage begins once a step was done. After these it runs to its end.
STARTS = (("a", 1, 7), ("a", 2, 17), ("b", 0, 0))
_PATIENCE = 1800.0  # seconds that a start may take


# Answers that clients or `storage.retry` try again: statuses, a reset, and a late reset.
FAULTS = (Fault(408), Fault(429), Fault(500), Fault(503), Fault(0), Fault(0, seconds=3.0))


class Weather:
    """Decides which requests to the bucket fail: a share of each kind, and all in an outage."""

    def __init__(self, seed: int, bucket: fake_gcs.Bucket):
        self._random, self._lock = random.Random(seed), threading.Lock()
        self._shares: dict[str, float] = {}
        self._away_until = 0.0
        self.count = 0  # injected faults, without those of outages
        bucket.fault = self._fault

    def storm(self, shares: dict[str, float]) -> None:
        """Fails this share of the requests of each kind from now on; {}: none."""
        with self._lock:
            self._shares = shares

    def begin_outage(self, seconds: float) -> None:
        """Fails all requests for so long."""
        with self._lock:
            self._away_until = time.monotonic() + seconds

    def _fault(self, method: str, name: str, kind: str) -> Fault | None:
        with self._lock:
            if time.monotonic() < self._away_until:
                return Fault(503)
            if self._random.random() >= self._shares.get(kind, 0.0):
                return None
            self.count += 1
            return self._random.choice(FAULTS)


class Rehearsal(NamedTuple):
    """What a rehearsal needs: a folder, and the bucket with its weather and environment."""

    folder: pathlib.Path
    bucket: fake_gcs.Bucket
    weather: Weather
    variables: dict[str, str]


def specified(folder: pathlib.Path, name: str) -> spec.Spec:
    """The launch of the run gs://bucket/NAME."""
    own = (f"corpus.sources=text:{folder}/text", f"corpus.tokenizer={folder}/vocab.txt")
    return spec.make_spec(
        str(ROOT / "experiments" / "bert_large_pod.py"),
        [*TOY, *own, f"run.corpus_dir=gs://bucket/{name}/corpus"],
        workdir=f"gs://bucket/{name}/run",
        topology=topology.parse("v5e:4x4"),
        hosts=HOSTS,
        name=name,
        retries=50,
    )


def environment(of: Rehearsal) -> dict[str, str]:
    """Returns a process's variables; compiled programs go where a user's go."""
    path = os.pathsep.join([str(ROOT), str(ROOT / "tests"), str(HERE)])
    variables = os.environ | settings(DEVICES) | of.variables | {"PYTHONPATH": path}
    del variables["JAX_COMPILATION_CACHE_DIR"]
    return variables


def prepare(of: Rehearsal, launched: spec.Spec) -> None:
    """`bert-jax prepare`, on one machine, again while it says that it may be."""
    config = of.folder / f"{launched.name}.json"
    config.write_text(launched.config)
    words = ["-m", "bert_jax.cli", "prepare", str(config), "--workdir", launched.workdir]
    cache = {"BERT_JAX_CACHE_DIR": str(of.folder / launched.name / "prepare-cache")}
    for _ in range(10):
        done = subprocess.run([sys.executable, *words], env=environment(of) | cache, check=False)
        if done.returncode != errors.UNAVAILABLE:
            break
    assert done.returncode == 0, f"prepare ended with {done.returncode}"


def start(
    of: Rehearsal, launched: spec.Spec, number: int, machines: str, deed: str, outage: float
) -> list[int]:
    """One start of the JobSet's pods; their exit codes."""
    at = of.folder / launched.name / machines
    if not at.exists():
        rehearse.files(at, launched)
    words = ["--processes", HOSTS, "--devices-per-process", DEVICES, "--arrive-within", 300]
    words += ["--hang-after", 900, "--", sys.executable, HERE / "rehearse.py"]
    words += [at, number, *deed.split()]
    process = subprocess.Popen(
        [sys.executable, "-m", "launch", "local", *map(str, words)],
        cwd=ROOT,
        env=environment(of),
    )
    if outage:
        threading.Thread(
            target=_outage_after_a_step, args=(of, at / f"rows-{number}", process, outage)
        ).start()
    process.wait(_PATIENCE)
    codes = []
    for host in range(HOSTS):
        code = at / f"code-{number}-{host}"
        codes.append(int(code.read_text()) if code.exists() else -9)
    return codes


def _outage_after_a_step(
    of: Rehearsal, rows: pathlib.Path, process: subprocess.Popen, seconds: float
) -> None:
    while process.poll() is None:
        if rows.exists() and any(path.stat().st_size for path in rows.iterdir()):
            of.weather.begin_outage(seconds)
            return
        time.sleep(0.2)


def run(of: Rehearsal, launched: spec.Spec, outages: tuple[float, ...]) -> int:
    """The run to its end, as JobSet would have it; how many starts it took.

    Args:
      of: the rehearsal.
      launched: the run.
      outages: seconds; each begins in a start of its own. None: nothing disturbs the run.
    """
    plain = not outages
    for number in range(launched.retries):
        machines, host, step = STARTS[min(number, len(STARTS) - 1)]
        deed = f"{host} {step} SIGTERM" if step and not plain else "0 0 none"
        outage = outages[number] if number < len(outages) else 0.0
        began = time.monotonic()
        codes = start(of, launched, number, machines, deed, outage)
        if judged(of, launched, number, machines, codes, began) == "Completed":
            return number + 1
    raise AssertionError("too many starts")


def judged(
    of: Rehearsal, launched: spec.Spec, number: int, machines: str, codes: list[int], began: float
) -> str:
    """What becomes of the JobSet after a start."""
    _, manifest = cluster.read((of.folder / launched.name / machines / "manifest.yaml").read_text())
    after = cluster.after(manifest, codes)
    print(
        f"rehearsal: {launched.name}, start {number} on machines {machines}: exit codes "
        f"{codes}, {time.monotonic() - began:.0f} s; JobSet: {after}",
        flush=True,
    )
    assert after in ("Completed", "RestartJobSet", "RestartJob"), f"{after}: by hand, then"
    return after


def differences(of: Rehearsal, name: str, other: str) -> list[str]:
    """What of two runs is not the same: lines, rows, or the bits of their last states."""
    differing = []
    for file in ("metrics.jsonl", "predictions.jsonl"):
        texts = [
            of.bucket.files(f"{one}/run/{file}").get(f"{one}/run/{file}") for one in (name, other)
        ]
        if texts[0] is None or texts[0] != texts[1]:
            differing.append(file)
    rows = [_rows(of.folder / one) for one in (name, other)]
    if not rows[0] or rows[0] != rows[1]:
        differing.append(f"rows: {len(rows[0] ^ rows[1])} of {len(rows[1])}")
    code = (
        "import sys; from etils import epath; import jax\n"
        "from bert_jax.training import mesh\n"
        "from bert_jax.checkpoints.load import Checkpoints\n"
        "saved = Checkpoints(epath.Path(sys.argv[1]))\n"
        "step = max(saved.steps)\n"
        "tree = saved.abstract_state(step, mesh.replicated(mesh.one_device()))\n"
        "state = saved.restore(step, tree).state\n"
        "print(step, *sorted(saved.metadata(step)['checksums'].items()))\n"
    )
    states = [
        subprocess.run(
            [sys.executable, "-c", code, f"gs://bucket/{one}/run/checkpoints"],
            env=environment(of) | settings(1) | {"JAX_COMPILATION_CACHE_DIR": ""},
            capture_output=True,
            text=True,
            check=True,
        ).stdout.splitlines()[-1]
        for one in (name, other)
    ]
    if states[0] != states[1] or not states[0].startswith(f"{sum(STEPS)} "):
        differing.append("last state")
    aside = list(of.bucket.files(f"{name}/run/checkpoints/damaged-"))
    return differing + [f"{path} was put aside" for path in aside[:1]]


def _rows(folder: pathlib.Path) -> set[str]:
    """(step, row, hash) of all that lay on devices, over all starts."""
    return {line for path in folder.glob("*/rows-*/*") for line in path.read_text().splitlines()}


def rehearsed(folder: pathlib.Path, faults: int, outages: tuple[float, ...], seed: int) -> int:
    """Rounds until so many faults were injected; how many of them ended differently."""
    write_text(folder, documents=60)
    with fake_gcs.serve() as (bucket, variables):
        weather = Weather(seed, bucket)
        of = Rehearsal(folder, bucket, weather, variables)
        calm = specified(folder, "calm")
        prepare(of, calm)
        bucket.requests.clear()
        run(of, calm, ())
        usual = collections.Counter(kind for _, kind in bucket.requests)
        different, number = 0, 0
        while weather.count < faults:
            number += 1
            launched = specified(folder, f"rough-{number}")
            # As many faults of each kind of call, however rare the kind is.
            share = faults / 2 / len(usual)
            weather.storm({kind: min(share / n, 0.12) for kind, n in usual.items()})
            prepare(of, launched)
            starts = run(of, launched, outages)
            weather.storm({})
            differing = differences(of, launched.name, calm.name)
            different += bool(differing)
            print(
                f"rehearsal: round {number}: {starts} starts, {weather.count} faults so far; "
                + (f"DIFFERENT: {'; '.join(differing)}" if differing else "equal bit for bit"),
                flush=True,
            )
        return different


def main() -> int:
    """Returns 0 if no round ended differently."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--faults", type=int, default=200, help="at least so many")
    parser.add_argument("--outages", default="40,180", help="seconds, comma-separated")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--folder", help="kept afterwards")
    args = parser.parse_args()
    outages = tuple(float(part) for part in args.outages.split(",") if part)
    with tempfile.TemporaryDirectory() as temporary:
        folder = pathlib.Path(args.folder or temporary)
        different = rehearsed(folder, args.faults, outages, args.seed)
    print(f"rehearsal: {different} rounds differ")
    return int(different > 0)


if __name__ == "__main__":
    sys.exit(main())
