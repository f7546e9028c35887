"""Reading a damaged trace never raises an exception. By default the test reads 200 mutants (traces with random damage); the
long form of the test reads 100,000."""

import pytest
import support_mutants
import support_trace_shapes as shapes
import support_traces as support
from support_long import LONG

from collect.traces import breakdown, trace

WHOLE = {
    **{name: shapes.text(shape(kernels=3)) for name, shape in shapes.SHAPES.items()},
    "CUDA": support.Rank(0, steps=2, kernels=3).text(),
}
MUTANTS = (100_000 if LONG else 200) // len(WHOLE)


@pytest.mark.parametrize("shape", WHOLE)
def test_no_mutant_raises_and_its_figures_are_possible(tmp_path, shape):
    assert not support_mutants.faults(WHOLE[shape], MUTANTS, shape, tmp_path / "t.json")


@pytest.mark.parametrize("number", ["1cat", "9" * 400, "-1"])
def test_a_step_whose_number_cannot_be_read_is_no_step(tmp_path, number):
    path = tmp_path / "t.json"
    path.write_bytes(WHOLE["Triton"].replace(b"ProfilerStep#1", b"ProfilerStep#" + number.encode()))
    support_mutants.check(path)
    assert breakdown.count_steps(trace.read_trace(path)) == breakdown.count_steps(trace.read_trace(_whole(tmp_path))) - 1


def _whole(folder):
    (path := folder / "whole.json").write_bytes(WHOLE["Triton"])
    return path
