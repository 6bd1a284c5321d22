"""What a choice of implementations has to know of a device. Asks CUDA only when it is told to (`Device.of`)."""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class Device:
    """type: torch's (cpu, cuda), or rocm for AMD's, which torch calls cuda too. capability: compute capability times
    ten (90 for 9.0), None where it is not known. name: the maker's."""

    type: str
    capability: int | None = None
    name: str = ""

    @classmethod
    def of(cls, device: torch.device) -> Device:
        """Of a device that is there; starts CUDA if it is one of CUDA's."""
        if device.type != "cuda":
            return cls(device.type)
        name = torch.cuda.get_device_name(device)
        if torch.version.hip is not None:
            return cls("rocm", None, name)
        major, minor = torch.cuda.get_device_capability(device)
        return cls("cuda", 10 * major + minor, name)

    def __str__(self) -> str:
        return f"{self.name or self.type}" + (f" (sm_{self.capability})" if self.capability else "")
