"""What the tests of RMSNorm and LayerNorm share: shapes, tolerances, how close results are."""

import torch

EPS = 1e-5
# In units of the largest value: half precision rounds results once, float32 sums up to 4,096 terms.
TOLERANCE = {torch.float32: 2e-6, torch.bfloat16: 4.0e-3, torch.float16: 5e-4}
SHAPES = [
    (3, 5, 64),  # rows side by side in a warp
    (2, 1000),  # ragged: threads with one pack more than others
    (7, 33),  # rows that no pack of 16 bytes fits
    (2, 2, 3, 96),  # lanes without a pack
    (1, 1),
    (16,),
]


def assert_close(found, wanted, dtype):
    for ours, exact in zip(found, wanted, strict=True):
        scale = exact.abs().max().clamp(min=1).item() if exact.numel() else 1.0
        torch.testing.assert_close(ours.double(), exact, rtol=TOLERANCE[dtype], atol=TOLERANCE[dtype] * scale)
