"""A private, real, multi-node Slurm on this machine, and the drills that break runs on it."""
