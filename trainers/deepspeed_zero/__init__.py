"""What ZeRO needs to know of DeepSpeed: its configuration, its state, and when it needs which parameter."""
