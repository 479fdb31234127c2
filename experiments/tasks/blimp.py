"""Which of two sentences is English? BLiMP's minimal pairs, from which nothing is learned.

    bert-jax evaluate --workdir runs/novels --task experiments/tasks/blimp.py

Source: Warstadt et al. 2020, the 67 files of their data folder joined to data/blimp.jsonl; scored
as Salazar et al. 2020 do, one mask at a time.
Hardware: an accelerator, minutes; a small model on two CPU cores, minutes too.
Expected: 0.5 of a model that knows nothing; BERT-Base, by the second paper, has 0.84 of them right.
"""

from bert_jax.config import Finetuning, Task


def experiment() -> Finetuning:
    """67 paradigms of 1,000 pairs in four fields."""
    return Finetuning(
        name="blimp",
        task=Task(
            kind="minimal_pairs",
            validation=("jsonl:data/blimp.jsonl",),
            text_column="sentence_good",
            second_column="sentence_bad",
            label_column="UID",
            field_column="field",
        ),
    )
