"""The parts of ZeRO that depend on DeepSpeed: engine, configuration, state, and the order in which a pass needs parameters."""
