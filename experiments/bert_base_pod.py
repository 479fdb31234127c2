"""BERT-Base, the fast sibling of bert_base.py for today's pods.

    bert-jax pretrain experiments/bert_base_pod.py --workdir gs://BUCKET/bert_base_pod

Source: bert_base.py, and what the TPU compiler says about ways to run it. Departures: bfloat16
compute and gradient reduction, one global gradient clip, dropout bits drawn within kernels, state
sharded over chips.
Hardware: 16 TPU chips. Nothing of the size of attention's scores is kept, so a whole batch at
length 512, 16 rows a chip, takes less time and little more memory than micro-batches.
Expected: as bert_base.py.
"""

import dataclasses

import bert_base

from bert_jax.config import Experiment, Parallelism


def experiment() -> Experiment:
    """Returns `bert_base`, which learns the same, laid out for a pod."""
    base = bert_base.experiment()
    return dataclasses.replace(
        base,
        name="bert_base_pod",
        model=dataclasses.replace(base.model, compute_dtype="bfloat16", dropout_rng="in_kernel"),
        optimizer=dataclasses.replace(
            base.optimizer, clip="global", reference_replicas=1, gradient_reduction="bfloat16"
        ),
        parallelism=Parallelism(state="zero3", remat="dots"),
    )
