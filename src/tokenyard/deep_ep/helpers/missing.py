"""What has no counterpart here: the names are there, using them says so."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NoReturn

from tokenyard.errors import NotSupported


def missing_call(name: str, why: str) -> Callable[..., NoReturn]:
    """A function of DeepEP that has no counterpart here."""

    def call(*_: Any, **__: Any) -> NoReturn:
        raise NotSupported(f"{name}() is {why}")

    call.__name__ = call.__qualname__ = name.rpartition(".")[2]
    call.__doc__ = f"Not supported: {why}."
    return call


def _missing_class(name: str, what: str, remedy: str = "torch.distributed") -> Any:
    def fail(self: Any, *_: Any, **__: Any) -> None:
        raise NotSupported(f"{name} is not part of tokenyard: use {remedy}")

    return type(name, (), {"__init__": fail, "__doc__": f"({what}) Not supported."})


EngramBuffer = _missing_class(
    "EngramBuffer", "remote tables of embeddings", "DeepEP's own, side by side under another name"
)
PPBuffer = _missing_class(
    "PPBuffer", "send and receive of pipeline stages", "torch.distributed.isend() and irecv()"
)
BucketBuffer = _missing_class("BucketBuffer", "batched all-gather, reduce-scatter and all-reduce")
BucketSession = _missing_class("BucketSession", "of a BucketBuffer")
NCCLCommHandle = _missing_class(
    "NCCLCommHandle", "a raw NCCL communicator", "the torch.distributed group"
)

get_nccl_comm_handle = missing_call(
    "get_nccl_comm_handle",
    "not part of tokenyard: engines talk through the torch.distributed group, which you have",
)
_COMPILED = "not part of tokenyard: nothing is compiled against"
find_pkg_root = missing_call("find_pkg_root", f"{_COMPILED} a package")
find_nccl_root = missing_call("find_nccl_root", f"{_COMPILED} NCCL")


def destroy_all_managed_nccl_comm() -> None:
    """Nothing: no communicator is made here that could be left over."""
