"""Templates in a workspace replace the templates of shardlab. A template can run no Python code, and it is never filled in
partially."""

import json

import jinja2
import pytest
from support_golden import run_of
from support_queue import CLUSTER, Queue
from support_trust import make_own

import templates
from jobs.cli import main
from jobs.rendering import render
from shardlab.cluster.cluster import THIS_MACHINE
from shardlab.errors import InputError
from shardlab.files import files
from shardlab.workspace.workspace import Workspace

pytestmark = pytest.mark.usefixtures("source_copied_faster")
NAME = "launch/local.sh.j2"


@pytest.fixture
def workspace(tmp_path, monkeypatch):
    """A workspace that is not the current folder. The current folder also contains a template with the name NAME, which must
    not be used for a workspace in another folder."""
    elsewhere = tmp_path / "elsewhere"
    (elsewhere / "templates" / "launch").mkdir(parents=True)
    (elsewhere / "templates" / NAME).write_text("of the current folder\n")
    monkeypatch.chdir(elsewhere)
    make_own(tmp_path / "workspace")
    (tmp_path / "workspace" / "templates" / "launch").mkdir(parents=True)
    return tmp_path / "workspace"


def rendered(workspace, text, code):
    """Runs `jobs render` in a workspace, checks the exit code of the command, and returns the rendered scripts. text: the
    content of the workspace's template NAME; None if the workspace has no template."""
    if text is not None:
        (workspace / "templates" / NAME).write_text(text)
    words = ["render", "--matrix", "quickstart", "--where", "gpus == 1", "--repeats", "1", "--workspace", str(workspace)]
    assert main(words) == code
    return sorted((workspace / "runs").glob("*/job.sh"))


def test_the_workspaces_template_is_used_and_named_and_its_digest_stored(workspace, capfd):
    scripts = rendered(
        workspace, "mine: {{ run.run_id | quote }} {% for word in command %}{{ word | quote }} {% endfor %}\n", 0
    )
    assert scripts
    said = f"note: scripts are rendered from the workspace's own template {workspace}/templates/{NAME}.\n"
    assert capfd.readouterr().err.count(said) == 1
    for script in scripts:
        assert script.read_text().startswith(f"mine: {script.parent.name} ")
        run = json.loads((script.parent / "run.json").read_text())
        assert run["templates"] == {NAME: templates.template_digest(NAME, workspace / "templates")}
        assert run["templates"] != {NAME: templates.template_digest(NAME)}


def test_without_an_own_template_the_shipped_template_is_used(workspace, capfd):
    scripts = rendered(workspace, None, 0)
    assert "own template" not in capfd.readouterr().err
    assert scripts
    assert all(script.read_text().startswith("#!/usr/bin/env bash\n# run ") for script in scripts)


def test_the_package_templates_of_a_checkout_is_not_the_users_folder(workspace, capfd):
    """A user may work in a checkout of shardlab, whose package `templates` lies where a workspace has the user's templates."""
    (workspace / "templates" / "__init__.py").touch()
    scripts = rendered(workspace, "of the checkout, maybe of another version\n", 0)
    assert "own template" not in capfd.readouterr().err
    assert scripts
    assert all(script.read_text().startswith("#!/usr/bin/env bash\n# run ") for script in scripts)
    assert (Workspace(workspace).own_templates, Workspace(workspace).list_template_files()) == (None, [])
    assert Workspace(templates.TEMPLATES_FOLDER.parent).own_templates is None


@pytest.mark.parametrize(
    ("text", "line", "says"),
    [
        ("a\n{{ ''.__class__.__mro__ }}", 2, "attribute '__class__' of 'str' object is unsafe"),
        ("{{ run.__init__.__globals__ }}", 1, "attribute '__init__' of 'Run' object is unsafe"),
        ("a\n\n{{ folder.write_text('x') }}", 3, "write_text"),
        ("{{ folder.parent.rmdir() }}", 1, "rmdir"),
        ("{{ run.cell.hash() }}", 1, "hash"),
        ("{{ command.append('x') }}", 1, "append"),
        ("{{ cycler.__init__.__globals__.os.system('x') }}", 1, "__init__"),
        ("{{ '{0.__class__}'.format(run) }}", 1, "__class__"),
        ("{{ [run] | map(attribute='__class__') | first }}", 1, "__class__"),
        ("{{ run | attr('__class__') }}", 1, "__class__"),
        ("{% for i in range(10 ** 9) %}{% endfor %}", 1, "Range too big"),
        ("a\n{{ missing }}", 2, "'missing' is undefined"),
        ("a\n{{ run.missing }}", 2, "no attribute 'missing'"),
        ("a\n{% if %}", 2, "Expected an expression"),
        ("{% include 'nowhere.j2' %}", 1, "nowhere.j2"),
        ("{% include '../../../etc/passwd' %}", 1, "etc/passwd"),
        ("a\n{{ 1 / 0 }}", 2, "division by zero"),
        ("{{ command + 1 }}", 1, "concatenate"),
    ],
)
def test_a_template_that_fails_to_render_is_one_sentence_and_changes_nothing(workspace, capfd, text, line, says):
    assert rendered(workspace, text, 2) == []
    said = capfd.readouterr().err
    assert said.startswith(f"error: {workspace}/templates/{NAME}:{line}: the template cannot be rendered: ")
    assert says in said
    assert said.count("\n") == 1
    assert not list((workspace / "runs").iterdir())


