"""`kill_at.py STEP SIGNAL ARGS...`: `bert-jax ARGS`, sent the signal before step STEP."""

import os
import sys

from bert_jax import cli
from bert_jax.training import step

STEP, SIGNAL = int(sys.argv[1]), int(sys.argv[2])
make_train_step = step.make_train_step


def make_deadly(*args):
    train_step = make_train_step(*args)

    def deadly(state, window, batch, key):
        if int(state["step"]) == STEP:
            os.kill(os.getpid(), SIGNAL)
        return train_step(state, window, batch, key)

    return deadly


step.make_train_step = make_deadly
sys.exit(cli.main(sys.argv[3:]))
