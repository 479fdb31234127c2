"""BERT-Large as the paper trained it, on 64 TPU chips.

    bert-jax pretrain experiments/bert_large.py --workdir gs://BUCKET/bert_large

Source: Devlin et al. 2018, section 3 and appendix A.2 (24 layers, 1024 wide, 16 heads, 340M
parameters). All else is bert_base.py; 64 v2 or v3 chips have 128 cores, each of which clips the
gradient of its two sequences.
Hardware: 64 TPU v2 or v3 chips (4 days in the paper).
Expected: the paper's LARGE, less what BooksCorpus taught it.
"""

import dataclasses

import bert_base

from bert_jax.config import Experiment


def experiment() -> Experiment:
    """BASE, deeper and wider, over four times the chips."""
    base = bert_base.experiment()
    return dataclasses.replace(
        base,
        name="bert_large",
        model=dataclasses.replace(
            base.model,
            hidden_size=1_024,
            num_hidden_layers=24,
            num_attention_heads=16,
            intermediate_size=4_096,
        ),
        optimizer=dataclasses.replace(base.optimizer, reference_replicas=128),
    )
