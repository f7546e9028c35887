"""Callbacks that tell the steps of a training library to shardlab. Each file needs its library; a script imports one."""
