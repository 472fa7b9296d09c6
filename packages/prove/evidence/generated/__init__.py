"""Generate right training scripts from seeds: N ranks compute what one process would."""
