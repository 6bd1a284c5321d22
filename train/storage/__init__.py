"""Where checkpoints lie: parallel and network file systems, node-local disks, object stores."""
