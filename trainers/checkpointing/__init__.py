"""How a run saves and loads checkpoints: the state of an engine as named parts, and the files to which the parts are written.

Whether a checkpoint is complete or damaged is decided in `shardlab/runs/checkpoint.py`, without torch.
"""
