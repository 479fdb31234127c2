"""Runs in an environment with optimum-onnx: exports folders to ONNX, and computes their outputs.

`python parity_onnx_peer.py FOLDER` reads FOLDER/FAMILY/FORM and FOLDER/inputs.npz, and writes
FOLDER/FAMILY/FORM/outputs.npz.
"""

import pathlib
import sys

import numpy as np
import onnxruntime
import optimum.exporters.onnx

TASKS = {
    "encoder": "feature-extraction",
    "masked_lm": "fill-mask",
    "classify": "text-classification",
    "rank": "text-classification",
}


def main(root: pathlib.Path) -> None:
    """Writes the outputs of all folders for the same token ids."""
    inputs = dict(np.load(root / "inputs.npz"))
    for config in sorted(root.glob("*/*/config.json")):
        folder = config.parent
        optimum.exporters.onnx.main_export(
            str(folder),
            output=str(folder / "onnx"),
            task=TASKS[folder.name],
            library_name="transformers",
            do_validation=False,
        )
        session = onnxruntime.InferenceSession(str(folder / "onnx" / "model.onnx"))
        given = {name.name: inputs[name.name] for name in session.get_inputs()}
        np.savez(folder / "outputs.npz", outputs=session.run(None, given)[0])


if __name__ == "__main__":
    main(pathlib.Path(sys.argv[1]))
