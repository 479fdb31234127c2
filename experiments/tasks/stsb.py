"""How much alike are two sentences, from 0 to 5? STS-B of GLUE.

    bert-jax finetune experiments/tasks/stsb.py --from bases/bert --workdir runs/stsb

Source: Cer et al. 2017 in the files of GLUE (Wang et al. 2019), STS-B.zip unpacked to data/; the
recipe is appendix A.3 of Devlin et al. 2018, whose base model has a Spearman correlation of 85.8 %
on the test set.
Hardware: an accelerator, minutes.
Expected: small sets depend on the seed: `--sweep seed=1,2,3,4,5` tells by how much.
"""

from bert_jax.config import Finetuning, Run, Task


def experiment() -> Finetuning:
    """5,749 pairs, and 1,500 to score on."""
    return Finetuning(
        name="stsb",
        task=Task(
            kind="regress",
            train=("tsv:data/STS-B/train.tsv",),
            validation=("tsv:data/STS-B/dev.tsv",),
            text_column="sentence1",
            second_column="sentence2",
            label_column="score",
        ),
        run=Run(log_every=50, eval_every=180, checkpoint_every=180, eval_batch_size=64),
    )
