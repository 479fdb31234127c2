"""`pod_member.py FOLDER WHO STEP WHAT ARGS...`: `bert-jax ARGS` that notes down its rows.

Before step STEP process WHO does WHAT: `hang`, or gets the signal of that name; `none` is
nothing; `blinded` fails to read checkpoints; `poison` makes three steps from STEP on have no finite
loss, on all processes; `late` begins only then, and is worth a stop; `errs`: a device of WHO does,
as `test_recompute_check.sicken` has it. Each process writes a line (step, row, hash of all that the
row holds) for each row of its devices to FOLDER. In ARGS $JAX_PROCESS_ID is the process's number,
and `@chdir F` leads the command to run in F/NUMBER: as hosts have disks of their own.
"""

import errno
import json
import os
import pathlib
import signal
import sys
import time

import jax
import pytest

from bert_jax import cli
from bert_jax.checkpoints import load
from bert_jax.distributed import slices
from bert_jax.storage import retry
from bert_jax.tools.verify.child import rows_of
from bert_jax.training import step

FOLDER, WHO, STEP, WHAT = pathlib.Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]), sys.argv[4]
ME = int(os.environ.get("JAX_PROCESS_ID", "0"))
if WHAT == "errs":
    tests = pathlib.Path(__file__).parents[1]
    sys.path += [str(tests), str(tests / "training")]
    from test_recompute_check import sicken

    sicken(pytest.MonkeyPatch(), {STEP - 1, STEP}, WHO)
make_train_step = step.make_train_step


def make_noting(*args):
    train_step = make_train_step(*args)

    def noting(state, window, batch, key, fixed):
        now = int(state["step"])
        if WHAT == "poison" and STEP <= now < STEP + 3:
            batch = batch | {"masked_lm_weights": batch["masked_lm_weights"] * float("nan")}
        elif (
            WHAT not in ("none", "poison", "blinded", "late", "errs") and now == STEP and ME == WHO
        ):
            if WHAT == "hang":
                time.sleep(1000)
            os.kill(os.getpid(), getattr(signal, WHAT))
        if WHAT not in ("none", "errs") and now >= STEP:
            time.sleep(0.2)  # jax takes a second to hear a signal
        with open(FOLDER / f"rows-{jax.process_count()}-{ME}.jsonl", "a") as file:
            for row, sha in rows_of(batch):
                file.write(json.dumps([now, row, sha]) + "\n")
        return train_step(state, window, batch, key, fixed)

    return noting


FOLDER.mkdir(exist_ok=True, parents=True)
step.make_train_step = make_noting
if WHAT == "late":
    slices.restart_pays_off = lambda *args: True
    while ME == WHO and not any(f"[{STEP}, " in path.read_text() for path in FOLDER.iterdir()):
        time.sleep(0.1)
if WHAT == "blinded":
    retry.FIRST_WAIT = 0.1
    retry.call_with_retries.__kwdefaults__["seconds"] = 3.0
    if ME == WHO:

        def away(*args, **kwargs):
            raise OSError(errno.ESTALE, "Stale file handle")

        load.ocp.load = away
args = [os.path.expandvars(arg) for arg in sys.argv[5:]]
if args[0] == "@chdir":
    os.chdir(pathlib.Path(args[1]) / str(ME))
    args = args[2:]
sys.exit(cli.main(args))
