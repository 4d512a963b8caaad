"""What programs see that import ``deep_ep``: the modules and names of one generation and no others,
as frameworks ask for names to see what they can use."""

from __future__ import annotations

import os
import sys
from dataclasses import dataclass
from importlib import import_module
from importlib.machinery import ModuleSpec
from importlib.util import module_from_spec
from pathlib import Path
from types import ModuleType

from tokenyard.version import __version__ as _version

VARIABLE = "TOKENYARD_DEEP_EP_GENERATION"
"""Says which generation the installed package ``tokenyard-deep-ep`` is."""

Modules = dict[str, dict[str, str]]
"""Of each module: names, by the module of ``tokenyard.deep_ep`` that has them."""

_EVENTS = {"events": "EventHandle EventOverlap"}
_V1 = {"buffer": "Buffer", "runtime": "Config", **_EVENTS, "": "topk_idx_t"}
_COMPILED = {"runtime": "Config", "events": "EventHandle", "": "topk_idx_t"}
_ONE: Modules = {
    "deep_ep": _V1,
    "deep_ep.buffer": {"buffer": "Buffer"},
    "deep_ep.utils": _EVENTS,
    "deep_ep_cpp": _COMPILED,
}
_HYBRID: Modules = {
    **_ONE,
    "deep_ep": _V1 | {"hybrid": "HybridEPBuffer"},
    "deep_ep.hybrid_ep_buffer": {"hybrid": "HybridEPBuffer", "hybrid_routing": "indices_to_map"},
}

_SIZES = "get_logical_domain_size get_physical_domain_size"
_ENVIRONMENT = (
    "init_seed get_local_seed get_global_seed dist_print init_dist check_nvlink_connections "
    "check_torch_deterministic get_nvlink_gbs check_fast_rdma_atomic_support get_rdma_gbs"
)
_HELPERS: Modules = {
    "deep_ep.utils": {},
    "deep_ep.utils.envs": {"helpers.environment": _ENVIRONMENT, "helpers.communication": _SIZES},
    "deep_ep.utils.event": _EVENTS,
    "deep_ep.utils.find_pkgs": {"helpers.missing": "find_pkg_root find_nccl_root"},
    "deep_ep.utils.gate": {"helpers.arithmetic": "get_unbalanced_scores get_scores_by_factor"},
    "deep_ep.utils.math": {
        "helpers.arithmetic": "align calc_diff ceil_div count_bytes create_grouped_scores "
        "hash_tensor hash_tensors inplace_unique per_token_cast_back per_token_cast_to_fp8 safe_div"
    },
    "deep_ep.utils.refs": {
        "helpers.plain_exchange": "combine dispatch generate_pre_combine_data ordered_accumulate"
    },
    "deep_ep.utils.semantic": {"helpers.arithmetic": "value_or weak_lru"},
    "deep_ep.utils.testing": {
        "helpers.benchmarking": "bench bench_kineto empty_suppress flush_l2_cache parse_num_bytes "
        "suppress_stdout_stderr"
    },
}
_NCCL = "NCCLCommHandle destroy_all_managed_nccl_comm get_nccl_comm_handle"
_TWO: Modules = {
    "deep_ep": _V1 | {"elastic": "ElasticBuffer EPHandle", "helpers.communication": _SIZES},
    "deep_ep._C": _COMPILED,
    "deep_ep.buffers": {},
    "deep_ep.buffers.elastic": {"elastic": "ElasticBuffer EPHandle"},
    "deep_ep.buffers.legacy": {"buffer": "Buffer"},
    **_HELPERS,
    "deep_ep.utils.comm": {"helpers.missing": _NCCL},
}

