"""Where does a phrase begin and end, and of what kind is it? Chunks of CoNLL-2000.

    bert-jax finetune experiments/tasks/conll2000.py --from bases/bert --workdir runs/conll2000

Source: Tjong Kim Sang and Buchholz 2000, train.txt and test.txt in data/conll2000/; tags are read
at the first piece of each word (Devlin et al. 2018, section 5.3), and thin matrices learn next to
all kernels of an encoder that stays as it is (Hu et al. 2021).
Hardware: an accelerator, minutes; a small base on two CPU cores, half an hour.
Expected: a checkpoint of a few megabytes, which only this base can read.
"""

from bert_jax.config import LORA_TARGETS, Adapt, Finetuning, Optimizer, Run, Task

_CHUNKS = ("ADJP", "ADVP", "CONJP", "INTJ", "LST", "NP", "PP", "PRT", "SBAR", "UCP", "VP")


def experiment() -> Finetuning:
    """8,936 sentences, and 2,012 to score on; a cased base knows more of names."""
    return Finetuning(
        name="conll2000",
        task=Task(
            kind="tag",
            train=("conll:data/conll2000/train.txt",),
            validation=("conll:data/conll2000/test.txt",),
            text_column="0",
            label_column="2",
            # Named, since I-LST stands among the sentences to score on alone.
            labels=("O", *(f"{place}-{kind}" for kind in _CHUNKS for place in "BI")),
        ),
        adapt=Adapt(how="lora", lora_targets=LORA_TARGETS),
        # Matrices that begin at zero want a higher rate than weights that have learned.
        optimizer=Optimizer(name="adamw", peak_learning_rate=1e-3, warmup_steps=0),
        run=Run(log_every=50, eval_every=280, checkpoint_every=280, eval_batch_size=64),
    )
