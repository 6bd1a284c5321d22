"""The trainer: one process per GPU."""
