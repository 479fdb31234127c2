"""ModernBERT-Large on 64 TPU chips.

    bert-jax pretrain experiments/modern_large_pod.py --workdir gs://BUCKET/modern_large_pod

Source: modern_base_pod.py with the shape, the rate and the warm-up of Warner et al. 2024 and of
Ettin's `encoder_large.yaml` (Weller et al. 2025), whose batch it has, too. Departures, next to
BASE's: fresh weights (ModernBERT tiles BASE's); one peak until the long rows (theirs fell to 5e-5
after 900 billion tokens).
Hardware: 64 TPU v5e chips.
Expected: not run. Theirs is the released model.
"""

import dataclasses

import modern_base_pod

from bert_jax.config import Experiment


def experiment() -> Experiment:
    """Deeper and wider, at a lower rate."""
    base = modern_base_pod.experiment()
    return dataclasses.replace(
        base,
        name="modern_large_pod",
        model=dataclasses.replace(
            base.model,
            hidden_size=1_024,
            num_hidden_layers=28,
            num_attention_heads=16,
            intermediate_size=2_624,
        ),
        optimizer=dataclasses.replace(
            base.optimizer,
            peak_learning_rate=5e-4,
            warmup_steps=424,  # 2e9 tokens
            weight_decay=0.02,  # 1e-5 / 5e-4
        ),
    )
