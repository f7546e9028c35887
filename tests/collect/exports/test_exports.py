"""The formats of `collect export`: each file is complete, and names with special characters appear in it unchanged."""

import json
import re
import shutil
import subprocess

import polars as pl
import pytest
import support_collect as support
from hypothesis import example, given, settings
from hypothesis import strategies as st
from markdown_it import MarkdownIt

from collect import export, summary
from collect.cli import main
from collect.exports import latex, markdown
from collect.reading import load
from collect.report import summary_tables
from shardlab.errors import InputError
from shardlab.runs.run import REHEARSAL_NOTE
from shardlab.terminal.table import make_text_table
from shardlab.workspace.workspace import Workspace

HOSTILE = r"a|b_c %&#${x}~^\end{table} <b>*i*</b> [l](u) `code` 'q' -- © \\ $(rm)$"
STUDY = {
    "claims": [{"id": "c1", "says": f"DDP is faster {HOSTILE}", "test": "throughput_per_s(strategy='ddp', launcher='torchrun')"
                " / throughput_per_s(strategy='single') >= 1.5", "where": "section 1"}],
    "reported": [{"where": "table 1", "cell": {"strategy": "single"}, "metric": "step_time_ms", "printed": "102 ms"}],
}  # fmt: skip


@pytest.fixture(scope="module")
def workspace(tmp_path_factory) -> Workspace:
    return support.matrix(tmp_path_factory.mktemp("exports"))


@pytest.fixture(scope="module")
def hostile(tmp_path_factory):
    """A summary whose claims, reported numbers and title have characters that are special in every format."""
    workspace = Workspace(tmp_path_factory.mktemp("hostile"))
    cells = [support.cell(), support.cell("ddp", 2), support.cell("ddp", 2, "fork")]
    support.keep(workspace, cells, title=HOSTILE, **STUDY)
    for what in cells:
        for repeat in (1, 2, 3):
            support.completed(workspace, what, repeat)
    loaded = load.load_matrix(workspace, None)
    return loaded, summary.summarize(loaded, "single")


def exported(workspace, name, out, code=0):
    assert main(["export", "--to", name, "--workspace", str(workspace.path), "--out", str(out)]) == code
    return out


@pytest.mark.parametrize(("suffix", "read"), [("csv", pl.read_csv), ("parquet", pl.read_parquet)])
def test_tables_for_programs_hold_what_the_report_holds(workspace, tmp_path, suffix, read):
    out = exported(workspace, suffix, tmp_path / "out")
    assert {path.name for path in out.iterdir()} == {f"{name}.{suffix}" for name in ("summary", "steps", "samples")}
    assert read(out / f"summary.{suffix}").height == 6


def test_json_is_the_summary(workspace, tmp_path, capsys):
    out = exported(workspace, "json", tmp_path / "out")
    capsys.readouterr()
    assert main(["summarize", "--json", "--workspace", str(workspace.path), "--out", str(tmp_path / "report")]) == 0
    ours, theirs = (json.loads(text) for text in ((out / "summary.json").read_text(), capsys.readouterr().out))
    assert ours | {"created_s": 0} == theirs | {"created_s": 0}


def test_the_report_has_the_tables_for_papers_too(workspace, tmp_path):
    assert main(["summarize", "--workspace", str(workspace.path), "--out", str(tmp_path / "report")]) == 0
    tables = tmp_path / "report" / "tables"
    for name in ("markdown", "latex"):
        for path in exported(workspace, name, tmp_path / name).iterdir():
            assert [line for line in path.read_text().splitlines() if "UTC" not in line] == [
                line for line in (tables / path.name).read_text().splitlines() if "UTC" not in line
            ]


def test_an_unknown_format_prints_the_menu_with_a_line_each(workspace, tmp_path, capsys):
    exported(workspace, "markdwon", tmp_path / "out", code=2)
    said = capsys.readouterr().err.splitlines()
    assert said[0] == "error: unknown export format 'markdwon'. Did you mean 'markdown'? Allowed:"
    assert [line.split()[0] for line in said[1:]] == sorted(export.load_export_formats())
    assert all(format_.summary in line for format_, line in zip(export.load_export_formats().values(), said[1:], strict=True))
    assert not (tmp_path / "out").exists()


def test_by_default_every_format_has_its_own_folder(tmp_path, capsys):
    workspace = Workspace(tmp_path)
    support.keep(workspace, [support.cell()], repeats=1)
    for name in ("csv", "latex"):
        assert main(["export", "--to", name, "--json", "--workspace", str(tmp_path)]) == 0
        document = json.loads(capsys.readouterr().out)
        assert document["files"] == sorted(str(path) for path in (tmp_path / "export" / name).iterdir())


