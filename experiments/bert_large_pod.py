"""BERT-Large, the fast sibling of bert_large.py for today's pods.

    bert-jax pretrain experiments/bert_large_pod.py --workdir gs://BUCKET/bert_large_pod

Source: bert_large.py with the departures of bert_base_pod.py.
Hardware: 64 TPU chips; 4 sequences of 512 on a chip are 2,048 tokens, so nothing is accumulated.
Expected: as bert_large.py.
"""

import dataclasses

from bert_jax import config


def experiment() -> config.Experiment:
    """LARGE's shape, the pod's way of running it."""
    pod = config.parent("bert_base_pod.py")
    return dataclasses.replace(
        pod,
        name="bert_large_pod",
        model=dataclasses.replace(
            config.parent("bert_large.py").model, compute_dtype="bfloat16", dropout_rng="rbg16"
        ),
        mesh=dataclasses.replace(pod.mesh, accumulation=(1,)),
    )
