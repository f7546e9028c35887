"""Figures are exported as image files, which a real browser draws. Without a browser there is a message."""

import struct
import sys
import xml.etree.ElementTree as ElementTree

import pytest
import support_browser
import support_collect as support

from collect import figure, summary
from collect.cli import main
from collect.drawing import axes
from collect.reading import load
from collect.report import page
from shardlab import extras
from shardlab.workspace.workspace import Workspace


@pytest.fixture(scope="module")
def workspace(tmp_path_factory):
    return support.matrix(tmp_path_factory.mktemp("pictures"))


@pytest.fixture(scope="module")
def figures(workspace):
    loaded = load.load_matrix(workspace, None)
    return page.draw_figures(loaded, summary.summarize(loaded, "single"))


@support_browser.needed
def test_every_figure_is_a_file_in_light_colours(workspace, figures):
    assert main(["summarize", "--images", "svg,png", "--workspace", str(workspace.path)]) == 0
    folder = workspace.report / "figures"
    assert {path.name for path in folder.iterdir()} == {f"{one.name}.{suffix}" for one in figures for suffix in ("svg", "png")}
    for one in figures:
        size = one.spec["picture"]["width"], one.spec["picture"]["height"]
        text = (folder / f"{one.name}.svg").read_text()
        root = ElementTree.fromstring(text)
        assert (float(root.get("width")), float(root.get("height"))) == size
        assert "var(" not in text
        assert one.title in "".join(root.itertext())
        data = (folder / f"{one.name}.png").read_bytes()
        assert struct.unpack(">II", data[16:24]) == (2 * size[0], 2 * size[1])
    assert main(["summarize", "--workspace", str(workspace.path)]) == 0
    assert not folder.exists(), "figures of an earlier report would stand beside other numbers"


@support_browser.needed
def test_figures_are_exported_without_a_report(workspace, figures, tmp_path):
    assert main(["export", "--to", "svg", "--workspace", str(workspace.path), "--out", str(tmp_path / "out")]) == 0
    assert {path.stem for path in (tmp_path / "out" / "figures").iterdir()} == {one.name for one in figures}


def test_every_figure_names_the_cells_that_it_shows(workspace, figures):
    loaded = load.load_matrix(workspace, None)
    ids = {cell.id for cell in loaded.cells}
    completed = {cell.id for cell in loaded.cells if cell.completed_runs}
    for one in figures:
        assert one.cells, one.name
        assert set(one.cells) <= ids
        for trace in one.spec["data"]:
            assert isinstance(trace.get("meta", ""), str) or len(trace["meta"]) == len(trace["x"])
    shown = {one.kind: set(one.cells) for one in figures}
    assert shown["loss"] == completed
    assert shown["throughput_per_s"] == ids, "also the cells that have a state in place of a value"


def test_names_are_unique_and_fit_for_files(tmp_path):
    workspace = Workspace(tmp_path)
    cells = [support.cell(workload=name) for name in ("gpt2-tiny", "vit-tiny")]
    support.keep(workspace, cells, repeats=1)
    for what in cells:
        support.completed(workspace, what)
    loaded = load.load_matrix(workspace, None)
    names = [one.name for one in page.draw_figures(loaded, summary.summarize(loaded, "single"))]
    assert len(names) == len(set(names))
    assert names[0] == "throughput-per-s-gpt2-tiny"
    assert names.index("telemetry-gpt2-tiny") < names.index("throughput-per-s-vit-tiny")


def test_without_a_browser_or_kaleido_one_sentence_says_what_to_install(workspace, tmp_path, monkeypatch, capsys):
    report = tmp_path / "report"
    command = ["summarize", "--workspace", str(workspace.path), "--out", str(report), "--images"]
    assert main([*command, "pdf"]) == 2
    assert "--images: found 'pdf'. Allowed: svg, png." in capsys.readouterr().err
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr("choreographer.browsers.chromium.Chromium.find_browser", lambda **_: None)
    assert main([*command, "svg"]) == 2
    assert "needs Chrome or Chromium, which was not found; install one" in capsys.readouterr().err
    monkeypatch.setitem(sys.modules, "kaleido", None)
    assert main([*command, "svg"]) == 1
    assert extras.make_install_command("images") in capsys.readouterr().err
    assert not report.exists()


def test_a_picture_has_its_title_where_there_is_room():
    legend = {"showlegend": True, "legend": {"orientation": "h"}}
    lines = [{"name": str(number), "visible": "legendonly" if number > 3 else True} for number in range(9)]
    told = figure.Figure("a", "A <b>", "", 100, lines, axes.make_layout({}, {}, **legend))
    with_legend, alone = (
        figure.make_image_layout(one, one.title, False)
        for one in (told, figure.Figure("a", "A <b>", "", 100, [], axes.make_layout({}, {})))
    )
    assert with_legend["legend"]["title"]["text"] == alone["title"]["text"] == "A &lt;b&gt;"
    assert with_legend["height"] == alone["height"] + 2 * figure.LINE_PX  # the four names of the legend take two lines
