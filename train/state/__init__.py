"""State: snapshots in memory segments, and checkpoints, which are snapshots made durable."""
