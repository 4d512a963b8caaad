"""Two "hosts" on one machine: network namespaces with a virtual cable between them, and ranks
inside. Needs Linux and root (or user namespaces), ``ip``, ``unshare`` and ``nsenter``. Run by
``test_hosts.py``; each rank writes what it found to ``FOLDER/RANK.json``.

    python two_hosts.py FOLDER            make the hosts and run the ranks
        (exit code 77 and a reason if hosts cannot be made)
    python two_hosts.py FOLDER HOST       be a host's ranks
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from multiprocessing import get_context
from pathlib import Path

NO_HOSTS = 77
HOSTS, RANKS_EACH = 2, 2
WORLD_SIZE = HOSTS * RANKS_EACH
CABLE, PORT, TIMEOUT = "cable", 29417, 75.0
BATCHES, TOKENS, HIDDEN, TOPK, EXPERTS = 3, 400, 512, 6, 16


class NoHosts(Exception):
    """Why this machine cannot make them."""


def address(host: int) -> str:
    return f"10.77.0.{host + 1}"


def inside(holder: subprocess.Popen[str]) -> list[str]:
    return ["nsenter", "--net", "--target", str(holder.pid)]


def must(command: list[str]) -> None:
    done = subprocess.run(command, capture_output=True, text=True, timeout=TIMEOUT, check=False)
    if done.returncode:
        raise NoHosts(f"{' '.join(command)}: {done.stderr.strip()}")


@contextmanager
def hosts() -> Iterator[list[subprocess.Popen[str]]]:
    """A process in a network namespace of its own per host, connected; the namespaces go when they
    do.
    """
    if missing := [tool for tool in ("unshare", "nsenter", "ip") if shutil.which(tool) is None]:
        raise NoHosts(f"{', '.join(missing)} not installed")
    # A holder says "ready" when it is inside, and ends when its input does.
    holders = [
        subprocess.Popen(
            ["unshare", "--net", "sh", "-c", "echo ready; exec cat"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for _ in range(HOSTS)
    ]
    try:
        for holder in holders:
            assert holder.stdout is not None and holder.stderr is not None
            if holder.stdout.readline() != "ready\n":
                raise NoHosts(f"unshare --net: {holder.stderr.read().strip()}")
        first, second = holders
        end = ["type", "veth", "peer", "name", CABLE, "netns", str(second.pid)]
        must([*inside(first), "ip", "link", "add", CABLE, *end])
        for host, holder in enumerate(holders):
            must([*inside(holder), "ip", "address", "add", f"{address(host)}/24", "dev", CABLE])
            for device in ("lo", CABLE):
                must([*inside(holder), "ip", "link", "set", device, "up"])
        yield holders
    finally:
        for holder in holders:
            holder.kill()
            holder.communicate()


def run_ranks(holders: list[subprocess.Popen[str]], folder: str) -> int:
    environment = {**os.environ, "GLOO_SOCKET_IFNAME": CABLE, "OMP_NUM_THREADS": "1"}
    environment.pop("TOKENYARD_HOST", None)
    all_ranks = [
        subprocess.Popen(
            [*inside(holder), sys.executable, __file__, folder, str(host)], env=environment
        )
        for host, holder in enumerate(holders)
    ]
    try:
        return int(any(ranks.wait(7 * TIMEOUT) for ranks in all_ranks))
    finally:
        for ranks in all_ranks:
            ranks.kill()


def main(folder: str) -> int:
    try:
        if os.geteuid():  # as root of a user namespace, where that is allowed
            root = ["unshare", "--user", "--map-root-user"]
            if shutil.which(root[0]) is None:
                raise NoHosts("unshare not installed")
            must([*root, sys.executable, "-c", ""])
            return subprocess.run(
                [*root, sys.executable, __file__, folder], timeout=8 * TIMEOUT, check=False
            ).returncode
        with hosts() as holders:
            return run_ranks(holders, folder)
    except NoHosts as reason:
        print(reason, file=sys.stderr)
        return NO_HOSTS


# A rank


def cable_bytes() -> tuple[int, int]:
    """Bytes that the kernel says came and went over the cable."""
    line = next(
        line for line in Path("/proc/self/net/dev").read_text().splitlines() if f"{CABLE}:" in line
    )
    numbers = line.split(":")[1].split()
    return int(numbers[0]), int(numbers[8])


def be_host(host: int, folder: str) -> int:
    """Its ranks are forks, and need not import torch again."""
    import torch

    import tokenyard  # noqa: F401

    torch.set_num_threads(1)
    numbers = range(host * RANKS_EACH, (host + 1) * RANKS_EACH)
    context = get_context("fork")
    ranks = [context.Process(target=be_rank, args=(rank, folder), daemon=True) for rank in numbers]
    for rank in ranks:
        rank.start()
    for rank in ranks:
        rank.join()
    return int(any(rank.exitcode for rank in ranks))


def be_rank(rank: int, folder: str) -> None:
    import torch
    import torch.distributed as dist

    import tokenyard as ty

    store = dist.TCPStore(address(0), PORT, WORLD_SIZE, rank == 0, timedelta(seconds=TIMEOUT))
    dist.init_process_group(
        "gloo", store=store, rank=rank, world_size=WORLD_SIZE, timeout=timedelta(seconds=TIMEOUT)
    )
    sizes = {
        "num_experts": EXPERTS,
        "hidden": HIDDEN,
        "num_topk": TOPK,
        "max_tokens_per_rank": TOKENS,
    }
    random = torch.Generator().manual_seed(rank)
    x = torch.randint(-8, 9, (TOKENS, HIDDEN), generator=random).bfloat16()
    idx = torch.rand(TOKENS, EXPERTS, generator=random).topk(TOPK).indices
    found: dict[str, object] = {}
    for name, topology in (("detected", None), ("flat", (1, WORLD_SIZE))):
        with ty.ExpertParallel(**sizes, topology=topology, timeout=TIMEOUT) as ep:
            ep.warmup()
            before = ep.stats()
            dist.barrier()
            came, went = cable_bytes()
            dist.barrier()  # nobody sends before everybody has looked
            for _ in range(BATCHES):
                recv = ep.dispatch(x, idx)
                y = ep.combine(recv.x, recv.handle)
            dist.barrier()
            later = cable_bytes()
            dist.barrier()
            stats = ep.stats()
            times = torch.stack(
                [(idx // (EXPERTS // WORLD_SIZE) == r).any(1) for r in range(WORLD_SIZE)]
            ).sum(0)
            assert torch.equal(y, x * times.unsqueeze(1)), "small whole numbers add up exactly"
            far = [peer for peer in range(WORLD_SIZE) if peer // RANKS_EACH != rank // RANKS_EACH]
            found[name] = {
                "topology": str(ep.topology),
                "came": later[0] - came,
                "went": later[1] - went,
                "sent": sum(stats.bytes_sent[peer] - before.bytes_sent[peer] for peer in far),
            }
    (Path(folder) / f"{rank}.json").write_text(json.dumps(found))
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    if len(sys.argv) > 2:
        sys.exit(be_host(int(sys.argv[2]), sys.argv[1]))
    else:
        sys.exit(main(sys.argv[1]))
