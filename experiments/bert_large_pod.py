"""BERT-Large, the fast sibling of bert_large.py for today's pods.

    bert-jax pretrain experiments/bert_large_pod.py --workdir gs://BUCKET/bert_large_pod

Source: bert_large.py with the departures of bert_base_pod.py.
Hardware: 64 TPU chips; 4 sequences of 512 on a chip.
Expected: as bert_large.py.
"""

import dataclasses

import bert_base_pod
import bert_large

from bert_jax.config import Experiment


def experiment() -> Experiment:
    """LARGE's shape, the pod's way of running it."""
    pod = bert_base_pod.experiment()
    return dataclasses.replace(
        pod,
        name="bert_large_pod",
        model=dataclasses.replace(
            bert_large.experiment().model, compute_dtype="bfloat16", dropout_rng="in_kernel"
        ),
    )
