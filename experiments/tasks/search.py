"""Vectors for search, learned from the text that an encoder was pre-trained on, without labels.

    bert-jax finetune experiments/tasks/search.py --from runs/mini

Source: neighbouring passages of one document as each other's answers, all others of the step as
negatives (as Logeswaran and Lee 2018 do with sentences), cosines over a temperature of 0.05;
scored on pairs of sentences that nothing is learned from (STS-B, Cer et al. 2017).
Hardware: two CPU cores, half an hour; an accelerator, minutes.
Expected: a higher Spearman correlation at each evaluation than before the first step, which
`bert-jax evaluate --workdir runs/mini --task experiments/tasks/search.py` shows.
"""

from bert_jax.config import Finetuning, Optimizer, Parallelism, Run, Task, Vectors


def experiment() -> Finetuning:
    """256 pairs a step, in four parts."""
    return Finetuning(
        name="search",
        task=Task(
            kind="similar",
            train=("corpus:runs/mini:neighbours",),
            validation=("tsv:data/STS-B/dev.tsv",),
            text_column="sentence1",
            second_column="sentence2",
            label_column="score",
            max_sequence_length=64,
        ),
        vectors=Vectors(temperature=0.05),
        epochs=1.0,
        batch_size=256,
        parallelism=Parallelism(accumulation=(4,)),
        optimizer=Optimizer(name="adamw", peak_learning_rate=5e-4, warmup_steps=0),
        run=Run(log_every=20, eval_every=100, checkpoint_every=100, eval_batch_size=64),
    )
