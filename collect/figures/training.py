"""Draws how a training goes: the loss, the validation accuracy, and the times of epochs."""

from __future__ import annotations

from itertools import accumulate
from typing import Any

from collect.drawing.axes import make_axis, make_layout, name_axis
from collect.drawing.small_multiples import draw_cell_lines
from collect.drawing.traces import compute_max_points, make_points, thin_points
from collect.figure import MOST_SHOWN, Figure, WorkloadGroup, describe_rest
from collect.loading.loaded_run import LoadedRun
from collect.sources.steps import sum_training_time_s

MOST_TICKS = 10  # up to so many epochs, each has its tick: else plotly would write fractions such as 1.5
MIN_EPOCHS = 5  # the fewest epochs for which a cell gets a histogram
ROW_PX, MARGIN_PX, LABEL_SHARE = 120, 40, 0.4  # of a histogram. GAP: share of a row's height that its label and its axis need


def draw_loss(group: WorkloadGroup) -> Figure | None:
    """Draw the loss over the steps: one line per cell, from its first completed repeat. The lines of strategies that do the
    same work should lie on each other."""
    run_by_label = {mark.label: (mark, run) for mark in group.marks if (run := mark.first_run)}
    traces = {}
    for label, (mark, run) in run_by_label.items():
        # a command may tell a loss at every tenth step only, which are the points of its line
        loss_steps = run.world_steps if run.cell.command is None else run.world_steps.drop_nulls("loss")
        x, y = thin_points(loss_steps["step"].to_list(), loss_steps["loss"].to_list(), compute_max_points(len(run_by_label)))
        hover_template = "%{y:.5~g} at step %{x}"
        traces[label] = [make_points("lines+markers", x, y, marker=mark.look.sparse_marks, hovertemplate=hover_template)]
    meaning_text = "Mean over the global batch at each timed step, before its update"
    if any(run.cell.command is not None for _, run in run_by_label.values()):
        meaning_text = "As the command told it; its unit is not known"
    caption = f"{meaning_text}; the first completed repeat of each cell."
    return draw_cell_lines("loss", "Loss", caption, group, traces, make_axis("step", showgrid=False), make_axis("loss"))


def draw_accuracy(group: WorkloadGroup) -> Figure | None:
    """Draw the validation accuracy over the training time, which shows whether a cell with faster steps is accurate earlier.

    There is one line for each cell that has validation results, from its first completed repeat.
    """
    traces_by_label = {}
    for mark in group.marks:
        if mark.first_run and (points := _list_validation_points(mark.first_run)):
            x, y = map(list, zip(*points, strict=True))
            hover = "%{y:.3~g} % after %{x:.3~g} s"
            traces_by_label[mark.label] = [make_points("lines+markers", x, y, marker=mark.look.marks(7), hovertemplate=hover)]
    caption = (
        "Share of correct predictions on the validation split, over the training time: the sum of the slowest "
        "rank's step times, without warm-up steps and without the validation itself. First completed repeat of each cell."
    )
    x_axis, y_axis = make_axis("seconds of training", showgrid=False), make_axis("accuracy, %", rangemode="tozero")
    return draw_cell_lines("accuracy", "Validation accuracy", caption, group, traces_by_label, x_axis, y_axis)


def _list_validation_points(run: LoadedRun) -> list[tuple[float, float]]:
    """(seconds of training, accuracy in percent) for each validation of a run whose steps up to the validation are all
    recorded.

    Empty if the run was suspended, because the training time of a suspended run is not known.
    """
    if run.was_suspended:
        return []
    seconds = sum_training_time_s(run.timed_steps)
    return [(seconds[record.step], 100 * record.accuracy) for record in run.validation if record.step in seconds]


