"""English to French: what was pre-trained on both reads one, and writes the other.

    bert-jax finetune experiments/tasks/translate.py --from runs/leads --workdir runs/translate

Source: Rothe et al. 2020, BERT2BERT with shared embeddings; sentences of STS-B (Cer et al. 2017)
and their machine translations (`stsb_multi_mt`), joined by docs/howto/generate-text.md. The base is
that of leads.py.
Hardware: two CPU cores, minutes.
Expected: a chrF near 0.39, greedy; a base of random weights guesses worse, and writes as well
(docs/howto/generate-text.md).
"""

from bert_jax.config import Adapt, Finetuning, Optimizer, Parallelism, Run, Task


def experiment() -> Finetuning:
    """Seven thousand short pairs; a small model that learns for minutes drops nothing."""
    return Finetuning(
        name="translate",
        task=Task(
            kind="generate",
            train=("jsonl:data/stsb/en-fr-train.jsonl",),
            validation=("jsonl:data/stsb/en-fr-dev.jsonl",),
            text_column="en",
            label_column="fr",
            max_sequence_length=32,
            max_target_length=32,
        ),
        adapt=Adapt(
            hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0, head_dropout_prob=0.0
        ),
        epochs=8.0,
        batch_size=64,
        optimizer=Optimizer(name="adamw", peak_learning_rate=2e-3, warmup_steps=0),
        parallelism=Parallelism(layer_loop="unroll"),
        run=Run(log_every=50, eval_every=500, checkpoint_every=500, eval_batch_size=128),
    )
