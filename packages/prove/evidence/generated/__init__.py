"""From a seed a whole training script, and it is right: N ranks compute what one process would."""
