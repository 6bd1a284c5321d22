"""How much arithmetic a token takes, and how much a device can do: what model FLOPs utilisation (MFU) is made of."""

from __future__ import annotations

import torch

from ..conf.schema import ModelConfig
from .params import ParamFacts, ParamTable, Role, head_dim, layer_window

# Dense peaks in TFLOP/s from the makers' data sheets, (bfloat16 tensor cores, float32 without them); never the
# figures with sparsity. The first name that the device's name contains counts, so special models come first.
_PEAKS: tuple[tuple[str, float, float], ...] = (
    ("GB200", 2500.0, 80.0),
    ("B200", 2250.0, 75.0),
    ("GH200", 989.4, 66.9),
    ("H200", 989.4, 66.9),
    ("H100 PCIe", 756.0, 51.2),
    ("H100 NVL", 835.5, 60.0),
    ("H100", 989.4, 66.9),
    ("H800", 989.4, 66.9),
    ("A100", 312.0, 19.5),
    ("A800", 312.0, 19.5),
    ("L40S", 362.0, 91.6),
    ("L4", 121.0, 30.3),
    ("A40", 149.7, 37.4),
    ("A10", 125.0, 31.2),
    ("RTX 4090", 165.2, 82.6),
)


def flops_per_token(config: ModelConfig, table: ParamTable, seq_len: int) -> float:
    """Floating-point operations of forward and backward per token: 6 N + 12 L H E S.

    The formula of PaLM (Chowdhery et al. 2022, arXiv:2204.02311, appendix B). N counts the weights that are multiplied
    with each token: all matrices and the output projection, tied or not, but no embedding look-up and no norms. The
    attention term counts every query with S keys, causal or not; in layers with a sliding window narrower than S that
    replaces S.
    """
    multiplied = (Role.MATRIX, Role.HEAD, Role.ROUTER)
    weights = sum(f.numel * _share(f, config) for f in table if f.role in multiplied or f.tied_to is not None)
    keys = sum(min(seq_len, layer_window(config, layer) or seq_len) for layer in range(config.num_layers))
    return 6.0 * weights + 12.0 * config.num_heads * head_dim(config) * keys


def _share(facts: ParamFacts, config: ModelConfig) -> float:
    """The part of a matrix that a token is multiplied with: of all experts those that it chose."""
    return config.experts_per_token / config.num_experts if facts.shard_axis == "expert" else 1.0


def peak_flops(device: torch.device, dtype: torch.dtype) -> float | None:
    """FLOP/s that one device can reach in a training of `dtype`; None for CPUs, float64 and devices not listed."""
    if device.type != "cuda" or dtype == torch.float64:
        return None
    return peak_of(torch.cuda.get_device_name(device), dtype)


def peak_of(device_name: str, dtype: torch.dtype) -> float | None:
    """As peak_flops, by the name that the driver gives the device."""
    for name, bf16, fp32 in _PEAKS:
        if name in device_name:
            return (fp32 if dtype == torch.float32 else bf16) * 1e12
    return None
