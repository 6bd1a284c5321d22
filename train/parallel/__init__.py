"""What makes one model run on many ranks: one file per parallel dimension."""
