"""Which of torch's transforms a call is in: forward-mode AD, ``torch.func``, ``torch.vmap``."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad

from tokenyard.dense import is_wrapper
from tokenyard.errors import NotSupported

NO_VMAP = (
    "dispatch and combine cannot be batched by torch.vmap, nor by what uses it (torch.func.jacrev, "
    "jacfwd and hessian, is_grads_batched=True): each is one collective call. Loop over the batch, "
    "or make it tokens with x.flatten(0, 1)"
)
NO_TRACE = (
    "dispatch and combine cannot be traced by torch.func.linearize or functionalize, as sizes "
    "depend on what comes: call torch.func.jvp for each tangent"
)
_FUNCTORCH: Any = torch._C._functorch  # pyright: ignore


def in_functorch() -> bool:
    """Whether a transform of ``torch.func`` is active."""
    return torch._C._are_functorch_transforms_active()  # pyright: ignore


def outside_functorch() -> Any:
    """A context outside transforms of ``torch.func``, to write buffers that are kept."""
    if torch.compiler.is_compiling() or not in_functorch():
        return nullcontext()
    return torch._C._DisableFuncTorch()  # pyright: ignore


def _is_in(transform: Any) -> bool:
    """Whether a transform of ``torch.func`` of this type is active at any depth."""
    stack: list[Any] = _FUNCTORCH.get_interpreter_stack() if in_functorch() else []
    return any(each.key() == transform for each in stack)


def in_vmap(*tensors: Tensor) -> bool:
    """Whether ``torch.vmap`` is active, or ``is_grads_batched`` for ``tensors``."""
    batched = any(_FUNCTORCH.is_legacy_batchedtensor(tensor) for tensor in tensors)
    return batched or _is_in(_FUNCTORCH.TransformType.Vmap)


def in_trace() -> bool:
    """Whether a transform of ``torch.func`` that traces is active."""
    if _is_in(_FUNCTORCH.TransformType.Functionalize):
        return True
    return torch._C._get_dispatch_mode(torch._C._TorchDispatchModeKey.PROXY) is not None  # pyright: ignore


def forward_level() -> int:
    """The level of forward-mode AD that was entered, -1 for none."""
    return forward_ad._current_level  # pyright: ignore


def in_forward_mode() -> bool:
    """Whether tangents are followed: inside ``forward_ad.dual_level()`` or ``torch.func.jvp``."""
    return forward_ad._current_level >= 0 and torch._C._is_fwd_grad_enabled()  # pyright: ignore


def has_tangent(*tensors: Any) -> bool:
    """Whether any of these has a tangent, or may have one (under ``torch.func.jvp``)."""
    if torch.compiler.is_compiling() or not in_forward_mode():
        return False
    return any(
        _FUNCTORCH.is_functorch_wrapped_tensor(tensor)
        or forward_ad.unpack_dual(tensor).tangent is not None
        for tensor in tensors
        if isinstance(tensor, Tensor)
    )


def is_followed(*tensors: Any) -> bool:
    """Whether a derivative by any of these is wanted, backward or forward."""
    if torch.is_grad_enabled() and any(
        isinstance(tensor, Tensor) and tensor.requires_grad for tensor in tensors
    ):
        return True
    return has_tangent(*tensors)


def check(later: bool) -> None:
    """Raise where calls cannot be made. ``later``: the call is to be waited for later."""
    if torch.compiler.is_compiling() or not (in_functorch() or in_forward_mode()):
        return
    if in_vmap():
        raise NotSupported(NO_VMAP)
    if in_trace():
        raise NotSupported(NO_TRACE)
    if later and in_functorch():
        raise NotSupported(
            "async_op and return_hook do not work under transforms of torch.func: leave them out "
            "there, or use backward() and "
            "torch.autograd.forward_ad, which take calls that are waited for later"
        )


def check_tangents(given: tuple[Any, ...], lack: str) -> None:
    """Raise if one has a tangent, which the call would drop. ``lack``: why, what to do."""
    if has_tangent(*given):
        raise NotSupported(f"a tensor of this call has a tangent (forward-mode AD), but {lack}")


def is_tracked(*tensors: Tensor | None) -> bool:
    """Whether autograd, a compiler or a transform must see a call."""
    if torch.compiler.is_compiling():
        return True
    grad = torch.is_grad_enabled()
    for tensor in tensors:  # a generator would cost a frame for each
        if tensor is not None and type(tensor) is not Tensor and is_wrapper(tensor):
            return True
        if grad and tensor is not None and tensor.requires_grad:
            return True
    return in_functorch() or in_forward_mode()


def by_operator(x: Tensor) -> bool:
    """Whether a call that is tracked is an operator to whoever tracks it."""
    if torch.compiler.is_compiling():
        return True
    if in_functorch() or in_forward_mode():
        return False
    return is_wrapper(x) or torch._C._len_torch_dispatch_stack() > 0  # pyright: ignore


def detached(value: Any) -> Any:
    if isinstance(value, tuple):
        return tuple(detached(part) for part in value)  # pyright: ignore[reportUnknownVariableType]
    return value.detach() if isinstance(value, Tensor) else value
