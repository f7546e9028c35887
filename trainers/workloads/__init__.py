"""The workloads on the menu: model, data, unit of work and loss. Each file has one family, with its variants in `VARIANTS`."""
