"""The engine without a pipeline."""

from __future__ import annotations

from typing import Any, cast

import pytest
import torch
from stoker.train.comm import PeerLostError
from stoker.train.engine import Accumulation
from stoker.train.grid import single
from stoker.train.linear import WeightGradients
from stoker.train.metrics import Clock
from stoker.train.model import Decoder
from stoker.train.pulse import Pulse


@pytest.mark.parametrize("passes", ["training", "evaluation"])
def test_a_collective_that_fails_within_a_compiled_graph_is_a_lost_peer(passes: str) -> None:
    def model(*_: Any) -> Any:
        raise RuntimeError("[../third_party/gloo/gloo/transport/tcp/pair.cc:534] Connection closed by peer")

    engine = Accumulation(cast(Decoder, model), WeightGradients(), single(), Pulse(None, 1), Clock())
    batch: Any = torch.zeros(1)
    run = {
        "training": lambda: engine.forward_backward(lambda: batch, 1, 1.0, None),
        "evaluation": lambda: engine.evaluate([batch]),
    }
    with pytest.raises(PeerLostError, match="Connection closed by peer"):
        run[passes]()
