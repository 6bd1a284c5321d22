"""Measuring the ops on a device: each implementation against float64, then its time beside the others' and the device's
own speed. `stoker bench kernels`, and what `auto` chooses by afterwards (measured.py)."""
