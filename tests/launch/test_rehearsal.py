"""What a launch starts elsewhere, started here: it is preempted twice and loses nothing."""

import pytest
import rehearse
import rehearse_pod


def test_the_program_of_a_rehearsal_exists():
    assert rehearse.MEMBER.exists()


@pytest.mark.nightly
def test_a_pod_outlasts_a_failing_bucket_two_preemptions_and_new_machines(tmp_path):
    """The small form of `make rehearse-pod`: as GKE starts it, to the bits of a run undisturbed."""
    assert rehearse_pod.rehearsed(tmp_path, faults=25, outages=(15.0,), seed=1) == 0
