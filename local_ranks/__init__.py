"""Starts ranks on this machine, for chapters, tests, benchmarks and notebooks; no train.py does."""
