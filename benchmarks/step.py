"""One training step: tokens a second, useful arithmetic a second, and share of a large matmul's.

`python -m benchmarks.step --shapes tiny,mini`. Forward, backward, clip and AdamW, dropout 0.1.
The large product is timed in the same rounds, so that a busy machine slows both. With one thread
seconds are CPU seconds; with more they are wall time, for a machine of one's own.
"""

import argparse
import itertools
import sys
from typing import Any

from benchmarks import measure, shapes
from benchmarks.worker import Worker


def main() -> None:
    """Measures, shape after shape."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--shapes", default="tiny,mini,small,base", help="of " + ",".join(shapes.SHAPES)
    )
    parser.add_argument("--dtypes", default="float32,bfloat16")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--sequence", type=int, default=128)
    parser.add_argument("--layer-loop", choices=("scan", "unroll"), default="unroll")
    parser.add_argument("--out", default="", help="folder of the result; default: results/")
    flags = parser.parse_args()
    figures: dict[str, float] = {}
    details: dict[str, Any] = {"threads": flags.threads}
    for shape in flags.shapes.split(","):
        details[shape] = measure_shape(shape, flags)
        for dtype in flags.dtypes.split(","):
            found = summary(shapes.sized(shape, flags.sequence), details[shape][dtype])
            details[shape][dtype]["summary"] = found
            figures[f"{shape}_{dtype}_tokens_per_second"] = found["tokens_per_second"]
            figures[f"{shape}_{dtype}_utilisation"] = found["utilisation"]
            print(
                f"{shape} {dtype}: {found['tokens_per_second']:,.0f} tokens/s, "
                f"{found['useful_gflops']:.1f} useful GFLOP/s, {found['utilisation']:.1%} of a "
                f"large matmul's {found['matmul_gflops']:.0f} "
                f"(rounds spread {found['spread']:.0%})",
                flush=True,
            )
        measure.keep("step", figures, details, flags.out)  # the larger shapes take long
    measure.report("step", figures, details, flags.out)


def measure_shape(shape: str, flags: argparse.Namespace) -> dict[str, Any]:
    """Per dtype: seconds a step and FLOP/s of the matmul, round by round."""
    dtypes = flags.dtypes.split(",")
    found = {dtype: {"seconds": [], "matmul_flops": []} for dtype in dtypes}
    with Worker(sys.executable, "benchmarks.ours", flags.threads) as ours:
        for dtype in dtypes:
            found[dtype]["first_loss"] = ours.ask(
                "build",
                entry=dtype,
                shape=shape,
                dtype=dtype,
                layer_loop=flags.layer_loop,
                sequence=flags.sequence,
            )
            found[dtype]["flops"] = ours.ask("step_flops", shape=shape, sequence=flags.sequence)
        for _, dtype in itertools.product(range(flags.rounds), dtypes):
            rounds = found[dtype]
            clock = 0 if flags.threads == 1 else 1
            rounds["matmul_flops"].append(ours.ask("matmul", dtype=dtype)[clock])
            rounds["seconds"].append(ours.ask("step", entry=dtype)[clock])
    return found


def summary(shape: shapes.Shape, rounds: dict[str, Any]) -> dict[str, float]:
    """Rates of the best round, against the best matmul."""
    seconds = measure.spread(rounds["seconds"])
    useful = rounds["flops"] / seconds["min"]
    matmul = max(rounds["matmul_flops"])
    return {
        "tokens_per_second": shape.tokens / seconds["min"],
        "useful_gflops": useful / 1e9,
        "matmul_gflops": matmul / 1e9,
        "utilisation": useful / matmul,
        "spread": seconds["max"] / seconds["min"] - 1,
    }


if __name__ == "__main__":
    main()
