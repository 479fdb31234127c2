"""What is launched, and what its slice is called."""

import pathlib
import re
import subprocess
import sys

import pytest
from etils import epath

from bert_jax import config, hardware
from bert_jax.errors import InputError
from bert_jax.plan import topology
from launch import __main__, spec

ROOT = pathlib.Path(__file__).parents[2]

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
}
RUNTIMES = {
    "v2": "tpu-ubuntu2204-base",
    "v3": "tpu-ubuntu2204-base",
    "v4": "tpu-ubuntu2204-base",
    "v5e": "v2-alpha-tpuv5-lite",
    "v5p": "v2-alpha-tpuv5",
    "v6e": "v2-alpha-tpuv6e",
}


@pytest.mark.parametrize("slice_name", PUBLISHED)
def test_the_type_and_hosts_of_a_slice(slice_name):
    names = spec.slice_names(topology.parse(slice_name))
    assert (names.accelerator_type, names.hosts, names.chips_per_host) == PUBLISHED[slice_name]
    assert names.runtime_version == RUNTIMES[slice_name.partition(":")[0]]


@pytest.mark.parametrize("slice_name", IN_GKE)
def test_the_labels_of_a_slice_in_gke(slice_name):
    names = spec.gke_names(topology.parse(slice_name))
    assert (names.gke_accelerator, names.gke_topology, names.gke_machine_type) == IN_GKE[slice_name]


def test_every_slice_has_names_of_its_own_and_whole_hosts():
    slices = [topology.parse(f"{g}:{s}") for g, tpu in hardware.TPUS.items() for s in tpu.slices]
    known_names = [spec.slice_names(one) for one in slices]
    assert len({one.accelerator_type for one in known_names}) == len(slices)
    for one, known in zip(slices, known_names, strict=True):
        assert known.hosts * known.chips_per_host == one.chips


def test_gke_has_no_v2():
    with pytest.raises(InputError, match=r"--topology v2:4x4: GKE has no v2; choose one of v3, v4"):
        spec.gke_names(topology.parse("v2:4x4"))


def specified(experiment="experiments/tiny.py", **changes):
    given = {"workdir": "gs://b/x", "topology": topology.parse("v3:4x4")} | changes
    return spec.specify(experiment, given.pop("settings", ()), **given)


def test_a_name_is_the_experiment_s_and_the_hash_s():
    one, other = specified(), specified(settings=["seed=1"])
    assert one.name == f"tiny-{one.sha256[:8]}" and other.name == f"tiny-{other.sha256[:8]}"
    assert one.name != other.name


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
    name = specified(settings=[f"name={name}"]).name
    assert name.startswith(begins.replace("--", "-"))
    # What Google's and Kubernetes' documents say of names.
    assert re.fullmatch(r"[a-z]([-a-z0-9]{0,61}[a-z0-9])?", name) and len(name) <= 40


@pytest.mark.parametrize("name", ["", "A", "a_b", "-a", "a-", "1a", "a" * 41, "a\n"])
def test_a_name_that_cannot_be_rented_is_refused(name):
    with pytest.raises(InputError, match=r"--name .*use at most 40 of lower case letters"):
        specified(name=name)


def test_the_config_is_the_whole_experiment():
    one = specified(settings=["seed=5"], extend=True)
    assert config.from_json(one.config, "config") == one.experiment and one.experiment.seed == 5
    assert one.command("/etc/x.json") == (
        *("bert-jax", "pretrain", "/etc/x.json", "--workdir", "gs://b/x", "--extend"),
    )
    assert (one.hosts, specified(topology=None).hosts, specified(hosts=2).hosts) == (4, 1, 2)


def test_commands_are_named():
    command = [sys.executable, "-m", "launch", "rocket"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, check=False)
    assert done.returncode == 2
    for name in (*__main__.LAUNCHERS, "status", "logs", "stop"):
        assert f"'{name}'" in done.stderr.decode()


def test_only_a_finish_and_a_failure_of_the_run_itself_are_final():
    assert [code for code in range(256) if spec.is_final(code)] == [0, 1, 2, 130]


def test_a_damaged_record_of_a_launch_is_named(bucket, workdir):
    epath.Path(workdir, "launch.json").write_text('{"format_version": 2, "launcher": "tpu_vm"}')
    with pytest.raises(InputError, match=r"launch\.json: damaged .*; see that nothing is rented"):
        spec.find_record(workdir)
    epath.Path(workdir, "launch.json").write_text('{"format_version": 1}')
    with pytest.raises(InputError, match=r"launch\.json: format_version 1, this version reads 2"):
        spec.find_record(workdir)


def test_status_tells_how_far_a_run_is(tmp_path):
    assert __main__._progress(str(tmp_path), None) == ["run: has written nothing yet"]
    (tmp_path / "experiment.json").write_text(specified().config)
    run, goodput = __main__._progress(str(tmp_path), 1.5)
    assert re.fullmatch(r"run: .*, step 0 of [\d,]+", run) and "goodput" in goodput
