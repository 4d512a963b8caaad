"""What has no counterpart here: the names are there, using them says so."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NoReturn

from tokenyard.errors import NotSupported


class _Missing:
    remedy = "torch.distributed"

    def __init__(self, *_: Any, **__: Any) -> None:
        raise NotSupported(f"{type(self).__name__} is not part of tokenyard: use {self.remedy}")


class EngramBuffer(_Missing):
    """(remote tables of embeddings) Not supported."""

    remedy = "DeepEP's own, side by side under another name"


class PPBuffer(_Missing):
    """(send and receive of pipeline stages) Not supported."""

    remedy = "torch.distributed.isend() and irecv()"


class BucketBuffer(_Missing):
    """(batched all-gather, reduce-scatter and all-reduce) Not supported."""


class BucketSession(_Missing):
    """(of a :class:`BucketBuffer`) Not supported."""


class NCCLCommHandle(_Missing):
    """(a raw NCCL communicator) Not supported."""

    remedy = "the torch.distributed group"


def missing_call(name: str, why: str) -> Callable[..., NoReturn]:
    """A function of DeepEP that has no counterpart here."""

    def call(*_: Any, **__: Any) -> NoReturn:
        raise NotSupported(f"{name}() is {why}")

    call.__name__ = call.__qualname__ = name.rpartition(".")[2]
    call.__doc__ = f"Not supported: {why}."
    return call


get_nccl_comm_handle = missing_call(
    "get_nccl_comm_handle",
    "not part of tokenyard: engines talk through the torch.distributed group, which you have",
)
find_pkg_root, find_nccl_root = (
    missing_call(f"find_{what}_root", f"not part of tokenyard: nothing is compiled against {it}")
    for what, it in (("pkg", "a package"), ("nccl", "NCCL"))
)


def destroy_all_managed_nccl_comm() -> None:
    """Nothing: no communicator is made here that could be left over."""
