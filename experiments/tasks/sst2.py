"""Is a sentence of a film review meant well? SST-2 of GLUE.

    bert-jax finetune experiments/tasks/sst2.py --from bases/bert --workdir runs/sst2

Source: Socher et al. 2013 in the files of GLUE (Wang et al. 2019), SST-2.zip unpacked to data/; the
recipe is appendix A.3 of Devlin et al. 2018, whose base model has 93.5 % of the test set right.
Hardware: an accelerator, minutes; a small base on two CPU cores, an hour.
Expected: well above the 51 % of the commoner label within a tenth of an epoch, from any base.
"""

from bert_jax.config import Finetuning, Run, Task


def experiment() -> Finetuning:
    """67,349 phrases in GLUE's files; 872 sentences to score on."""
    return Finetuning(
        name="sst2",
        task=Task(
            kind="classify",
            train=("tsv:data/SST-2/train.tsv",),
            validation=("tsv:data/SST-2/dev.tsv",),
            labels=("0", "1"),
            max_sequence_length=64,
        ),
        run=Run(log_every=100, eval_every=500, checkpoint_every=500, eval_batch_size=64),
    )
