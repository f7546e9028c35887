"""Turns telemetry into curves: the time of a run is divided into stretches (sections of equal length), each with one value.

All devices of all hosts of a run have the same stretches, so the values of the devices can be added up although hosts do not
take their samples at the same moment. If the samples of any device do not cover a stretch, the stretch has no value, and the
line has a gap there.

One frame contains the samples of many runs, which the column `run` distinguishes, because a hundred small frames take a hundred
times as long as one frame.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, NamedTuple

import polars as pl

from collect.loading.telemetry import LEAST_GAP_PERIODS
from collect.metrics.network import MIN_COVERED_SHARE

STRETCHES = 200  # the most stretches of a run: a screen cannot show more points per line if there are a dozen lines
Combination = Literal["mean", "sum", "max"]


class Curve(NamedTuple):
    """A curve: one value for each stretch."""

    first_s: float
    """The middle of the first stretch, in seconds."""
    width_s: float
    """The length of a stretch in seconds."""
    values: list[float | None]
    """The value of each stretch in the order of time; None: the value of this stretch is not known."""


def read_levels(samples: pl.DataFrame, device: str, column: str) -> pl.DataFrame:
    """The readings of one quantity of all devices, as a frame with the columns run, device, since_s, until_s, value.

    A reading is valid from the time of the device's previous sample (since_s) to the time of its own sample (until_s).

    samples: the samples of the devices, with the column `run`. device, column: the names of the columns in `samples` that
    identify the device and contain the quantity.
    """
    rows = samples.drop_nulls(column).sort("run", device, "wall_s")
    previous_wall_s = pl.col("wall_s").shift().over("run", device)
    return rows.select("run", device=device, since_s=previous_wall_s, until_s="wall_s", value=pl.col(column).cast(pl.Float64))


def read_rates(samples: pl.DataFrame, counter: str, *device_columns: str) -> pl.DataFrame:
    """The growth of a counter per second, as a frame with the same columns as the result of `read_levels`.

    The value is null if the counter went backwards, or if the host was booted between the two samples.

    counter: the name of the column of the counter. device_columns: the columns that identify a device; without them, a device
    is a network interface (columns host, name).
    """
    device_names = pl.concat_str(*(device_columns or ("host", "name")), separator=" ")
    counter_samples = samples.drop_nulls(counter).with_columns(device=device_names)
    previous_columns = pl.col("wall_s", counter, "boot_id").shift().over("run", "device").name.prefix("before_")
    counter_samples = counter_samples.sort("run", "device", "wall_s").with_columns(previous_columns)
    increase, elapsed_s = pl.col(counter) - pl.col(f"before_{counter}"), pl.col("wall_s") - pl.col("before_wall_s")
    is_valid = (increase >= 0) & (elapsed_s > 0) & (pl.col("boot_id") == pl.col("before_boot_id"))
    growth_per_s = pl.when(is_valid).then(increase / elapsed_s)
    return counter_samples.select("run", "device", since_s="before_wall_s", until_s="wall_s", value=growth_per_s)


def make_growth_readings(samples: pl.DataFrame, counter: str) -> pl.DataFrame:
    """The growth of a counter of network interfaces since 0 s, with the same columns as `read_levels`.

    The value is unknown from the moment when the counter went backwards or the host was booted again. counter: the name of the
    column.
    """
    names = pl.concat_str("host", "name", separator=" ")
    rows = samples.drop_nulls(counter).filter(pl.col("wall_s") >= 0).with_columns(device=names).sort("run", "device", "wall_s")
    is_same_boot = pl.col("boot_id") == pl.col("boot_id").first()
    is_valid = ((pl.col(counter).diff().fill_null(0) >= 0) & is_same_boot).cast(pl.Int8).cum_min().over("run", "device")
    growth = pl.when(is_valid == 1).then(pl.col(counter) - pl.col(counter).first().over("run", "device"))
    return read_levels(rows.with_columns(grown=growth), "device", "grown")


def join_devices(readings: pl.DataFrame, combination: Combination) -> dict[str, Curve]:
    """One curve per run, which combines the readings of all devices of the run. Returns {run: curve}.

    For each stretch, the readings of each device are first combined into one value: their mean, or with `max` the highest
    reading. Then the values of all devices are combined as `combination` says. Runs whose samples cover no stretch are left
    out."""
    if (valid_readings := _select_valid_readings(readings)).is_empty():
        return {}
    reading_pieces = _combine_pieces(_cut_at_stretches(valid_readings), combination)
    covered_pieces = reading_pieces.filter(pl.len().over("run", "stretch") == pl.col("devices"))
    combined_value = {"mean": pl.col("value").mean(), "sum": pl.col("value").sum(), "max": pl.col("value").max()}[combination]
    curve_rows = covered_pieces.group_by("run", "stretch").agg(combined_value, pl.first("width_s")).sort("run", "stretch")
    return {str(run): _build_curve(rows) for (run,), rows in curve_rows.group_by("run", maintain_order=True)}


def _select_valid_readings(readings: pl.DataFrame) -> pl.DataFrame:
    """The readings that have a value and no gap before them, with two more columns: the number of devices and the width of a
    stretch.

    Both columns are computed for each run. A gap is a distance between two samples that is much longer than usual
    (GAP_PERIODS).
    """
    elapsed_s = pl.col("until_s") - pl.col("since_s")
    usual_period_s = elapsed_s.quantile(0.5, "higher").over("run", "device")
    readings = readings.with_columns(devices=pl.col("device").n_unique().over("run"), usual_s=usual_period_s)
    readings = readings.filter(pl.col("value").is_not_null(), elapsed_s > 0, elapsed_s <= LEAST_GAP_PERIODS * pl.col("usual_s"))
    total_s = (pl.col("until_s").max() - pl.col("since_s").min()).over("run")
    return readings.with_columns(width_s=pl.max_horizontal(total_s / STRETCHES, pl.col("usual_s").max().over("run")))


def _cut_at_stretches(readings: pl.DataFrame) -> pl.DataFrame:
    """Cut each reading at the edges of stretches, so that each piece lies in one stretch. Stretch 0 begins at 0 s."""
    width_s = pl.col("width_s")
    first_stretch, last_stretch = ((pl.col(edge) / width_s).floor().cast(pl.Int64) for edge in ("since_s", "until_s"))
    readings = readings.with_columns(stretch=pl.int_ranges(first_stretch, last_stretch + 1)).explode("stretch")
    stretch_start_s, stretch_end_s = pl.col("stretch") * width_s, (pl.col("stretch") + 1) * width_s
    piece_duration_s = pl.min_horizontal("until_s", stretch_end_s) - pl.max_horizontal("since_s", stretch_start_s)
    return readings.with_columns(seconds=piece_duration_s).filter(pl.col("seconds") > 0)


def _combine_pieces(pieces: pl.DataFrame, combination: Combination) -> pl.DataFrame:
    """Combine the pieces of readings into one row for each device and each stretch that the samples of the device cover."""
    weighted_mean = (pl.col("value") * pl.col("seconds")).sum() / pl.col("seconds").sum()
    combined_value = pl.col("value").max() if combination == "max" else weighted_mean
    rows = pieces.group_by("run", "device", "stretch").agg(combined_value, pl.sum("seconds"), pl.first("width_s", "devices"))
    return rows.filter(pl.col("seconds") >= MIN_COVERED_SHARE * pl.col("width_s"))


def _build_curve(stretch_rows: pl.DataFrame) -> Curve:
    stretches: Sequence[int] = stretch_rows["stretch"].to_list()
    value_by_stretch = dict(zip(stretches, stretch_rows["value"].to_list(), strict=True))
    width_s = float(stretch_rows["width_s"][0])
    curve_values = [value_by_stretch.get(stretch) for stretch in range(stretches[0], stretches[-1] + 1)]
    return Curve((stretches[0] + 0.5) * width_s, width_s, curve_values)
