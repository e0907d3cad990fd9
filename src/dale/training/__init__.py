"""Training: state, loop, schedules, averaging, checkpoints."""
