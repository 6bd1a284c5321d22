"""The rendezvous store: torch's C++ TCPStore in a process of its own, forked from a zygote.

It must not live in a worker: a worker may die, and the store with it. Keys carry attempt and generation (grid.py).
"""

from __future__ import annotations

import select
from datetime import timedelta
from typing import Any

from torch.distributed import TCPStore

from ..launcher.run.wire import Channel, Closed


def main(spec: dict[str, Any], channel: Channel) -> int:
    """Serve until the agent is gone. `spec`: {"host": address to listen on}. Answers {"kind": "store", "port": n}."""
    store = TCPStore(spec["host"], 0, is_master=True, wait_for_workers=False, timeout=timedelta(seconds=600))
    channel.send({"kind": "store", "port": store.port})
    while True:
        select.select([channel], [], [])
        try:
            channel.receive()
        except Closed:
            return 0
