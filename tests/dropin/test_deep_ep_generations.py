"""Of each generation of DeepEP programs see its names, and no others: by ``run --generation`` and
with the installed package.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest

from deep_ep_program_calls import COMPAT, SOURCES, python, site_of
from nvlink_pool import SOAK
from tokenyard import deep_ep
from tokenyard.deep_ep.generations import GENERATIONS
from tokenyard.version import __version__

PROBES = str(Path(__file__).with_name("deep_ep_probes.py"))
VARIABLE = "TOKENYARD_DEEP_EP_GENERATION"

EVENTS = "EventHandle EventOverlap"
V1 = f"Buffer Config {EVENTS} topk_idx_t"
SIZES = "get_logical_domain_size get_physical_domain_size"
ENVIRONMENT = (
    "check_fast_rdma_atomic_support check_nvlink_connections check_torch_deterministic dist_print "
    "get_global_seed get_local_seed get_nvlink_gbs get_rdma_gbs init_dist init_seed"
)
NCCL = "NCCLCommHandle destroy_all_managed_nccl_comm get_nccl_comm_handle"
ALIGNMENTS = "get_num_allocation_alignment get_num_rdma_alignment get_num_tma_alignment"
COMPILED = "Config EventHandle topk_idx_t"
UTILS = {
    "deep_ep.utils.event": EVENTS,
    "deep_ep.utils.find_pkgs": "find_nccl_root find_pkg_root",
    "deep_ep.utils.gate": "get_scores_by_factor get_unbalanced_scores",
    "deep_ep.utils.math": "align calc_diff ceil_div count_bytes create_grouped_scores hash_tensor "
    "hash_tensors inplace_unique per_token_cast_back per_token_cast_to_fp8 safe_div",
    "deep_ep.utils.refs": "combine dispatch generate_pre_combine_data ordered_accumulate",
    "deep_ep.utils.semantic": "value_or weak_lru",
    "deep_ep.utils.testing": "bench bench_kineto empty_suppress flush_l2_cache parse_num_bytes "
    "suppress_stdout_stderr",
}
PARTS = "envs event find_pkgs gate math refs semantic testing"

MODULES: dict[str, dict[str, str]] = {
    "1": {
        "deep_ep": f"{V1} buffer utils",
        "deep_ep.buffer": "Buffer",
        "deep_ep.utils": EVENTS,
        "deep_ep_cpp": COMPILED,
    },
    "hybrid": {
        "deep_ep": f"{V1} HybridEPBuffer buffer hybrid_ep_buffer utils",
        "deep_ep.buffer": "Buffer",
        "deep_ep.hybrid_ep_buffer": "HybridEPBuffer indices_to_map",
        "deep_ep.utils": EVENTS,
        "deep_ep_cpp": COMPILED,
    },
    "2": {
        "deep_ep": f"{V1} ElasticBuffer EPHandle {SIZES} buffers utils",
        "deep_ep._C": COMPILED,
        "deep_ep.buffers": "elastic legacy",
        "deep_ep.buffers.elastic": "EPHandle ElasticBuffer",
        "deep_ep.buffers.legacy": "Buffer",
        "deep_ep.utils": f"{PARTS} comm",
        "deep_ep.utils.comm": NCCL,
        "deep_ep.utils.envs": f"{ENVIRONMENT} {SIZES}",
        **UTILS,
    },
    "2.5": {
        "deep_ep": f"BucketBuffer BucketSession BufferAllocator BufferBase EPBuffer EPHandle "
        f"EngramBuffer {EVENTS} PPBuffer destroy_all_managed_nccl_comm {SIZES} {ALIGNMENTS} "
        "topk_idx_t buffers comm utils",
        "deep_ep._C": f"EventHandle {ALIGNMENTS} topk_idx_t",
        "deep_ep.buffers": "allocator base bucket engram ep pp",
        "deep_ep.buffers.allocator": "BufferAllocator",
        "deep_ep.buffers.base": "BufferBase",
        "deep_ep.buffers.bucket": "BucketBuffer BucketSession",
        "deep_ep.buffers.engram": "EngramBuffer",
        "deep_ep.buffers.ep": "EPBuffer EPHandle",
        "deep_ep.buffers.pp": "PPBuffer",
        "deep_ep.comm": f"{NCCL} {SIZES} barrier get_comm_stream",
        "deep_ep.utils": PARTS,
        "deep_ep.utils.envs": f"{ENVIRONMENT} {SIZES} get_sm_read_gbs get_sm_write_gbs",
        **UTILS,
    },
}
"""Names as DeepEP has them, written down once more, by module."""

VERSIONS = {"1": "1.2.1", "hybrid": "1.2.1", "2": "2.1.0", "2.5": "2.5.0"}
BELIEVED = {
    "1": {"vllm", "sglang", "megatron", "compiled"},
    "hybrid": {"vllm", "sglang", "megatron", "compiled", "hybridep"},
    "2": {
        "vllm",
        "vllm_v2",
        "sglang",
        "sglang_v2",
        "torchtitan",
        "deepspeed",
        "tests_of_deep_ep",
    },
    "2.5": {"sglang_v2_5", "tests_of_deep_ep"},
}
"""Which backends frameworks offer with each, as with DeepEP's own."""


