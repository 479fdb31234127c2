"""A pod of small programs: what it shows, how it ends, and why it did."""

import os
import pathlib
import signal
import subprocess
import sys
import time

import pytest

from launch.__main__ import main

ROOT = pathlib.Path(__file__).parents[3]


def start(code: str, *flags: str, processes: int = 3) -> subprocess.Popen:
    """`python -c CODE` in a pod; `me` is the process's number."""
    code = f"import os, signal, sys, time; me = int(os.environ['JAX_PROCESS_ID']); {code}"
    return subprocess.Popen(
        [
            *(sys.executable, "-m", "launch", "local", "--processes", str(processes)),
            *(*flags, "--", sys.executable, "-c", code),
        ],
        cwd=ROOT,
        env=os.environ | {"PYTHONPATH": str(ROOT)},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
    )


def run(code: str, *flags: str, processes: int = 3) -> tuple[int, list[str]]:
    """Its exit code, and its lines."""
    started = start(code, *flags, processes=processes)
    output, _ = started.communicate(timeout=60)
    return started.returncode, output.decode().splitlines()


def test_lines_carry_their_process_s_number():
    code, lines = run("print('a', me); print('b', end='')")
    assert code == 0
    assert sorted(lines) == [f"[{i}] {line}" for i in range(3) for line in (f"a {i}", "b")]


def test_each_process_has_its_place_and_its_share_of_the_cores():
    code, lines = run(
        "print(*(os.environ[name] for name in ('JAX_NUM_PROCESSES', 'XLA_FLAGS', 'NPROC',"
        " 'JAX_COORDINATOR_ADDRESS', 'JAX_PLATFORMS')))",
        "--devices-per-process",
        "5",
        processes=2,
    )
    assert code == 0 and len(lines) == 2
    assert lines[0][4:] == lines[1][4:], "one coordinator"
    words = lines[0].split()
    assert words[1] == "2" and words[-1] == "cpu"
    assert "--xla_force_host_platform_device_count=5" in words
    assert int(words[-3]) == max(len(os.sched_getaffinity(0)) // 2, 1)


def test_a_full_disk_under_its_log_does_not_hold_up_the_pod():
    code = "for i in range(9): print('x' * 65536, flush=True)"
    with open("/dev/full", "w") as full:
        command = [sys.executable, "-m", "launch", "local", "--", sys.executable, "-c", code]
        assert subprocess.run(command, cwd=ROOT, stdout=full, timeout=60).returncode == 0


def test_all_stopped_on_request_is_75():
    assert run("sys.exit(75)") == (75, [])


@pytest.mark.long
def test_the_first_failure_ends_the_pod_with_its_code_and_last_lines():
    begun = time.monotonic()
    code, lines = run("(print('no', 'flour'), sys.exit(3)) if me == 1 else time.sleep(1000)")
    assert code == 3 and time.monotonic() - begun < 30
    assert lines == [
        "[1] no flour",
        "pod: process 1 of 3 ended with exit code 3, and the others were ended",
        "pod: [1] no flour",
    ]


def test_a_process_killed_by_a_signal_gives_the_shell_s_code():
    code, lines = run("os.kill(os.getpid(), signal.SIGSEGV) if me == 0 else time.sleep(1)")
    assert code == 128 + signal.SIGSEGV
    assert "process 0 of 3, the coordinator, was killed by SIGSEGV" in lines[0]


def test_who_lost_another_is_not_taken_for_the_first_to_fail():
    """By our own exit code, or since jax aborted it."""
    lost = "sys.exit(134) if me else os.abort()"
    code, lines = run(f"time.sleep(1) or sys.exit(4) if me == 2 else ({lost})")
    assert code == 4
    assert any("process 2 of 3 ended with exit code 4" in line for line in lines)


def test_sigterm_and_interrupts_reach_each_process_once():
    seen = {}
    for number in (signal.SIGTERM, signal.SIGINT):
        started = start(
            "seen = [];"
            "[signal.signal(n, lambda n, _: seen.append(n)) for n in (2, 15)];"
            "print('ready', flush=True);"
            "[time.sleep(.1) for _ in iter(lambda: bool(seen), True)];"
            "time.sleep(.5); print(*seen); sys.exit(75)"
        )
        ready = [started.stdout.readline() for _ in range(3)]
        assert all(b"ready" in line for line in ready)
        started.send_signal(number)
        output, _ = started.communicate(timeout=60)
        assert started.returncode == 75
        seen[number] = sorted(line.split()[1:] for line in output.decode().splitlines())
    assert seen == {number: [[str(int(number))]] * 3 for number in seen}


def test_a_pod_that_is_killed_leaves_no_process():
    started = start("print(os.getpid(), flush=True); time.sleep(1000)")
    pids = [int(started.stdout.readline().split()[1]) for _ in range(3)]
    started.kill()
    started.wait()
    deadline = time.monotonic() + 20
    while any(alive(pid) for pid in pids):
        assert time.monotonic() < deadline
        time.sleep(0.1)


def alive(pid: int) -> bool:
    try:
        return "\nState:\tZ" not in pathlib.Path(f"/proc/{pid}/status").read_text()
    except OSError:
        return False


@pytest.mark.parametrize("words", ["invalid choice: 'rocket'", "locl: no such launcher"])
def test_a_launcher_that_is_not_there_is_refused(words, capsys):
    with pytest.raises(SystemExit, match="2"):
        main(["rocket" if "rocket" in words else "locl"])
    assert words in capsys.readouterr().err


def test_a_command_that_cannot_be_run_is_refused(tmp_path):
    odd = tmp_path / "odd"
    odd.write_text("not a program")
    odd.chmod(0o755)
    command = [sys.executable, "-m", "launch", "local", "--", str(odd)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, check=False)
    assert done.returncode == 2
    assert done.stderr.decode() == f"launch: {odd}: cannot be run (Exec format error)\n"
