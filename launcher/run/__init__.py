"""What launcher and trainer agree on: the run directory and its files. Standard library only."""
