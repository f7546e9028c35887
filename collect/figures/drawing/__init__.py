"""Parts that several figures share: lines of cells, stacked bars, curves of telemetry, and panels."""
