"""The parameters that a few sentences are asked of."""

import jax
import numpy as np
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from bert_jax.training import evaluators


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
