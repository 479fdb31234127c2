"""Makes what the tests here read, with the real compiler (libtpu 0.0.42.1).

    PYTHONPATH=. JAX_PLATFORMS=cpu TPU_SKIP_MDS_QUERY=1 python tests/tools/plan/make_modules.py

Small programs with what a training step has: loops in loops, gathers and scatters along axes of a
torus, some during other work, random bits, kernels; and the bundles of a kernel with a loop. Then
steps of the pod experiments, ten minutes of a core, without what no reader looks at, each after the
cycles of the bundles that the compiler wrote of its operations, by their names.
"""

import gzip
import json
import lzma
import math
import os
import pathlib
import re
import tempfile
import zlib

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas, topologies
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from bert_jax import config
from bert_jax.tools.plan import bundles
from bert_jax.tools.plan import compile as compile_lib
from bert_jax.training import mesh as mesh_lib
from bert_jax.training import objective, step

FOLDER = pathlib.Path(__file__).parent / "modules"
STEPS = {  # experiment, slice, phase, rows
    "large_512_v5e": ("bert_large_pod", "v5e:8x8", 1, 256),
    "large_128_v5e": ("bert_large_pod", "v5e:8x8", 0, 256),
    "base_512_v5e": ("bert_base_pod", "v5e:4x4", 1, 256),
    "large_512_v6e": ("bert_large_pod", "v6e:4x4", 1, 64),
    "large_512_v5p": ("bert_large_pod", "v5p:4x4x4", 1, 256),
}
# Of what the compiler adds to an instruction, what a reader looks at.
KEPT = r'"(?:estimated_cycles|bytes_accessed)":"?\d+"?|"(?:body|emitter)":"\w+"|group_size = \d+'
LAYERS, WIDTH, INNER, MICRO_BATCHES, ROWS = 3, 1024, 4096, 2, 64


def mesh_of(topology: str, *shape: int, **slices: int) -> Mesh:
    described = topologies.get_topology_desc(platform="tpu", topology_name=topology, **slices)
    devices = described.devices
    ordered = sorted(devices, key=lambda device: device.coords)
    names = [f"data_{i}" for i in range(len(shape))]
    return Mesh(np.array(ordered).reshape(shape), names)


def sharded_layers():
    """Layers whose weights are gathered where they are used, axis by axis."""
    mesh = mesh_of("v5e:4x4", 4, 4)
    axes = mesh.axis_names

    def gather(x):
        for axis in reversed(axes):
            x = lax.all_gather(x, axis, axis=1, tiled=True)
        return x

    def loss(weights, x, key):
        def layer(x, part):
            weights, number = part
            inner = jax.nn.gelu(x @ gather(weights["up"]))
            bits = jax.random.bits(jax.random.fold_in(key, number), inner.shape, jnp.uint16)
            return x + jnp.where(bits >= 6554, inner, 0) @ gather(weights["down"]), None

        x, _ = lax.scan(jax.checkpoint(layer), x, (weights, jnp.arange(LAYERS)))
        return jnp.sum(jnp.square(x.astype(jnp.float32)))

    def step(weights, x, key):
        key = jax.random.fold_in(key, lax.axis_index(axes))
        low = jax.tree.map(lambda w: w.astype(jnp.bfloat16), weights)

        def micro(sums, part):
            x, number = part
            value, gradient = jax.value_and_grad(loss)(low, x, jax.random.fold_in(key, number))
            more = jax.tree.map(lambda a, b: a + b.astype(jnp.float32), sums[1], gradient)
            return (sums[0] + value, more), None

        zeros = jnp.zeros([]), jax.tree.map(jnp.zeros_like, weights)
        parts = x.reshape(MICRO_BATCHES, -1, WIDTH), jnp.arange(MICRO_BATCHES)
        (value, gradient), _ = lax.scan(micro, zeros, parts)
        new = jax.tree.map(lambda w, g: w - 1e-3 * g, weights, gradient)
        return new, lax.psum(value, axes)

    cut = P(None, None, axes)
    function = jax.shard_map(
        step, mesh=mesh, in_specs=(cut, P(axes), P()), out_specs=(cut, P()), check_vma=False
    )

    def abstract(shape, dtype, spec):
        return jax.ShapeDtypeStruct(shape, dtype, sharding=NamedSharding(mesh, spec))

    key = jax.eval_shape(lambda: jax.random.key(0, impl="rbg"))
    return jax.jit(function, donate_argnums=0).lower(
        {
            "up": abstract((LAYERS, WIDTH, INNER), jnp.float32, cut),
            "down": abstract((LAYERS, INNER, WIDTH), jnp.float32, cut),
        },
        abstract((ROWS * mesh.size, WIDTH), jnp.bfloat16, P(axes)),
        abstract(key.shape, key.dtype, P()),
    )


def kernels():
    """A kernel that states its cost, five times, and one that does not."""
    mesh = mesh_of("v5e:2x2", 4)

    def double(x, name, cost):
        def kernel(x, out):
            out[...] = x[...] * 2.0

        shape = jax.ShapeDtypeStruct(x.shape, x.dtype)
        return pallas.pallas_call(kernel, out_shape=shape, cost_estimate=cost, name=name)(x)

    def function(x):
        cost = pallas.CostEstimate(flops=1000, transcendentals=0, bytes_accessed=100_000)
        x, _ = lax.scan(lambda x, _: (double(x, "stated", cost), None), x, None, length=5)
        return double(x, "silent", None)

    spec = P("data_0")
    mapped = jax.shard_map(function, mesh=mesh, in_specs=spec, out_specs=spec, check_vma=False)
    x = jax.ShapeDtypeStruct((512, 128), jnp.float32, sharding=NamedSharding(mesh, spec))
    return jax.jit(mapped).lower(x)


