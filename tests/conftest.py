from __future__ import annotations

import gc
import os

import pytest
import torch

from tokenyard.launch import preload

pytest_plugins = ["pytester"]

# Without a GPU kernels are interpreted, in the whole process; Triton reads this when it is
# imported. Tests that compile kernels do so in a process of their own.
if (
    os.environ.get("TOKENYARD_TEST_DEVICE", "cpu") in ("cpu", "simulated")
    and not torch.cuda.is_available()
):
    os.environ.setdefault("TRITON_INTERPRET", "1")
    preload("torch._dynamo")  # ranks of many tests come to need it, a second each

# Many ranks on one GPU are a matter of these tests: the kit has ranks of the simulator only.
if os.environ.get("TOKENYARD_TEST_DEVICE") == "virtual":
    from one_gpu import run_on_virtual_ranks
    from tokenyard.testing.decorators import IN_PROCESS

    IN_PROCESS["virtual"] = run_on_virtual_ranks

# Several workers (pytest -n) keep the processors busy already.
if "PYTEST_XDIST_WORKER" in os.environ:
    torch.set_num_threads(1)


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "gpu: needs a GPU")
    config.addinivalue_line(
        "markers", "portable: of each kind of truth a little, for other versions of Python"
    )


@pytest.fixture(scope="module", autouse=True)
def what_is_here_stays() -> None:
    """What is imported, or kept, by now: the garbage collector need not look at it again and again,
    which takes it a tenth of a second each time that a test calls it.
    """
    gc.collect()
    gc.freeze()


LONGEST = (
    "test_low_latency_aot",
    "test_twolevel_aot",
    "test_kernels_aot",
    "test_recover",
    "test_twolevel_simulated",
    "test_recover_simulated",
    "test_low_latency_failures",
    "test_low_latency_simulated",
    "test_collective_kernels",
    "test_nvlink_failures_simulated",
    "test_nvlink_simulated",
    "test_dispatch_combine",
    "test_twolevel_failures",
    "test_megatron",
    "test_compile",
    "test_low_latency",
    "test_machine_code",
    "test_failures",
    "test_twolevel_mutations",
    "test_nvlink_mutations",
    "test_transformers",
    "test_deep_ep_program",
    "test_deep_ep_generations",
    "test_nvlink_bad_input",
    "test_examples",
    "test_relay",
    "test_deep_ep_consumers",
    "test_automodel",
    "test_bench_twolevel",
    "test_demo",
    "test_doctor",
    "test_deep_ep_simulated",
    "test_hosts",
    "test_memory_nvlink",
    "test_bad_input",
    "test_elastic",
    "test_sglang_v2",
    "test_bench",
    "test_gradients",
    "test_torchtitan_v1",
    "test_interrupt",
    "test_collective_aot",
    "test_rail_model",
    "test_simulator_weak",
    "test_protocol_model",
    "test_waits_simulated",
)
"""Files that take more than ten seconds. Ranks of test_recover and test_failures mostly wait: early
and apart, while other workers keep the processors busy.
"""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """The longest files come first: ``make test`` deals whole files, and workers end together."""
    rank = {name: at for at, name in enumerate(LONGEST)}
    items.sort(key=lambda item: rank.get(item.path.stem, len(rank)))
