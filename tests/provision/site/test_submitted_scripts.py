"""Scripts that `provision` submits as jobs at a site."""

import pytest

from provision.fact import Unanswered
from provision.site import jobs
from shardlab.remote.remote import CommandOutput


class RejectingLogin:
    """A login node where the submission fails with these words."""

    name = "login"

    def __init__(self, words):
        self.words = words

    def run(self, argv, **options):
        return CommandOutput(1, "", self.words)


@pytest.mark.parametrize(
    ("words", "advice"),
    [
        (
            "sbatch: error: Batch job submission failed: Invalid qos specification",
            ". Decided in the cluster file by: slurm.qos.",
        ),
        ("pip: no space for the account", ""),
    ],
)
def test_a_job_of_provision_that_slurm_rejects_names_the_keys(words, advice):
    with pytest.raises(Unanswered) as caught:
        jobs.submit_script("install", "/s/install.sh", "/s/log", 5).make(RejectingLogin(words))
    assert str(caught.value) == f"login: install: {words}{advice}"
    assert caught.value.reasons_by_node == {"login": str(caught.value)}
