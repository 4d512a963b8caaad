"""What a program sees of ``deep_ep``, as JSON: modules, their public names, and what frameworks
that ask for names come to believe, in their own words.
"""

import contextlib
import importlib
import importlib.util
import json
import sys


def vllm():
    assert importlib.util.find_spec("deep_ep") is not None
    from deep_ep import Buffer  # noqa: F401


def vllm_v2():
    assert importlib.util.find_spec("deep_ep") is not None
    assert hasattr(importlib.import_module("deep_ep"), "ElasticBuffer")


def sglang():
    from deep_ep import Buffer, Config  # noqa: F401


def sglang_v2():
    from deep_ep import ElasticBuffer  # noqa: F401


def sglang_v2_5():
    from deep_ep import BufferAllocator, EPBuffer, get_num_tma_alignment  # noqa: F401
    from deep_ep.utils.envs import get_physical_domain_size  # noqa: F401


def megatron():
    from deep_ep import Buffer  # noqa: F401
    from deep_ep.utils import EventHandle, EventOverlap  # noqa: F401


def hybridep():
    """Megatron-core, torchtitan, NeMo Automodel, SGLang."""
    from deep_ep import HybridEPBuffer  # noqa: F401


def torchtitan():
    from deep_ep import ElasticBuffer, EPHandle  # noqa: F401


def deepspeed():
    import deep_ep

    assert deep_ep.ElasticBuffer and deep_ep.EventOverlap


def tests_of_deep_ep():
    import deep_ep
    from deep_ep.utils.envs import dist_print, init_dist, init_seed  # noqa: F401
    from deep_ep.utils.gate import get_unbalanced_scores  # noqa: F401
    from deep_ep.utils.math import align, per_token_cast_to_fp8  # noqa: F401
    from deep_ep.utils.refs import combine, dispatch, ordered_accumulate  # noqa: F401
    from deep_ep.utils.testing import bench, bench_kineto  # noqa: F401

    assert deep_ep.topk_idx_t


def compiled():
    assert importlib.util.find_spec("deep_ep_cpp") is not None
    from deep_ep_cpp import Config, EventHandle, topk_idx_t  # noqa: F401


PROBES = (
    vllm,
    vllm_v2,
    sglang,
    sglang_v2,
    sglang_v2_5,
    megatron,
    hybridep,
    torchtitan,
    deepspeed,
    tests_of_deep_ep,
    compiled,
)


def main():
    deep_ep = importlib.import_module("deep_ep")
    believed = []
    for probe in PROBES:
        with contextlib.suppress(ImportError, AttributeError, AssertionError):
            probe()
            believed.append(probe.__name__)
    modules = sorted(name for name in sys.modules if name.split(".")[0].startswith("deep_ep"))
    modules.remove(__name__) if __name__ in modules else None
    public = {
        name: sorted(each for each in vars(sys.modules[name]) if not each.startswith("_"))
        for name in modules
    }
    specs = all(importlib.util.find_spec(name) is not None for name in modules)
    missing = ("deep_ep.nothing", "deep_ep.utils.nothing", "deep_ep.buffers.nothing")
    for name in missing:
        with contextlib.suppress(ModuleNotFoundError):
            importlib.import_module(name)
            specs = False
    facts = {"version": deep_ep.__version__, "specs": specs, "believed": believed}
    print(json.dumps({**facts, "modules": public}))


if __name__ == "__main__":
    main()
