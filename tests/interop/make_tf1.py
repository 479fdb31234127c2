"""`python make_tf1.py`, where TensorFlow is installed: writes the checkpoints of `tf1/` again.

`bert_model.ckpt` holds the variables of a model of one layer (`variables.txt`, as the reference's
code names them) with what Adam keeps of them, in two files of data; `sliced.ckpt` half a variable.
"""

import pathlib

import numpy as np
import tensorflow as tf

HERE = pathlib.Path(__file__).parent / "tf1"
LINES = (HERE / "variables.txt").read_text().splitlines()


def save(name, variables):
    tf.raw_ops.SaveV2(
        prefix=str(HERE / name),
        tensor_names=list(variables),
        shape_and_slices=[""] * len(variables),
        tensors=list(variables.values()),
    )


def numbers(index, shape):
    """Another for each place and variable; exact in float32."""
    return (np.arange(np.prod(shape), dtype=np.float32).reshape(shape) + 1000 * index) / 64


def main():
    found = {"global_step": np.array(22, np.int64)}
    for index, line in enumerate(LINES):
        name, *shape = line.split()
        for slot, ending in enumerate(("", "/adam_m", "/adam_v")):
            found[name + ending] = numbers(3 * index + slot, tuple(map(int, shape)))
    halves = [dict(list(found.items())[start::2]) for start in (0, 1)]
    for number, half in enumerate(halves):
        save(f"half{number}", half)
    tf.raw_ops.MergeV2Checkpoints(
        checkpoint_prefixes=[str(HERE / "half0"), str(HERE / "half1")],
        destination_prefix=str(HERE / "bert_model.ckpt"),
        delete_old_dirs=False,
    )
    tf.raw_ops.SaveV2(
        prefix=str(HERE / "sliced.ckpt"),
        tensor_names=["sliced"],
        shape_and_slices=["4 2 0,2:0,2"],
        tensors=[np.ones((2, 2), np.float32)],
    )


if __name__ == "__main__":
    main()
