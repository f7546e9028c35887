"""The fake GPUs of these tests: what they count, which tensors share memory on them, and which errors they raise."""

import pytest
from fake_cuda import build

pytest_plugins = ["support_trainers", "support_fake_gpus"]
pytestmark = pytest.mark.skipif(build.why_not() is not None, reason=f"no fake GPUs: {build.why_not()}")


@pytest.mark.parametrize(
    "name",
    [
        "memory_is_counted_per_gpu_and_given_back",
        "a_full_gpu_raises_what_torch_raises_and_goes_on",
        "views_share_memory_and_in_place_operators_write_it",
        "results_of_another_size_go_into_the_tensor_that_was_given",
        "gradients_are_those_of_the_cpu",
        "copies_to_and_from_the_host_are_copies",
        "pinned_memory_is_known_as_such",
        "a_storage_is_freed_and_filled_again",
        "a_gpu_that_is_not_there_is_refused",
        "bf16_is_refused_where_a_gpu_has_no_kernel_for_it",
        "events_measure_the_hosts_time",
        "waits_of_the_host_are_counted_by_line",
    ],
)
def test_a_fake_gpu_behaves_as_a_gpu(gpus, name):
    assert gpus.ask(name) == "as a GPU does"


def test_collectives_of_nccl_give_sums_over_the_ranks(gpus):
    assert gpus.ask("sums_over_ranks", ranks=3) == [[6.0] * 4] * 3