_ALIGNMENTS = "get_num_allocation_alignment get_num_rdma_alignment get_num_tma_alignment"
_TWO_AND_A_HALF: Modules = {
    "deep_ep": {
        "ep_buffer": "BufferBase EPBuffer EPHandle",
        "load_balance": f"BufferAllocator {_ALIGNMENTS}",
        "helpers.missing": "BucketBuffer BucketSession EngramBuffer PPBuffer "
        "destroy_all_managed_nccl_comm",
        "helpers.communication": _SIZES,
        **_EVENTS,
        "": "topk_idx_t",
    },
    "deep_ep._C": {"load_balance": _ALIGNMENTS, "events": "EventHandle", "": "topk_idx_t"},
    "deep_ep.buffers": {},
    "deep_ep.buffers.allocator": {"load_balance": "BufferAllocator"},
    "deep_ep.buffers.base": {"ep_buffer": "BufferBase"},
    "deep_ep.buffers.bucket": {"helpers.missing": "BucketBuffer BucketSession"},
    "deep_ep.buffers.engram": {"helpers.missing": "EngramBuffer"},
    "deep_ep.buffers.ep": {"ep_buffer": "EPBuffer EPHandle"},
    "deep_ep.buffers.pp": {"helpers.missing": "PPBuffer"},
    "deep_ep.comm": {
        "helpers.communication": f"barrier get_comm_stream {_SIZES}",
        "helpers.missing": _NCCL,
    },
    **_HELPERS,
    "deep_ep.utils.envs": {
        "helpers.environment": f"{_ENVIRONMENT} get_sm_read_gbs get_sm_write_gbs",
        "helpers.communication": _SIZES,
    },
}


@dataclass(frozen=True)
class Generation:
    """The ``folder`` of its shim, the version of DeepEP ``released`` with it, its ``modules``."""

    folder: str
    released: str
    modules: Modules

    @property
    def version(self) -> str:
        return f"{self.released}+tokenyard.{_version}"

    @property
    def path(self) -> Path:
        """The directory to put on ``PYTHONPATH``."""
        return Path(__file__).parent / "shim" / self.folder


GENERATIONS = {
    "1": Generation("v1", "1.2.1", _ONE),
    "hybrid": Generation("hybrid", "1.2.1", _HYBRID),
    "2": Generation("v2", "2.1.0", _TWO),
    "2.5": Generation("v2_5", "2.5.0", _TWO_AND_A_HALF),
}
"""By what users call it. ``hybrid`` is DeepEP's branch hybrid-ep: V1 and ``HybridEPBuffer``."""


def known(name: str, what: str = "--generation") -> Generation:
    """The generation called ``name``. ValueError: there is none; ``what`` said so."""
    if name not in GENERATIONS:
        raise ValueError(f"{what} ({name!r}) must be one of {', '.join(GENERATIONS)}")
    return GENERATIONS[name]


def present(module: str, generation: str | None = None) -> None:
    """Fill ``module`` (``deep_ep`` or ``deep_ep_cpp``), which is being imported, and those below
    it. ``generation``: its name; default: what the environment variable says, else 1. ValueError:
    there is no such. ModuleNotFoundError: it has no such module."""
    named = os.environ.get(VARIABLE, "") or "1"
    shown = known(named, VARIABLE) if generation is None else known(generation)
    if module not in shown.modules:
        raise ModuleNotFoundError(
            f"No module named {module!r} in this generation of DeepEP ({VARIABLE})", name=module
        )
    made = {
        name: sys.modules[name] if name == module else _made(name, shown.modules)
        for name in sorted(shown.modules)
        if name == module or name.startswith(f"{module}.")
    }
    for name, each in made.items():
        for source, names in shown.modules[name].items():
            origin = import_module(f"tokenyard.deep_ep.{source}".rstrip("."))
            for public in names.split():
                setattr(each, public, getattr(origin, public))
    for name, each in made.items():
        parent, _, child = name.rpartition(".")
        if name != module:
            setattr(made[parent], child, each)
            sys.modules[name] = each
    made[module].__version__ = shown.version  # pyright: ignore[reportAttributeAccessIssue]


def _made(name: str, modules: Modules) -> ModuleType:
    """A module without names; a package if others lie in it."""
    package = any(other.startswith(f"{name}.") for other in modules)
    made = module_from_spec(ModuleSpec(name, None, is_package=package))
    # None would do, but not where inspect remembers a file of an earlier module of this name
    vars(made).pop("__file__", None)
    return made
