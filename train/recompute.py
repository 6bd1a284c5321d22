"""Activations that are computed again in the backward pass instead of kept (Chen et al. 2016, arXiv:1604.06174).

Owns: which blocks and operations that is, and the replacement of what autograd saves. Knows neither blocks nor their
shapes: it runs functions of tensors. Not torch.utils.checkpoint, which imports the compiler; and no generator's state
is kept, because dropout draws by address (kernels/dropout.py).

A forward pass that runs again saves tensors and has no effect besides: weight gradients, statistics of experts and the
like belong into backward passes, of which each runs once.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from dataclasses import replace
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

from ..conf.schema import MemoryConfig
from ..conf.schema import Recompute as Kind
from ..kernels import Ops

Result = TypeVar("Result")

# Ops whose results and inner tensors `selective` drops: they cost a pass over memory each. A rotation is not among
# them, because its backward pass needs none of its inputs: kept is what attention needs, the turned queries and keys.
ACTIVATIONS = ("swiglu", "geglu", "gelu")
NORMS = ("rmsnorm", "layernorm")


class Recompute:
    """The policy of one model: build its modules with `ops`, and run each block by calling this."""

    def __init__(self, kind: Kind, every: int, ops: Ops) -> None:
        """every: of the layers every n-th is treated so, beginning with layer 0. ops: those without recomputation."""
        self._kind, self._every = kind, every
        self._scope: _Scope | None = None
        self.ops = self._wrapped(ops) if kind is Kind.selective else ops

    @staticmethod
    def of(config: MemoryConfig, ops: Ops) -> Recompute:
        return Recompute(config.recompute, config.recompute_every, ops)

    def __call__(self, layer: int, block: Callable[..., Result], *args: Any) -> Result:
        """block(*args). Gradients reach tensors among `args` themselves, not those inside other objects."""
        if self._kind is Kind.none or layer % self._every or not torch.is_grad_enabled():
            return block(*args)
        if self._kind is Kind.full:
            return _Frame(block, args).run()
        scope = self._scope = _Scope()
        try:
            with saved_tensors_hooks(scope.pack, _Output.restored):
                return block(*args)
        finally:
            self._scope = None
            scope.close()

    def _wrapped(self, ops: Ops) -> Ops:
        changes: dict[str, Any] = {name: self._activation(getattr(ops, name)) for name in ACTIVATIONS}
        changes |= {name: self._norm(getattr(ops, name)) for name in NORMS}
        return replace(ops, **changes)

    def _activation(self, op: Callable[..., Tensor]) -> Callable[..., Tensor]:
        """Keeps the inputs, which are the outputs of matrix products."""

        def run(*args: Any) -> Tensor:
            if self._scope is None:
                return op(*args)
            frame = _Frame(op, args)
            return self._scope.drop(frame.run(), frame)

        return run

    def _norm(self, op: Callable[..., Any]) -> Callable[..., Any]:
        """Keeps what is normalised, which is the residual stream, and its statistics."""

        def run(x: Tensor, *args: Any, residual: Tensor | None = None, **options: Any) -> Any:
            if self._scope is None:
                return op(x, *args, residual=residual, **options)
            found = op(x, *args, residual=residual, **options)
            y, total = (found, x) if residual is None else found
            self._scope.drop(y, _Frame(lambda kept: op(kept, *args, **options), (total,), has_inner=False))
            return found

        return run


class _Slot:
    """Stands for one saved tensor; autograd holds it as long as it would have held the tensor."""

    __slots__ = ("__weakref__", "frame", "value")
    value: Tensor | None

    def __init__(self, frame: _Frame) -> None:
        self.frame, self.value = frame, None

    def get(self) -> Tensor:
        if self.value is None:
            self.frame.run_again()
        assert self.value is not None
        return self.value


class _Frame:
    """A function and its inputs, to be run now without what it saves, and again for that."""

    def __init__(self, function: Callable[..., Any], args: tuple[Any, ...], has_inner: bool = True) -> None:
        """has_inner: whether `run` is used; otherwise only the output is wanted again."""
        self._function, self._has_inner, self._given = function, has_inner, args if has_inner else ()
        self._args = tuple(a.detach().requires_grad_(a.requires_grad) if isinstance(a, Tensor) else a for a in args)
        self._inner: list[weakref.ref[_Slot]] = []
        self._output: weakref.ref[_Slot] | None = None

    def run(self) -> Any:
        """The function's result. Call once."""

        def pack(_: Tensor) -> _Slot:
            slot = _Slot(self)
            self._inner.append(weakref.ref(slot))
            return slot

        args, self._given = self._given, ()
        with saved_tensors_hooks(pack, _Slot.get):
            return self._function(*args)

    def output(self) -> _Slot:
        """Stands for the result, a single tensor."""
        slot = _Slot(self)
        self._output = weakref.ref(slot)
        return slot

    def run_again(self) -> None:
        """Fill the slots that are still wanted."""
        slots = iter(self._inner)

        def pack(tensor: Tensor) -> None:
            slot = next(slots)()
            if slot is not None:
                slot.value = tensor.detach()

        with torch.set_grad_enabled(self._has_inner), saved_tensors_hooks(pack, _never):
            result = self._function(*self._args)
        assert next(slots, None) is None, "run again, a forward pass saved fewer tensors"
        output = self._output() if self._output is not None else None
        if output is not None:
            output.value = result.detach()


class _Scope:
    """A block's forward pass: the outputs in it that are not to be saved, and what stands for them."""

    def __init__(self) -> None:
        # By storage, so that views are recognised; the output is held so that its memory is no one else's meanwhile.
        self._dropped: dict[int, tuple[_Slot, Tensor]] = {}

    def drop(self, output: Tensor, frame: _Frame) -> Tensor:
        """`output`, which the frame can make again."""
        self._dropped[output.untyped_storage()._cdata] = frame.output(), output
        return output

    def close(self) -> None:
        """Let go of the outputs: autograd keeps what it was given to pack with, and so this object."""
        self._dropped.clear()

    def pack(self, tensor: Tensor) -> Tensor | _Output:
        found = self._dropped.get(tensor.untyped_storage()._cdata)
        # Detached: what saves its own result would otherwise hold itself, unless a backward pass comes.
        return tensor.detach() if found is None else _Output(found[0], tensor)


class _Output:
    """A saved view of a dropped output."""

    def __init__(self, slot: _Slot, view: Tensor) -> None:
        self._slot = slot
        self._place = view.shape, view.stride(), view.storage_offset()

    @staticmethod
    def restored(packed: Tensor | _Output) -> Tensor:
        if isinstance(packed, Tensor):
            return packed
        return packed._slot.get().as_strided(*packed._place)


def _never(_: Any) -> Tensor:
    raise AssertionError("the graph of a repeated forward pass has no backward pass")
