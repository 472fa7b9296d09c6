"""Starts ranks on this machine, for chapters, tests, benchmarks and notebooks.

On them run functions (ranks.py) and the stages (train_stage.py), and one process repeats what a
stage claims to do (oracle.py).
"""