def test_the_error_of_a_template_names_the_faulty_file(workspace, capfd):
    (workspace / "templates" / "part.j2").write_text("one\ntwo\n{{ run.__class__ }}\n")
    rendered(workspace, "{% include 'part.j2' %}", 2)
    assert f"error: {workspace}/templates/part.j2:3: " in capfd.readouterr().err


def test_bytes_that_are_no_text_are_one_sentence(workspace, capfd):
    (workspace / "templates" / NAME).write_bytes(b"#!/bin/sh\n\xff\xfe")
    rendered(workspace, None, 2)
    assert capfd.readouterr().err.startswith(f"error: {workspace}/templates/{NAME}: the template cannot be rendered: ")


def test_plain_values_may_be_asked_and_jinja_helps(tmp_path):
    """Templates may use macros, loops, filters and the methods of texts, numbers and dicts."""
    (tmp_path / "launch").mkdir()
    text = (
        "{% macro shout(word) %}{{ word.upper() }}{% endmacro %}{{ shout(run.run_id) }} {{ range(3) | join(',') }} "
        "{% set seen = namespace(n=0) %}{% for word in ['x', 'y'] %}{% set seen.n = seen.n + 1 %}{{ loop.cycle('a', 'b') }}"
        "{% endfor %} {{ seen.n }} {{ {'k': 1}.items() | list | length }} {{ '%s' % folder.name }} {{ '{}'.format(1) }}"
    )
    (tmp_path / NAME).write_text(text)
    run = run_of("torchrun")
    said = render.render_script(run, tmp_path / "runs" / run.run_id, THIS_MACHINE, tmp_path)
    assert said == f"{run.run_id.upper()} 0,1,2 ab 2 1 {run.run_id} 1"


def test_shipped_templates_are_rendered_by_the_same_sandbox():
    with pytest.raises(jinja2.UndefinedError):
        templates.render(NAME)


def test_a_fault_in_a_template_of_several_runs_is_wrong_input(tmp_path):
    from jobs.rendering import scripts

    (tmp_path / "launch").mkdir()
    (tmp_path / "launch" / "slurm_array.sbatch.j2").write_text("{{ ''.__class__ }}")
    with pytest.raises(InputError, match=r"slurm_array\.sbatch\.j2:1: .*Correct the file, or remove it"):
        scripts.render_template("launch/slurm_array.sbatch.j2", tmp_path, options=[], folders=[], script="job.sbatch")


def test_a_template_cannot_execute_code_outside_of_its_sandbox(workspace, tmp_path):
    """The template tries to make a folder. Jinja without a sandbox makes the folder; shardlab's sandbox prevents it."""
    mark = tmp_path / "owned"
    text = f"{{{{ cycler.__init__.__globals__.os.mkdir('{mark}') }}}}"
    jinja2.Template(text).render()
    assert mark.exists()
    mark.rmdir()
    rendered(workspace, text, 2)
    assert not mark.exists()


def test_each_slurm_template_and_its_includes_have_digests_and_are_named(tmp_path, capfd, monkeypatch):
    Queue(tmp_path / "slurm", monkeypatch)  # makes this machine the controller of the cluster
    make_own(tmp_path)
    (tmp_path / "cluster.yaml").write_text(CLUSTER)
    own = tmp_path / "templates"
    (own / "launch").mkdir(parents=True)
    (own / "launch/slurm_pack.sbatch.j2").write_text("{% include 'part.j2' %}\n")
    (own / "part.j2").write_text("#!/bin/sh\n")
    assert main(["render", "--matrix", "quickstart", "--where", "gpus == 1", "--workspace", str(tmp_path)]) == 0
    (path, *_) = (tmp_path / "runs").glob("*/run.json")
    shipped = ["launch/slurm.sbatch.j2", "launch/slurm_array.sbatch.j2"]
    expected = {name: templates.template_digest(name) for name in shipped}
    expected |= {name: files.compute_file_sha256(own / name) for name in ("launch/slurm_pack.sbatch.j2", "part.j2")}
    assert json.loads(path.read_text())["templates"] == expected
    said = capfd.readouterr().err
    for name in ("launch/slurm_pack.sbatch.j2", "part.j2"):
        assert f"note: scripts are rendered from the workspace's own template {own}/{name}.\n" in said
