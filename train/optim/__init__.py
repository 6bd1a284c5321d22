"""Optimizers: what is kept beside the weights, and the update of this rank's shards."""
