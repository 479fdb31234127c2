"""BERT-Base, the fast sibling of bert_base.py for today's pods.

    bert-jax pretrain experiments/bert_base_pod.py --workdir gs://BUCKET/bert_base_pod

Source: bert_base.py, and what the TPU compiler says about ways to run it. Departures: bfloat16
compute and gradient reduction, one global gradient clip, dropout bits from the chip's own
generator, state sharded over chips.
Hardware: 16 TPU chips; at length 512 accumulation keeps about 2,048 tokens on a chip at a time, at
128 a batch is no more. The cores of v2 and v3 gain nothing by it:
`--set parallelism.accumulation=1`.
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
        parallelism=Parallelism(state="zero3", accumulation=(1, 4), remat="dots"),
    )
