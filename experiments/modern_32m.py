"""modern_17m.py in Ettin's next shape, ten layers, 384 wide.

    bert-jax pretrain experiments/modern_32m.py --set 'corpus.sources=text:NOVELS' \
        --workdir runs/modern_32m

Source: Weller et al. 2025 (Ettin), its `encoder_tiny.yaml`, which differs from the smallest in
width, heads and layers alone; of its 32M parameters there are 19M with 16,000 pieces.
Hardware: two CPU cores, an evening for 20 million tokens.
Expected: not trained to its end by those who wrote it.
"""

import dataclasses

import modern_17m

from bert_jax.config import Experiment


def experiment() -> Experiment:
    """Deeper and wider, for a third of the steps."""
    base = modern_17m.experiment()
    return dataclasses.replace(
        base,
        name="modern_32m",
        model=dataclasses.replace(
            base.model,
            hidden_size=384,
            num_hidden_layers=10,
            num_attention_heads=6,
            intermediate_size=576,
        ),
        phases=(dataclasses.replace(base.phases[0], steps=5_000),),
        optimizer=dataclasses.replace(base.optimizer, warmup_steps=250, decay_steps=500),
    )
