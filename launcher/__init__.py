"""Gets a run onto Slurm and keeps it alive there. Never imports torch."""
