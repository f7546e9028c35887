"""The workloads: model, data, unit of work and loss. Each file is a family and lists its variants in `VARIANTS`."""
