"""The properties of a machine: its processors, its GPUs and what their data sheets promise."""
