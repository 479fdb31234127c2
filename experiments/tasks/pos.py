"""What part of speech is a word? Of the sentences of CoNLL-2000.

    bert-jax finetune experiments/tasks/pos.py --from runs/novels
    bert-jax layers --workdir runs/novels --tasks experiments/tasks/pos.py

Source: Tjong Kim Sang and Buchholz 2000, train.txt and test.txt in data/conll2000/; the tags are
those that a tagger of Brill's gave them, in their second column.
Hardware: two CPU cores, minutes.
Expected: read off a layer in the middle best (Tenney et al. 2019).
"""

from bert_jax.config import Finetuning, Run, Task


def experiment() -> Finetuning:
    """Some forty tags; the share of words that have theirs decides."""
    return Finetuning(
        name="pos",
        task=Task(
            kind="tag",
            train=("conll:data/conll2000/train.txt",),
            validation=("conll:data/conll2000/test.txt",),
            text_column="0",
            label_column="1",
            score="accuracy",
        ),
        run=Run(log_every=50, eval_every=280, checkpoint_every=280, eval_batch_size=64),
    )