def test_a_second_export_leaves_nothing_of_the_first(workspace, tmp_path):
    out = exported(workspace, "latex", tmp_path / "out")
    (out / "claims.tex").write_text("of an earlier matrix, which had claims")
    exported(workspace, "latex", out)
    assert not (out / "claims.tex").exists()
    assert list(tmp_path.iterdir()) == [out]


def test_an_export_does_not_replace_a_folder_with_other_files(workspace, tmp_path, capsys):
    out = exported(workspace, "csv", tmp_path / "out")
    (out / "mine.txt").write_text("mine")
    before = {path.name: path.read_bytes() for path in out.iterdir()}
    exported(workspace, "csv", out, code=2)
    assert "holds 'mine.txt', which is not part of a csv export" in capsys.readouterr().err
    assert {path.name: path.read_bytes() for path in out.iterdir()} == before


def test_an_export_that_fails_midway_keeps_the_previous_export(hostile, tmp_path):
    def fails(_loaded, _summary, folder, _place):
        (folder / "summary.md").write_text("half")
        raise InputError("no")

    loaded, found = hostile
    export.write_export(markdown.EXPORT, loaded, found, tmp_path / "out")
    before = (tmp_path / "out" / "summary.md").read_text()
    broken = export.Export(name="x", summary="", written_names=markdown.EXPORT.written_names, write=fails)
    with pytest.raises(InputError):
        export.write_export(broken, loaded, found, tmp_path / "out")
    assert (tmp_path / "out" / "summary.md").read_text() == before
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


# Tests of the Markdown export


def rows_of(text: str) -> list[list[str]]:
    """The tables of a Markdown text: for each row, the texts of its fields as a Markdown reader shows them."""
    tokens = MarkdownIt("commonmark").enable("table").parse(text)
    rows: list[list[str]] = []
    for token, content in zip(tokens, [*tokens[1:], None]):
        if token.type == "tr_open":
            rows.append([])
        if token.type in ("td_open", "th_open"):
            assert {child.type for child in content.children} <= {"text", "text_special"}, content.content
            rows[-1].append("".join(child.content for child in content.children))
    return rows


def flat(text: str) -> str:
    return re.sub(r" +", " ", text).strip()


# Texts of visible characters and spaces only: exports replace invisible characters by "?" (see
# tests/shardlab/terminal/test_printable.py).
SEEN = st.text(alphabet=st.characters(exclude_categories=("C", "Z"), include_characters=" "))


@settings(max_examples=40)
@given(st.lists(st.lists(SEEN, min_size=2, max_size=2), min_size=1, max_size=4))
def test_markdown_escapes_every_text(texts):
    drawn = markdown._render_table(make_text_table("", ["a", "b"], texts))
    assert rows_of(drawn)[1:] == [[flat(text) for text in row] for row in texts]


def test_markdown_holds_the_summary_the_claims_and_the_reported_numbers(hostile, tmp_path):
    loaded, found = hostile
    export.write_export(markdown.EXPORT, loaded, found, tmp_path / "out")
    text = (tmp_path / "out" / "summary.md").read_text()
    rows = rows_of(text)
    assert rows[0][:2] == ["Strategy", "Ranks"]
    assert "Throughput (tokens/s)" in rows[0]
    assert rows[1][:3] == ["single", "1", "torchrun"]
    assert any(row[0] == "c1" and row[1] == "undecided (rehearsal)" and HOSTILE in row[2] for row in rows)
    assert any(row[0] == "table 1" and row[3] == "102 ms" for row in rows)
    assert f"- {REHEARSAL_NOTE}" in text
    for table in summary_tables.make_text_tables(found):
        assert len({len(row) for row in (table.headings, *table.texts)}) == 1


# Tests of the LaTeX export

# _COMMANDS maps each LaTeX command to the character that it prints; _MEANT_FOR_TEX has the characters that are special in TeX.
# From "The Comprehensive LaTeX Symbol List" and "The LaTeX Companion".
_COMMANDS = {
    "textbackslash": "\\", "textasciitilde": "~", "textasciicircum": "^", "textless": "<", "textgreater": ">", "textbar": "|",
    "textasciigrave": "`", "pm": "±", "times": "×", "mu": "µ",
}  # fmt: skip
_MEANT_FOR_TEX = set('\\{}$&#_%~^"<>|`')  # TeX's default font prints <, > and | as other characters
_LIGATURES = ("--", ",,", "''", "``", "!`", "?`")