def check(found: dict[str, Any], generation: str) -> None:
    modules = {name: " ".join(sorted(text.split())) for name, text in MODULES[generation].items()}
    assert {name: " ".join(names) for name, names in found["modules"].items()} == modules
    assert found["version"] == f"{VERSIONS[generation]}+tokenyard.{__version__}"
    assert set(found["believed"]) == BELIEVED[generation] and found["specs"]


def seen(*arguments: str, generation: str, path: list[Path], said: str = "") -> None:
    """Run the probes, with the variable at ``said``."""
    done = python(*arguments, path=path, **{VARIABLE: said})
    assert done.returncode == 0, done.stderr
    check(json.loads(done.stdout), generation)


@pytest.mark.parametrize(
    ("option", "generation"), [((), "1"), (("--generation=2.5",), "2.5")][-SOAK:]
)
def test_run(option: tuple[str, ...], generation: str) -> None:
    """Whatever the variable says. ``test_deep_ep_program.py`` runs one without an option."""
    call = "-m", "tokenyard.deep_ep", "run", *option, PROBES
    seen(*call, generation=generation, path=[SOURCES], said="2")


@pytest.mark.parametrize("generation", ["hybrid", "2"][:SOAK])
def test_path(generation: str) -> None:
    seen(PROBES, generation=generation, path=[GENERATIONS[generation].path, SOURCES], said="2.5")


@pytest.mark.parametrize("generation", ["", "2", "2.5"] if SOAK > 1 else ["", "2"])
def test_installed(generation: str, tmp_path: Path) -> None:
    """By the variable. The file of the compiled module lies there for every generation, so
    ``find_spec`` knows it; importing it fails where there is none.
    """
    code = f"import site; site.addsitedir({str(site_of(tmp_path))!r}); import runpy; "
    code += f"runpy.run_path({PROBES!r}, run_name='__main__')"
    seen("-c", code, generation=generation or "1", path=[SOURCES], said=generation)


def test_a_wrong_value_is_refused_by_name(tmp_path: Path) -> None:
    """Not as an ``ImportError``, which frameworks take for "not installed"."""
    code = f"""
import site
site.addsitedir({str(site_of(tmp_path))!r})
for name in ("deep_ep", "deep_ep_cpp"):
    try:
        __import__(name)
    except ValueError as error:
        print(error)
"""
    done = python("-c", code, path=[SOURCES], **{VARIABLE: "V2"})
    words = f"{VARIABLE} ('V2') must be one of 1, hybrid, 2, 2.5"
    assert done.stdout.splitlines() == [words] * 2, done.stderr


def test_the_package_of_ones_own_code() -> None:
    """``tokenyard.deep_ep`` is generation 1, whatever the variable says."""
    assert deep_ep.__version__ == f"1.2.1+tokenyard.{__version__}"
    assert sorted(deep_ep.__all__) == sorted([*V1.split(), "utils"])


def test_compat_has_no_names_of_its_own() -> None:
    assert {
        str(path.relative_to(COMPAT / "tokenyard_deep_ep"))
        for path in (COMPAT / "tokenyard_deep_ep").rglob("*.py")
    } == {"__init__.py", os.path.join("deep_ep", "__init__.py"), "deep_ep_cpp.py"}


def test_modules_below_claim_no_file() -> None:
    """Where ``inspect`` knew a file of a module called so before, None made it raise."""
    code = """
import inspect, sys, types
earlier = sys.modules["deep_ep.utils"] = types.ModuleType("deep_ep.utils")
earlier.__file__ = inspect.__file__
inspect.getmodule(compile("", "nowhere", "exec"), "nowhere")
del sys.modules["deep_ep.utils"]
import deep_ep
assert "deep_ep.utils" in sys.modules
inspect.getmodule(compile("", "nowhere", "exec"), "nowhere")
"""
    done = python("-c", code, path=[GENERATIONS["2"].path, SOURCES])
    assert done.returncode == 0, done.stderr