def replicated_bits():
    """The mistake: bits for the whole batch are drawn on every device, then cut."""
    mesh = mesh_of("v5e:2x2", 4)
    place = NamedSharding(mesh, P("data_0"))

    def function(x, key):
        bits = jax.random.bits(key, x.shape, jnp.uint16)
        return jnp.where(bits >= 6554, x, 0)

    key = jax.eval_shape(lambda: jax.random.key(0, impl="rbg"))
    x = jax.ShapeDtypeStruct((48, 128, 256), jnp.float32, sharding=place)
    key = jax.ShapeDtypeStruct(key.shape, key.dtype, sharding=NamedSharding(mesh, P()))
    return jax.jit(function).lower(x, key)


def looped(topology: str):
    """A kernel with a grid of 4 x 2 programs, each with a loop of 16 rounds."""
    mesh = mesh_of(topology, 4)

    def kernel(x, out):
        def add(i, y):
            rows = pallas.ds(8 * i, 8)
            out[rows, :] = x[rows, :] + y[0, 0]
            return 2 * y

        lax.fori_loop(0, 16, add, jnp.ones((8, 128)))

    def function(x):
        block = pallas.BlockSpec((128, 128), lambda i, j: (i, j))
        return pallas.pallas_call(
            kernel, grid=(4, 2), in_specs=[block], out_specs=block, out_shape=x, name="looped"
        )(x)

    spec = P("data_0")
    mapped = jax.shard_map(function, mesh=mesh, in_specs=spec, out_specs=spec, check_vma=False)
    x = jax.ShapeDtypeStruct((2048, 256), jnp.float32, sharding=NamedSharding(mesh, spec))
    return jax.jit(mapped).lower(x)


def summed_slices():
    """Two slices add up what each has scattered; on the way they multiply."""
    devices = mesh_of("v5e:2x2", 8, num_slices=2).devices.flat
    ordered = sorted(devices, key=lambda device: (device.slice_index, device.coords))
    mesh = Mesh(np.array(ordered).reshape(2, 4), ("slice", "data_0"))

    def function(x):
        shard = lax.psum_scatter(x, "data_0", tiled=True)
        return lax.psum(shard, "slice"), x @ x

    spec = P(("slice", "data_0"))
    mapped = jax.shard_map(
        function, mesh=mesh, in_specs=spec, out_specs=(P("data_0"), spec), check_vma=False
    )
    x = jax.ShapeDtypeStruct((8 * WIDTH, WIDTH), jnp.float32, sharding=NamedSharding(mesh, spec))
    return jax.jit(mapped).lower(x)


def stripped(text: str) -> str:
    """Without tables of source files, and without the kernels themselves."""
    head, entries = text.split("\n", 1)
    computations = re.search(r"^(?:ENTRY )?%", entries, re.MULTILINE).start()
    text = f"{head}\n\n{entries[computations:]}"
    return re.sub(r" stack_frame_id=\d+|(?<=\"body\":\")[^\"]*", "", text)


def step_of(experiment: str, slice_: str, phase: int, rows: int):
    settings = [f"phases.{phase}.batch_size={rows}"]
    chosen = config.override(config.load(f"experiments/{experiment}.py"), settings)
    described = topologies.get_topology_desc(platform="tpu", topology_name=slice_)
    mesh = mesh_lib.make_mesh(chosen.parallelism, described.devices)
    parts = objective.make_objective(chosen, phase), chosen.optimizer, chosen.parallelism
    return compile_lib.lower_step(chosen, phase, mesh, step.abstract_state(*parts, mesh))


def store_step(name: str, text: str, dump: str) -> None:
    def kept(match: re.Match) -> str:
        return f", backend_config={','.join(re.findall(KEPT, match[0]))}"

    # By its body a kernel is known.
    text = re.sub(r'(?<="body":")[^"]+', lambda body: f"{zlib.crc32(body[0].encode()):x}", text)
    text = re.sub(r", backend_config=.*", kept, re.sub(r", metadata=\{[^}]*\}", "", text))
    names = re.findall(r"%([\w.\-]+) = .*(?:estimated_cycles|tpu_custom_call)", text)
    cycles_of = bundles.make_cycle_lookup(dump)
    cycles = {one: known for one in names if (known := cycles_of(one)) is not None}
    (FOLDER / f"{name}.txt.xz").write_bytes(lzma.compress(f"{json.dumps(cycles)}\n{text}".encode()))


def store(name: str, text: str) -> None:
    data = gzip.compress(text.encode(), mtime=0)
    (FOLDER / f"{name}.txt.gz").write_bytes(data)
    print(name, f"{math.ceil(len(data) / 1024)} KiB")


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as dump:
        os.environ["LIBTPU_INIT_ARGS"] = compile_lib.DUMP_FLAGS.format(dump)
        for make in (sharded_layers, kernels, replicated_bits, summed_slices):
            store(make.__name__, stripped(make().compile().as_text()))
        for topology in ("v5e:2x2", "v5p:2x2x1"):
            looped(topology).compile()
            newest = sorted(pathlib.Path(dump).glob("*-looped.1-*-final_bundles.txt"))[-1]
            store(f"looped_{topology.partition(':')[0]}", newest.read_text())
        for name, which in STEPS.items():
            for file in pathlib.Path(dump).iterdir():
                file.unlink()
            store_step(name, step_of(*which).compile().as_text(), dump)
