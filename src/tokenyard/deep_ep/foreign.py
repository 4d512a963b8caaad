"""Arguments that DeepEP's forks and older versions have: taken where they change nothing, refused
by name where they do.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from tokenyard.deep_ep.values import flag
from tokenyard.errors import NotSupported

CONSTRUCTOR: dict[str, str] = {
    "allow_nvlink_for_normal_mode": "",
    "num_nvl_peers": "",
    "use_default_stream_as_comm_stream": "",
}
LOW_LATENCY_DISPATCH = {
    "use_nvfp4": "NVFP4 rows: use_fp8 or BF16",
    "x_global_scale": "",
    "topk_weights": "",
}
LOW_LATENCY_COMBINE = {
    "overlap": "a combine that starts while the experts still compute: leave it out and combine "
    "afterwards",
    "packed_recv_count": "",
    "comp_signal": "",
    "block_m": "",
    "threshold": "",
    "num_sms": "",
    "src_signals": "",
    "src_signal_expect_value": "",
}
"""Name by what it would switch on; empty: means nothing by itself."""


def check_fork(call: str, given: Mapping[str, Any], known: Mapping[str, str]) -> None:
    """Look at the arguments of ``call`` that DeepEP itself does not have.

    Raises:
        TypeError: nobody has such an argument.
        NotSupported: it switches on something that is missing here.
        ValueError: it is no True or False.
    """
    for name, value in given.items():
        if name not in known:
            raise TypeError(f"{call}() got an unexpected keyword argument {name!r}")
        if known[name] and flag(name, value):
            raise NotSupported(f"{call}({name}={value!r}) asks for {known[name]}")
