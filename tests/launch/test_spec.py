"""What is launched, and what its slice is called."""

import re

import pytest

from bert_jax import config, hardware
from bert_jax.errors import InputError
from bert_jax.tools.plan import topology
from launch import spec

# As Cloud TPU's pages list them: type, hosts, chips of a host.
PUBLISHED = {
    "v2:2x2": ("v2-8", 1, 4),
    "v2:16x16": ("v2-512", 64, 4),
    "v3:4x4": ("v3-32", 4, 4),
    "v3:32x32": ("v3-2048", 256, 4),
    "v4:2x2x1": ("v4-8", 1, 4),
    "v4:2x2x4": ("v4-32", 4, 4),
    "v4:4x4x4": ("v4-128", 16, 4),
    "v5e:1x1": ("v5litepod-1", 1, 1),
    "v5e:2x2": ("v5litepod-4", 1, 4),
    "v5e:2x4": ("v5litepod-8", 1, 8),
    "v5e:4x4": ("v5litepod-16", 4, 4),
    "v5e:8x8": ("v5litepod-64", 16, 4),
    "v5e:16x16": ("v5litepod-256", 64, 4),
    "v5p:2x2x4": ("v5p-32", 4, 4),
    "v5p:8x8x16": ("v5p-2048", 256, 4),
    "v6e:1x1": ("v6e-1", 1, 1),
    "v6e:2x4": ("v6e-8", 1, 8),
    "v6e:4x4": ("v6e-16", 4, 4),
    "v6e:16x16": ("v6e-256", 64, 4),
    "tpu7x:2x2x1": ("tpu7x-8", 1, 4),
    "tpu7x:2x2x2": ("tpu7x-16", 2, 4),
    "tpu7x:4x4x4": ("tpu7x-128", 16, 4),
}
# As "Plan TPUs in GKE" does: accelerator, topology, machine.
IN_GKE = {
    "v3:2x2": ("tpu-v3-device", "2x2", "ct3-hightpu-4t"),
    "v3:4x4": ("tpu-v3-slice", "4x4", "ct3p-hightpu-4t"),
    "v4:2x2x4": ("tpu-v4-podslice", "2x2x4", "ct4p-hightpu-4t"),
    "v5e:1x1": ("tpu-v5-lite-podslice", "1x1", "ct5lp-hightpu-1t"),
    "v5e:2x4": ("tpu-v5-lite-podslice", "2x4", "ct5lp-hightpu-8t"),
    "v5e:8x8": ("tpu-v5-lite-podslice", "8x8", "ct5lp-hightpu-4t"),
    "v5p:4x4x4": ("tpu-v5p-slice", "4x4x4", "ct5p-hightpu-4t"),
    "v6e:2x4": ("tpu-v6e-slice", "2x4", "ct6e-standard-8t"),
    "v6e:8x8": ("tpu-v6e-slice", "8x8", "ct6e-standard-4t"),
    "tpu7x:2x2x1": ("tpu7x", "2x2x1", "tpu7x-standard-4t"),
    "tpu7x:4x4x4": ("tpu7x", "4x4x4", "tpu7x-standard-4t"),
}
# As "TPU software versions" does.
RUNTIMES = {"v5e": "v2-alpha-tpuv5-lite", "v5p": "v2-alpha-tpuv5", "v6e": "v2-alpha-tpuv6e"}
RUNTIMES["tpu7x"] = ""  # which the TPU VM API does not offer


def test_a_slice_is_called_as_it_is_published():
    for slice_name, published in PUBLISHED.items():
        names = spec.slice_names(topology.parse(slice_name))
        assert (names.accelerator_type, names.hosts, names.chips_per_host) == published
        runtime = RUNTIMES.get(slice_name.partition(":")[0], "tpu-ubuntu2204-base")
        assert names.runtime_version == runtime
    for slice_name, published in IN_GKE.items():
        names = spec.slice_names(topology.parse(slice_name))
        assert (names.gke_accelerator, names.gke_topology, names.gke_machine_type) == published


def test_every_slice_has_names_of_its_own_and_whole_hosts():
    slices = [topology.parse(f"{g}:{s}") for g, tpu in hardware.TPUS.items() for s in tpu.slices]
    known_names = [spec.slice_names(one) for one in slices]
    assert len({one.accelerator_type for one in known_names}) == len(slices)
    for one, known in zip(slices, known_names, strict=True):
        assert known.hosts * known.chips_per_host == one.chips


def specified(experiment="experiments/tiny.py", **changes):
    given = {"workdir": "gs://b/x", "topology": topology.parse("v3:4x4")} | changes
    return spec.make_spec(experiment, given.pop("settings", ()), **given)


@pytest.mark.parametrize(
    "name, begins",
    [
        ("A_b.C", "a-b-c-"),
        ("7b", "run-7b-"),
        ("$(x)'", "x-"),
        ("é", "run--"),
        ("x" * 60, "x" * 31 + "-"),
        ("x" * 30 + "-y", "x" * 30 + "-"),
    ],
)
def test_any_experiment_s_name_makes_one_that_can_be_rented(name, begins):
    one = specified(settings=[f"name={name}"])
    assert one.name.endswith(f"-{one.sha256[:8]}")
    name = one.name
    assert name.startswith(begins.replace("--", "-"))
    # What Google's and Kubernetes' documents say of names.
    assert re.fullmatch(r"[a-z]([-a-z0-9]{0,61}[a-z0-9])?", name) and len(name) <= 40


@pytest.mark.parametrize("name", ["", "A", "a-", "1a", "a" * 41, "a\n"])
def test_a_name_that_cannot_be_rented_is_refused(name):
    with pytest.raises(InputError, match=r"--name .*use at most 40 of lower case letters"):
        specified(name=name)


def test_the_config_is_the_whole_experiment():
    one = specified(settings=["seed=5"], extend=True)
    assert config.from_json(one.config, "config") == one.experiment and one.experiment.seed == 5
    assert one.command("/etc/x.json") == (
        *("bert-jax", "extend", "/etc/x.json", "--workdir", "gs://b/x"),
    )
    assert (one.hosts, specified(topology=None).hosts, specified(hosts=2).hosts) == (4, 1, 2)


def test_only_a_finish_and_a_failure_of_the_run_itself_are_final():
    assert [code for code in range(256) if spec.is_final(code)] == [0, 1, 2, 130]
