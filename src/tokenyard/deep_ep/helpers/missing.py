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


def _missing(name: str, remedy: str) -> Callable[..., NoReturn]:
    def call(*_: Any, **__: Any) -> NoReturn:
        raise NotSupported(f"{name}() is not part of tokenyard: {remedy}")

    call.__name__ = call.__qualname__ = name
    call.__doc__ = "Not supported."
    return call


get_nccl_comm_handle = _missing(
    "get_nccl_comm_handle", "engines talk through the torch.distributed group, which you have"
)
find_pkg_root = _missing("find_pkg_root", "nothing is compiled against a package")
find_nccl_root = _missing("find_nccl_root", "nothing is compiled against NCCL")


def destroy_all_managed_nccl_comm() -> None:
    """Nothing: no communicator is made here that could be left over."""