def set_by_tex(text: str) -> str:
    """The characters that TeX prints for this LaTeX text, which has no mathematics.

    Fails if the text has a character that is special in TeX, or two characters that TeX would join into a ligature and that no
    brace separates.
    """
    found, place = [], 0
    while place < len(text):
        if text[place] == "\\":
            if escaped := re.match(r"\\([{}$&#_%])", text[place:]):
                found.append(escaped[1])
            elif escaped := re.match(r"\\char(\d+)", text[place:]):
                found.append(chr(int(escaped[1])))
            elif escaped := re.match(r"\\ensuremath\{(?:\\([a-z]+)|\^(2))\}", text[place:]):
                found.append(_COMMANDS[escaped[1]] if escaped[1] else "²")
            else:
                # A command must end with {}: without the braces, TeX ignores a space after the command.
                escaped = re.match(r"\\([A-Za-z]+)\{\}", text[place:])
                assert escaped, text[place:]
                found.append(_COMMANDS[escaped[1]])
            place += escaped.end()
            continue
        if text[place] not in "{}":
            assert text[place] not in _MEANT_FOR_TEX, text[place:]
            assert not text.startswith(_LIGATURES, place), text[place:]
            found.append(text[place])
        place += 1
    assert text.count("{") - text.count("\\{") == text.count("}") - text.count("\\}"), (
        "braces that mean something come in pairs"
    )
    return "".join(found)


@given(SEEN | st.text(alphabet="\\{}$&#_%~^<>|`\"'[]*-, ?!±×²µ"))
@example("\\textbackslash{} {\\char34}--,,''``?`!`")
def test_latex_escapes_every_text(text):
    escaped = latex.escape_latex(text)
    assert set_by_tex(escaped) == flat(text)
    assert not re.match(r"[*\[]", escaped), "after the \\\\ of the row before, TeX would read these as its options"


def test_latex_tables_balance_and_say_what_was_run(hostile, tmp_path):
    loaded, found = hostile
    written = export.write_export(latex.EXPORT, loaded, found, tmp_path / "out")
    assert {path.name for path in written} >= {"summary.tex", "claims.tex", "reported.tex"}
    for path in written:
        text = path.read_text()
        for environment in re.findall(r"\\begin\{(\w+)\}", text):
            assert text.count(f"\\begin{{{environment}}}") == text.count(f"\\end{{{environment}}}") == 1
        for rule in ("toprule", "midrule", "bottomrule"):
            assert text.count(f"\\{rule}\n") == 1
        (caption,) = re.findall(r"\\caption\{(.*)\.\}\\label\{tab:[A-Za-z0-9-]+\}", text)
        said = set_by_tex(caption)
        assert HOSTILE in said
        assert REHEARSAL_NOTE in said
        columns = len(re.findall(r"^  (?:[lr]|>.*p\{.*\})$", text, re.MULTILINE))
        rows = [line for line in text.splitlines() if line.endswith(r" \\")]
        assert len(rows) > 1
        for row in rows:
            cells = re.split(r" & ", row.removesuffix(r" \\"))
            assert len(cells) == columns
            for one in cells:
                set_by_tex(one)


@pytest.mark.skipif(not shutil.which("pdflatex"), reason="pdflatex is not installed")
@pytest.mark.skipif(not shutil.which("pdftotext"), reason="pdftotext is not installed")
def test_pdflatex_typesets_special_characters_as_they_are(tmp_path):
    marks = [char for char in map(chr, range(0x21, 0x7F)) if not char.isalnum()] + list("±×²µ")
    texts = [*(char * 3 for char in marks), *(f"{char}a" for char in marks), HOSTILE.replace("©", "")]
    # The font encoding T1 is needed, because it has straight quotes.
    head = r"\documentclass{article}\usepackage[T1]{fontenc}\pagestyle{empty}\begin{document}"
    rows = "\n\n".join(latex.escape_latex(text) for text in texts)
    (tmp_path / "a.tex").write_text(f"{head}\n\\hyphenchar\\font=-1\n{rows}\n\\end{{document}}\n")
    command = ["pdflatex", "-interaction=nonstopmode", "-halt-on-error", "a.tex"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout
    read = subprocess.run(["pdftotext", "-raw", "a.pdf", "-"], cwd=tmp_path, capture_output=True, text=True, check=True).stdout
    # pdftotext returns a superscript 2 as a plain 2.
    assert re.sub(r"\s", "", read) == re.sub(r"\s", "", "".join(texts)).replace("²", "2")


@pytest.mark.skipif(not shutil.which("pdflatex"), reason="pdflatex is not installed")
def test_latex_compiles_and_fits_the_page(hostile, tmp_path):
    loaded, found = hostile
    written = export.write_export(latex.EXPORT, loaded, found, tmp_path / "out")
    inputs = "\n".join(rf"\input{{{path}}}" for path in written)
    head = r"\documentclass{article}\usepackage{array,booktabs,longtable}\begin{document}"
    (tmp_path / "all.tex").write_text(f"{head}\n{inputs}\n\\end{{document}}\n")
    command = ["pdflatex", "-interaction=nonstopmode", "-halt-on-error", "all.tex"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout
    assert "Overfull" not in done.stdout
