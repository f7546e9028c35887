"""Parts that several figures share: lines through cells, stacked bars, curves of telemetry, and panels."""
