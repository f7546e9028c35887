"""Checksums of a model's weights, which a training script of the user writes. Needs torch, which is imported when it is used."""
