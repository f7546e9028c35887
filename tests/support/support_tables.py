"""Keeps the tables that a command or a page shows, so that a test can compare each cell with a number that the test wrote.
Makes a record of traces with known numbers."""

from html.parser import HTMLParser

from collect.traces.calls import CollectiveCall, ProcessGroup
from collect.traces.idle_causes import IdleCauses, LaunchDelays
from collect.traces.operator_times import CategoryTime, OperatorTime
from collect.traces.rank_analysis import RankAnalysis
from collect.traces.rank_work import RankWork
from collect.traces.stream_use import LaunchCalls, RunningTogether, StreamUse
from shardlab.terminal.console import Output

MIB = 1_048_576
NO_WORK = RankWork(categories=[], operators=[], launch_calls=[], streams=[], together=[])

KNOWN_WORK = RankWork(
    categories=[CategoryTime("matrix products", 26, 6_004_000), CategoryTime("copies", 14, 2_008_000)],
    operators=[
        OperatorTime(
            operator="aten::mm", category="matrix products", shapes="[[2,3],[3,5]]", types=["c10::Half", "c10::Half", "Scalar"],
            kernels=["gemm"], calls=34, kernel_ns=4_006_000, copy_ns=1_004_000, with_children_ns=7_012_000,
            self_host_ns=3_014_000, host_ns=9_018_000, flops=22_033_000_000, bytes=5_007_500, least_ns=1_001_500,
        )
    ],
    launch_calls=[
        LaunchCalls(
            rank=3, count=1_013, total_ns=8_017_000, median_ns=5_011, longest_ns=707_000, call="cudaLaunchKernel",
            call_ns=503_000, idle_ns=401_000, launched="gemm", step=6,
        )
    ],
    streams=[
        StreamUse(rank=3, stream=7, count=211, busy_ns=6_011_000, idle_ns=2_017_000, mean_queue=3.507, longest_queue=19)
    ],
    together=[RunningTogether("compute + communication", 4_022_000)],
)  # fmt: skip


class PrintedTables(Output):
    """An output that keeps each printed table.

    rows_of: maps the title of a table to its rows; a row maps the heading of each column to the cell.
    """

    def __init__(self):
        super().__init__()
        self.rows_of = {}

    def show_table(self, table):
        title, columns = table.title_with_rest, table.headings
        assert title not in self.rows_of, f"the title {title} is printed twice"
        assert len(set(columns)) == len(columns), f"{title}: two columns have the same heading"
        self.rows_of[title] = [dict(zip(columns, row, strict=True)) for row in table.texts]


class TablesOfPage(HTMLParser):
    """The tables of an HTML page. tables: for each table, its rows; a row maps the heading of each column to the cell."""

    def __init__(self, page):
        super().__init__()
        self.tables, self._headings, self._cells, self._text = [], [], [], None
        self.feed(page)

    def handle_starttag(self, tag, attrs):
        if tag == "table":
            self.tables.append([])
            self._headings = []
        elif tag == "tr":
            self._cells = []
        elif tag in ("th", "td"):
            self._text = []
        elif tag == "span" and self._text is not None:
            self._text.append(" ")  # before the unit of a heading

    def handle_data(self, data):
        if self._text is not None:
            self._text.append(data)

    def handle_endtag(self, tag):
        if tag in ("th", "td"):
            self._cells.append(" ".join("".join(self._text).split()))
            self._text = None
        elif tag == "tr" and not self._headings:
            self._headings = self._cells
        elif tag == "tr":
            self.tables[-1].append(dict(zip(self._headings, self._cells, strict=False)))


def analysis(rank, durations_ns, **other):
    """What the trace of one rank tells: all-reduces of 103 MiB whose first 500,000 ns are exposed and 211,000 ns hidden."""
    given = {
        "source": "gpu", "steps": 2, "host": "node0", "gpu": "NVIDIA H100 80GB HBM3", "span_ns": 50_000_000, "compute_ns": 0,
        "memory_ns": 0, "idle_ns": 9_973_000, "idle": IdleCauses(5_003_000, 701_000, 3_011_000, 1_959_000),
        "launches": LaunchDelays(3, 60_000, 17_000, 29_000), "groups": [ProcessGroup("3", (0, 1), 2, "shards")],
        "calls": [CollectiveCall("all_reduce", 0, 5, ns, 103 * MIB, 211_000, [0, 500_000], 103 * MIB) for ns in durations_ns],
        "work": NO_WORK, "phases": [], "layers": [], "memory": [], "products": [], "attention": [],
    }  # fmt: skip
    return RankAnalysis(rank=rank, **(given | other))
