"""The parameters that a few sentences are asked of."""

import jax
import numpy as np
import pytest
import samples
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from bert_jax import config
from bert_jax.running import evaluators
from bert_jax.running.pretraining import Prepared


@pytest.fixture
def compiled():
    """Grows with each program that is compiled."""
    found = []

    def listen(event: str, seconds: float, **_: object) -> None:
        if event == "/jax/core/compile/backend_compile_duration":
            found.append(seconds)

    jax.monitoring.register_event_duration_secs_listener(listen)
    yield found
    jax.monitoring.unregister_event_duration_listener(listen)


def test_seeds_of_an_experiment_share_their_held_out_rows(tmp_path):
    experiment, folder = samples.small_corpus(tmp_path)
    prepared, mesh = Prepared.open(folder), samples.mesh_of(1)

    def drawn(*settings):
        found = prepared.held_out(config.override(experiment, settings), mesh)
        return [{name: array.tolist() for name, array in one.items()} for one in found.batches]

    assert drawn("seed=7") == drawn() != drawn("data.eval_seed=7")


def test_cut_parameters_are_gathered_on_one_device_and_compiled_for_once(compiled):
    mesh = jax.make_mesh((4,), ("data_0",))
    trees = []
    for factor in (1, 2):
        whole = {"a": np.arange(24.0).reshape(8, 3) * factor, "b": np.arange(4.0) * factor}
        cut = jax.device_put(whole, NamedSharding(mesh, P("data_0")))
        programs = len(compiled)
        found = evaluators.on_one_device(cut, mesh)
        trees.append((found, len(compiled) - programs))
        for name, array in found.items():
            assert array.devices() == {mesh.devices[0]}
            np.testing.assert_array_equal(array, whole[name])
    assert [programs for _, programs in trees] == [2, 0]
