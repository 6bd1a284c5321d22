"""Fused operations: one op = one signature, a reference, and faster implementations chosen once."""
