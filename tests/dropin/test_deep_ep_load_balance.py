"""Redundant experts of DeepEP V2.5: weights lent and gradients given back, against plain torch on
all ranks' tensors.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from bad_input import complaint, error_of, meet
from nvlink_pool import SOAK, without_devices
from tokenyard.deep_ep.ep_buffer import BufferBase, EPBuffer
from tokenyard.deep_ep.events import EventHandle, EventOverlap
from tokenyard.deep_ep.helpers.communication import (
    get_logical_domain_size,
    get_physical_domain_size,
)
from tokenyard.deep_ep.load_balance import BufferAllocator, LoadBalance
from tokenyard.deep_ep.streams import Streams
from tokenyard.errors import Mismatch, NotSupported, PeerError
from tokenyard.memory.symmetric import MemoryGroup
from tokenyard.testing import Ranks, distributed_test

LOCAL, SLOTS, SENTINEL = 3, 4, 0xA5
UNIT = 2 << 20


class Lender(LoadBalance):
    """The least that a buffer brings to it."""

    def __init__(self, group: Any, plan: BufferAllocator | int = 0) -> None:
        self.group, self._streams, self.runtime = group, Streams(), self
        self.num_nvlink_ranks = get_physical_domain_size(group)[1]
        self._open_load_balance(plan)

    def destroy(self) -> None:
        self.runtime = None


def mapping_of(size: int, seed: int, local: int = LOCAL, slots: int = SLOTS) -> Tensor:
    """Any experts, of the rank itself too, some of them several times; a third of the slots are
    empty.
    """
    random = torch.Generator().manual_seed(seed)
    table = torch.randint(0, size * local, (size, slots), generator=random, dtype=torch.int32)
    return table.masked_fill(torch.rand(table.shape, generator=random) < 0.3, -1)


def weights_of(rank: int, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    random = torch.Generator().manual_seed(1000 + rank)
    raw = torch.randint(0, 256, (LOCAL, *shape, dtype.itemsize), generator=random)
    return raw.to(torch.uint8).view(dtype).view(LOCAL, *shape)


PAYLOADS = (
    ((5, 32), (160,), torch.bfloat16),
    ((7,), (7,), torch.float32),
    ((3, 11), (33,), torch.float8_e4m3fn),
    ((1,), (), torch.int64),
)
"""Shapes behind the experts, of what is lent and of where it goes; odd sizes too."""


def rows(tensor: Tensor) -> Tensor:
    """Bytes by expert."""
    return tensor.reshape(-1).view(torch.uint8).view(len(tensor), -1)


@distributed_test(world_size=(1, 4) if SOAK == 1 else (1, 2, 4))
def test_prefetch(ranks: Ranks) -> None:
    """Several tensors at once, one alone, in planned memory and elsewhere, views of other shapes,
    after an event of either kind or none.
    """
    size, rank = ranks.world_size, ranks.rank
    plan = BufferAllocator()
    planned = [plan.allocate((SLOTS, *there), dtype) for _, there, dtype in PAYLOADS]
    assert all(each.is_meta for each in planned) and plan.num_bytes == len(PAYLOADS) * UNIT
    buffer = Lender(ranks.group, plan)
    storage = buffer.lb_storage
    assert storage is not None and buffer.num_lb_bytes == plan.num_bytes == storage.nbytes
    offsets = [each.data_ptr() - storage.data_ptr() for each in planned]
    assert offsets == [at * UNIT for at in range(len(PAYLOADS))]
    everybody = [
        [weights_of(peer, shape, dtype).to(ranks.device) for shape, _, dtype in PAYLOADS]
        for peer in range(size)
    ]
    for seed, event in enumerate(
        (EventHandle(), EventOverlap(EventHandle()), EventOverlap(), None)
    ):
        mapping, alone = mapping_of(size, seed), seed == 3
        mapping = mapping.to(ranks.device if seed % 2 else "cpu")
        rooms = planned if seed % 2 else [torch.empty_like(each) for each in planned]
        for room in rooms:
            rows(room).fill_(SENTINEL)
        given = (rooms[0], everybody[rank][0]) if alone else (rooms, tuple(everybody[rank]))
        buffer.lb_prefetch_weights(*given, mapping, previous_event=event).current_stream_wait()
        for at, room in enumerate(rooms):
            want = torch.full_like(rows(room), SENTINEL)
            for slot, expert in enumerate(mapping[rank].tolist()):
                if expert >= 0 and not (alone and at):
                    want[slot] = rows(everybody[expert // LOCAL][at])[expert % LOCAL]
            assert torch.equal(rows(room), want), (seed, at)


def grads_of(rank: int, experts: int, hidden: int, seed: int) -> Tensor:
    random = torch.Generator().manual_seed(100 * seed + rank)
    return torch.randn(experts, hidden, generator=random) * 10.0 ** (rank % 3)


def summed(own: Tensor, lent: list[Tensor], mapping: Tensor, rank: int) -> Tensor:
    """The stated order: what was there, then rank by rank, slot by slot; in float32."""
    total = own.clone()
    for borrower, row in enumerate(mapping.tolist()):
        for slot, expert in enumerate(row):
            if expert >= 0 and expert // LOCAL == rank:
                total[expert % LOCAL] = total[expert % LOCAL] + lent[borrower][slot]
    return total


@distributed_test(world_size=(1, 4) if SOAK == 1 else (1, 2, 4))
def test_reduce(ranks: Ranks) -> None:
    """Bit for bit in the stated order, which shows: another order gives other bits. What was lent
    stays as it is.
    """
    size, rank = ranks.world_size, ranks.rank
    buffer, others = Lender(ranks.group, UNIT), 0
    assert buffer.num_lb_bytes == UNIT and buffer.lb_get_theoretical_num_sms() == 0
    for seed, hidden in enumerate((24, 1, 1000)):
        mapping = mapping_of(size, seed, slots=2 * SLOTS)
        lent = [grads_of(peer, 2 * SLOTS, hidden, seed).to(ranks.device) for peer in range(size)]
        own = grads_of(rank, LOCAL, hidden, seed + 50).to(ranks.device)
        want, mine = summed(own, lent, mapping, rank), lent[rank].clone()
        turned = summed(own, lent[::-1], mapping.flip(0), rank)
        buffer.lb_reduce_grads(mine, own, mapping, num_sms=8).current_stream_wait()
        assert torch.equal(own, want) and torch.equal(mine, lent[rank])
        others += int((want != turned).sum())
    assert others or size == 1


@without_devices
@distributed_test(world_size=2)
def test_nothing_to_do(ranks: Ranks) -> None:
    """No slots, or none in use."""
    buffer, own = Lender(ranks.group), torch.ones(LOCAL, 4)
    for slots in (0, 2):
        lent, empty = torch.full((slots, 4), 7.0), torch.full((2, slots), -1, dtype=torch.int32)
        buffer.lb_reduce_grads(lent, own, empty)
        buffer.lb_prefetch_weights(lent, own, empty)
        assert (own == 1).all() and (lent == 7).all()


@without_devices
@distributed_test(world_size=4)
def test_each_host_is_a_domain(ranks: Ranks) -> None:
    """Two hosts of two ranks: each lends among its own, with a mapping of its own, at its own
    time.
    """
    with pytest.MonkeyPatch.context() as patched:
        patched.setenv("TOKENYARD_HOST", str(ranks.rank // 2))
        group: Any = dist.new_group(backend="gloo")  # hosts of a group are asked once
        buffer = Lender(group)
        assert get_physical_domain_size(group) == (2, 2) == get_logical_domain_size(group)
        assert get_logical_domain_size(group, allow_hybrid_mode=False) == (1, 4)
        rank, host = ranks.rank % 2, ranks.rank // 2
        for turn in range(3 + 2 * host):
            mapping = mapping_of(2, 10 * host + turn)
            own = weights_of(ranks.rank, (8,), torch.bfloat16)
            room = torch.zeros(SLOTS, 8, dtype=torch.bfloat16)
            buffer.lb_prefetch_weights(room, own, mapping)
            for slot, expert in enumerate(mapping[rank].tolist()):
                owner = weights_of(2 * host + expert // LOCAL, (8,), torch.bfloat16)
                want = owner[expert % LOCAL] if expert >= 0 else torch.zeros(8).bfloat16()
                assert torch.equal(rows(room[slot : slot + 1]), rows(want[None]))
    meet(ranks)


GOOD = {
    "redundant_expert_weights": torch.zeros(SLOTS, 8),
    "expert_weights": torch.zeros(LOCAL, 8),
    "redundancy_mapping": torch.full((2, SLOTS), -1, dtype=torch.int32),
}
BAD_WEIGHTS: tuple[tuple[dict[str, Any], tuple[str, ...]], ...] = (
    ({"redundant_expert_weights": []}, ("redundant_expert_weights", "at least one tensor")),
    ({"expert_weights": [None]}, ("expert_weights", "tensor")),
    ({"expert_weights": [torch.zeros(LOCAL, 8)] * 2}, ("1 tensors", "expert_weights 2")),
    ({"expert_weights": torch.zeros(LOCAL, 9)}, ("32 bytes per expert", "36")),
    ({"expert_weights": torch.zeros(8, LOCAL).t()}, ("expert_weights[0]", "contiguous")),
    ({"expert_weights": torch.zeros(0, 8)}, ("expert_weights[0]", "at least one expert")),
    ({"expert_weights": torch.zeros(())}, ("expert_weights[0]", "[experts, ...]")),
    ({"redundant_expert_weights": torch.zeros(SLOTS, 8, device="meta")}, ("meta", "plan")),
    ({"num_sms": -1}, ("num_sms", "-1")),
    ({"previous_event": 3}, ("previous_event", "EventHandle")),
    ({"redundancy_mapping": None}, ("redundancy_mapping", "int32")),
    ({"redundancy_mapping": torch.zeros(2, SLOTS)}, ("redundancy_mapping", "int32")),
    ({"redundancy_mapping": GOOD["redundancy_mapping"][:1]}, ("[1, 4]", "[2, 4]")),
    ({"redundancy_mapping": GOOD["redundancy_mapping"] + 7}, ("[0, 0] (6)", "from 0 to 5")),
    ({"redundancy_mapping": GOOD["redundancy_mapping"] - 1}, ("[0, 0] (-2)", "-1 for none")),
)


@without_devices
@distributed_test(world_size=2)
def test_bad_weights(ranks: Ranks) -> None:
    """On one rank, which names it; the other learns that at once. The next good call works."""
    buffer = Lender(ranks.group)
    for at, (changes, words) in enumerate(BAD_WEIGHTS):
        here = at % 2 == ranks.rank
        error = error_of(
            lambda c=changes, here=here: buffer.lb_prefetch_weights(**GOOD | (c if here else {}))
        )
        wanted = (ValueError, words) if here else (PeerError, (f"rank {at % 2} refused",))
        assert not complaint(error, *wanted), (changes, complaint(error, *wanted))
    pairs = [torch.zeros(SLOTS, 8), torch.zeros(SLOTS + 1, 8)]
    error = error_of(
        lambda: buffer.lb_prefetch_weights(
            pairs, [GOOD["expert_weights"]] * 2, GOOD["redundancy_mapping"]
        )
    )
    assert not complaint(error, ValueError, ("redundant_expert_weights[1] has 5 experts",))
    buffer.lb_prefetch_weights(**GOOD)
    buffer.destroy()
    with pytest.raises(RuntimeError, match=r"lb_prefetch_weights\(\) after destroy\(\)"):
        buffer.lb_prefetch_weights(**GOOD)


@distributed_test(world_size=2)
def test_of_a_buffer(ranks: Ranks) -> None:
    """``EPBuffer`` has it: a bad plan of one rank is refused when buffers are made, and the next
    ones lend parameters and dispatch.
    """

    def make(plan: BufferAllocator | int) -> EPBuffer:
        return EPBuffer(ranks.group, UNIT, lb_allocation_plan_or_num_bytes=plan)

    plan = BufferAllocator()
    room, here = plan.allocate((SLOTS, 8), torch.float32), ranks.rank == 0
    error = error_of(lambda: make(UNIT + 1 if here else plan))
    wanted = (ValueError, ("multiple",)) if here else (PeerError, ("multiple", "EPBuffer"))
    assert not complaint(error, *wanted), complaint(error, *wanted)
    assert room.is_meta and not plan.materialized
    buffer = make(plan)
    own = torch.nn.Parameter(torch.full((LOCAL, 8), 1.0 + ranks.rank, device=ranks.device))
    assert isinstance(buffer, BufferBase) and not room.is_meta
    mapping = torch.tensor([[LOCAL, -1, -1, 0], [-1, -1, 2, -1]])
    event = buffer.lb_prefetch_weights(room, own, mapping, previous_event=buffer.capture())
    event.wait()
    assert not room.requires_grad and own.grad is None
    want = [2, 0, 0, 1] if here else [0, 0, 1, 0]
    assert torch.equal(room.cpu(), torch.tensor(want)[:, None].expand(SLOTS, 8).float())
    x = torch.ones(3, 16, device=ranks.device).bfloat16()
    idx = torch.tensor([[0, 1]] * 3, device=ranks.device)
    recv = buffer.dispatch(x, topk_idx=idx, num_experts=2, num_max_tokens_per_rank=3)
    assert torch.equal(buffer.combine(recv[0], recv[3])[0], 2 * x)
    for call in (lambda: buffer.main_context, buffer.print_memory_usage):
        with pytest.raises(NotSupported):
            call()
    buffer.destroy()


@without_devices
@distributed_test(world_size=2)
def test_ranks_that_disagree(ranks: Ranks) -> None:
    """Every rank raises, names what it is, and nothing has moved."""
    buffer, other = Lender(ranks.group), ranks.rank == 1
    mapping = torch.tensor([[3, -1], [0, -1]], dtype=torch.int32)

    def call(mapping: Tensor, hidden: int = 8, local: int = 3, many: int = 1) -> Tensor:
        room = torch.zeros(len(mapping[0]), hidden)
        own = torch.ones(local, hidden)
        buffer.lb_prefetch_weights([room] * many, [own] * many, mapping)
        return room

    cases: tuple[tuple[str, dict[str, Any]], ...] = (
        ("redundancy_mapping", {"mapping": mapping.flip(1)}),
        ("bytes per expert", {"hidden": 16}),
        ("num_local_experts in lb_prefetch_weights(): rank 0 and rank 1", {"local": 4}),
        ("number of tensors", {"many": 2}),
        ("num_redundant_experts", {"mapping": mapping[:, :1]}),
    )
    for words, changes in cases:
        error = error_of(lambda c=changes: call(**{"mapping": mapping} | (c if other else {})))
        assert not complaint(error, Mismatch, (words,)), (words, error)
    grads = torch.zeros(2, 8), torch.zeros(3, 8), mapping
    error = error_of(lambda: buffer.lb_reduce_grads(*grads) if other else call(mapping))
    assert not complaint(error, Mismatch, ("which call",)), error
    assert (call(mapping)[0] == 1).all()


def test_bad_plans() -> None:
    """What needs no ranks."""
    plan = BufferAllocator()
    for wrong, words in (((-1,), "shape"), ((2.5,), "shape"), ((True,), "shape")):
        with pytest.raises(ValueError, match=words):
            plan.allocate(wrong, torch.float32)  # pyright: ignore
    with pytest.raises(ValueError, match="dtype"):
        plan.allocate((3,), "float32")  # pyright: ignore
    first = plan.allocate(5, torch.float32)
    for storage in (torch.empty(UNIT), torch.empty(UNIT + 1, dtype=torch.uint8)):
        with pytest.raises(ValueError, match="storage"):
            plan.materialize(storage)
    assert first.is_meta and not plan.materialized
    plan.materialize(torch.zeros(UNIT, dtype=torch.uint8))
    assert torch.equal(first, torch.zeros(5)) and plan.materialized
    for again in (
        lambda: plan.allocate((1,), torch.float32),
        lambda: plan.materialize(torch.zeros(UNIT, dtype=torch.uint8)),
        lambda: LoadBalance.check_plan(plan),
        lambda: LoadBalance.check_plan(UNIT + 1),
        lambda: LoadBalance.check_plan(-1),
        lambda: LoadBalance.check_plan("many"),  # pyright: ignore
    ):
        with pytest.raises(ValueError, match=r"plan|multiple|whole number"):
            again()


def test_virtual_ranks_are_refused() -> None:
    buffer = Lender.__new__(Lender)
    buffer.group = MemoryGroup.__new__(MemoryGroup)
    with pytest.raises(NotSupported, match="virtual ranks"):
        buffer.lb_prefetch_weights(**GOOD)
