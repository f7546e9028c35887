"""Runs the scripts of docs/how-to/own-script-libraries.md, in an environment that has the libraries."""

import json
import subprocess
import sys

import pytest
from support_e2e import benches, make_second_environment
from support_long import only_in_long_form
from support_page import files_of

pytestmark = pytest.mark.e2e
PACKAGES = ("accelerate", "lightning", "pytorch-lightning", "lightning-utilities", "torchmetrics")


@pytest.fixture(scope="module")
def bench(tmp_path_factory):
    """A workspace with the files of the page; its commands and runs use an environment with the libraries."""
    folder = tmp_path_factory.mktemp("libraries")
    packages = make_second_environment(folder / "environment")
    installer = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--target", packages, *PACKAGES]
    subprocess.run(installer, check=False)  # without a package index, the tests are skipped
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "executable", str(folder / "environment/bin/python"))
        for made in benches(folder):
            for name, text in files_of("how-to/own-script-libraries.md").items():
                (made.path / name).parent.mkdir(exist_ok=True)
                (made.path / name).write_text(text)
            yield made


@only_in_long_form
@pytest.mark.parametrize(
    ("name", "needed", "verdict"),
    [
        ("hf", "import accelerate; from transformers import GPT2LMHeadModel", "not proven"),
        ("acc", "import accelerate", "proven"),
        ("light", "import lightning", "proven"),
    ],
)
def test_a_script_with_a_library_does_the_same_work_with_one_and_two_ranks(bench, name, needed, verdict):
    imported = subprocess.run([sys.executable, "-c", needed], capture_output=True, text=True, check=False)
    if imported.returncode:
        pytest.skip(f"{needed}: {imported.stderr.strip().splitlines()[-1]}")
    bench.run("jobs", "submit", "--matrix", str(bench.path / f"{name}.yaml"), "--where", "strategy == 'ddp'", "--wait")
    bench.run("collect", "summarize", "--matrix", name)
    all_rows = json.loads((bench.path / "report" / "summary.json").read_text())["rows"]
    rows = [row for row in all_rows if row["cell"]["strategy"] == "ddp"]
    assert [(row["cell"]["gpus"], row["states"]) for row in rows] == [(1, {"completed": 1}), (2, {"completed": 1})]
    assert [row["same_work"]["verdict"] for row in rows] == [verdict] * 2
    losses = [row["metrics"]["final_loss"]["value"] for row in rows]
    assert losses[1] == pytest.approx(losses[0], rel=0.2)
    assert all(row["metrics"]["throughput_per_s"]["unit"] == "tokens/s" for row in rows)
