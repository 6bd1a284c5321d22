"""stoker: Slurm-native training of foundation models.

The repository root is this package (see docs/architecture.md, "Packaging").
Importing it must stay free: no third-party module, no work.
"""

__version__ = "0.1.0"
