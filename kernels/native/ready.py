"""Whether native kernels can be used on a device, and having them built where they are wanted for the first time.

Owns: the words that say why not and what to do. Loading an object is library.py's.
"""

from __future__ import annotations

import ctypes
import re
from collections.abc import Callable, Sequence

from . import library
from .build import BuildError, Target, build
from .cache import Built, built_in, find, places
from .toolchain import WAYS, NoCompilerError, find_toolchain


def lacks(capability: int | None = None) -> str | None:
    """Why there are no native kernels for a device, as a clause for people; None: they are loaded now.

    capability: compute capability times ten; None: any object will do.
    """
    if library.loaded() is not None:
        return None
    reasons = []
    for built in find(capability):
        old = _too_old_a_driver(built)
        if old is not None:
            reasons.append(f"{built.library} {old}")
            continue
        if not built.is_intact():
            reasons.append(f"{built.library} is damaged: `stoker kernels build` replaces it")
            continue
        try:
            library.load(built.library)
        except (OSError, RuntimeError) as e:
            reasons.append(f"{built.library} cannot be loaded: {str(e).strip().splitlines()[0]}")
        else:
            return None
    if not reasons:
        reasons.append(_unbuilt(capability))
    return f"{'; '.join(reasons)}; what helps: {WAYS}"


def _too_old_a_driver(built: Built) -> str | None:
    """Machine code of one major version of CUDA needs a driver of that version; minor ones do not matter."""
    nvcc = re.search(r"release (\d+)\.", built.compiler)
    has = driver_version()
    if not has or nvcc is None or int(nvcc[1]) <= has:
        return None
    return f"is of nvcc {nvcc[1]}, this driver is of CUDA {has}: build with a toolkit of {has}.x"


def driver_version() -> int:
    """Major version of CUDA that the driver is of, 0 without one. By the driver's own library: not every torch says."""
    version = ctypes.c_int(0)
    try:
        ctypes.CDLL("libcuda.so.1").cuDriverGetVersion(ctypes.byref(version))
    except (OSError, AttributeError):
        return 0
    return version.value // 1000


def _unbuilt(capability: int | None) -> str:
    where = " or ".join(str(place) for place in places())
    others = [b for place in places() for b in built_in(place) if not b.emulated]
    wanted = "" if capability is None else f" for sm_{capability}"
    if not others:
        return f"not built: nothing in {where}"
    if capability is not None and find():
        return f"not built{wanted}: {_described(find()[0])} in {where}"
    return f"not built of these sources{wanted}: what lies in {where} is of others"


def _described(built: Built) -> str:
    return f"only for {', '.join(f'sm_{a}' for a in built.architectures)}"


def name(capability: int | None = None) -> str:
    """Of the object that is loaded, else of the one that would be: its hash. Empty without one."""
    path = library.loaded()
    if path is not None:
        return path.parent.name
    found = find(capability)
    return found[0].name if found else ""


def build_if_missing(
    capability: int, architectures: Sequence[int] = (), say: Callable[[str], None] = lambda _: None
) -> str | None:
    """Build for a device unless there is an object for it. Why that failed, as a clause; None: it is there, or there is
    no compiler, of which `lacks` speaks.

    architectures: what to build for; empty: the device.
    """
    if any(built.is_intact() for built in find(capability)):
        return None
    try:
        wanted = tuple(architectures) or (_nearest(capability, find_toolchain().known()),)
        build(Target(wanted), say=say)
    except NoCompilerError:
        return None
    except (BuildError, ValueError, OSError) as e:
        return f"the kernels could not be built: {e}"
    return None


def _nearest(capability: int, known: Sequence[int]) -> int:
    """The device's own architecture, or the newest before it: its PTX serves as well."""
    return max((a for a in known if a <= capability), default=capability)