def draw_epoch_time(group: WorkloadGroup) -> Figure | None:
    """Draw a dot for each epoch, and a line for the mean of all epochs so far: the first epochs are often slower.

    The epochs are those of the first completed repeat of each cell.
    """
    results = {mark.label: (mark, mark.first_run.result) for mark in group.marks if mark.first_run}
    epochs = {label: (mark, result.epoch_time_s) for label, (mark, result) in results.items() if result and result.epoch_time_s}
    traces_by_label: dict[str, list[dict[str, Any]]] = {}
    for label, (mark, epoch_times_s) in epochs.items():
        epoch_numbers = [float(number) for number in range(1, len(epoch_times_s) + 1)]
        averages = [total_s / number for total_s, number in zip(accumulate(epoch_times_s), epoch_numbers, strict=True)]
        for mode, values, hover_subject in (("markers", epoch_times_s, "epoch"), ("lines", averages, "mean of epochs up to")):
            x_values, y_values = thin_points(epoch_numbers, values, compute_max_points(2 * len(epochs)))
            mark_style = {"legendgroup": label, "showlegend": mode == "lines", "marker": mark.look.marks(4) | {"opacity": 0.45}}
            trace = make_points(mode, x_values, y_values, **mark_style, hovertemplate=f"%{{y:.4~g}} s, {hover_subject} %{{x}}")
            traces_by_label.setdefault(label, []).append(trace)
    caption = (
        "Dots: the time of an epoch, as the sum of the step times of the slowest rank in each step. Lines: the "
        "mean of all epochs so far. First completed repeat of each cell."
    )
    most_epochs = max((len(epoch_times_s) for _, epoch_times_s in epochs.values()), default=1)
    x_axis = make_axis("epoch", showgrid=False, **({"dtick": 1} if most_epochs <= MOST_TICKS else {}))
    return draw_cell_lines(
        "epoch_time", "Time of an epoch", caption, group, traces_by_label, x_axis, make_axis("seconds", rangemode="tozero")
    )


def draw_epoch_histogram(group: WorkloadGroup) -> Figure | None:
    """Draw one histogram of the epoch times per cell, one below the other, each with its own axis in seconds.

    A histogram counts the epochs of all completed repeats of its cell. A mean alone would not show if some epochs are much
    slower than others.
    """
    times_of_cells = [
        (mark, [time for run in mark.cell.completed_runs if run.result for time in run.result.epoch_time_s or ()])
        for mark in group.marks
    ]
    times_of_cells = [(mark, epoch_times_s) for mark, epoch_times_s in times_of_cells if len(epoch_times_s) >= MIN_EPOCHS]
    drawn_cells = times_of_cells[:MOST_SHOWN]
    traces: list[dict[str, Any]] = []
    layout = make_layout({}, {}, annotations=[])
    anchor = {"x": 0, "xref": "paper", "yref": "paper", "showarrow": False, "yanchor": "top", "xanchor": "left"}
    for row, (mark, epoch_times_s) in enumerate(drawn_cells):
        x, y = name_axis("x", row + 1), name_axis("y", row + 1)
        top, bottom = 1 - (row + 0.18) / len(drawn_cells), 1 - (row + 1 - LABEL_SHARE) / len(drawn_cells)
        layout[name_axis("xaxis", row + 1)] = make_axis("", showgrid=False, anchor=y, nticks=6, ticksuffix=" s")
        layout[name_axis("yaxis", row + 1)] = make_axis("epochs", domain=[bottom, top], nticks=3)
        layout["annotations"].append(anchor | {"text": mark.label, "y": 1 - row / len(drawn_cells), "font": {"size": 12}})
        histogram = {"type": "histogram", "name": mark.label, "meta": mark.row.id, "x": epoch_times_s, "xaxis": x, "yaxis": y}
        bar_style = {"nbinsx": 30, "marker": {"color": mark.look.colour}, "hovertemplate": "%{y} epochs of %{x} s"}
        traces.append(histogram | bar_style)
    caption = "Number of epochs by duration, over all completed repeats of a cell. Each cell has its own scale."
    caption += describe_rest(len(times_of_cells) - len(drawn_cells), "cells with epochs")
    height_px = MARGIN_PX + ROW_PX * len(drawn_cells)
    return Figure("epoch_histogram", "Times of epochs", caption, height_px, traces, layout) if traces else None
