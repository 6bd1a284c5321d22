"""Every native implementation in the table has its op's signature, and is chosen where the library is loaded."""

import dataclasses
from pathlib import Path

from stoker.kernels import IMPLEMENTATIONS, reference, select
from stoker.kernels.implementations import NATIVE


def test_every_native_row_loads_and_has_its_ops_signature(emulated: Path) -> None:
    on_cpu = [dataclasses.replace(i, devices=()) if i.name == "native" else i for i in IMPLEMENTATIONS]
    ops = select({"default": "native"}, "cpu", on_cpu)
    assert {c.op for c in ops.choices if c.implementation == "native"} == set(NATIVE)
    for op in NATIVE:
        assert getattr(ops, op) is not getattr(reference, op)
