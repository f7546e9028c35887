"""Checksums of a model's weights, which a training script of the user writes. This folder needs torch."""
