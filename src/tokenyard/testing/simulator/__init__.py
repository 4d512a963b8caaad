"""A deterministic simulator for communication kernels: all programs and the host code of all ranks,
on the CPU, in one process.

One seed is one schedule and one kind of (weak) hardware: the same seed gives the same run, switch
by switch. :func:`simulate` runs a body once per rank; a test does so under many seeds, and whatever
goes wrong comes back as an exception that names the seed. ``docs/how-to/simulator.md`` has an
example. ``TRITON_INTERPRET=1`` must be set before Triton is imported.

Without host code: ``sim = Simulator(world_size, seed=...)``, ``sim.allocate``, ``sim.register``,
``sim.launch(rank, kernel, grid, *args, num_warps=4, **constants)``, ``sim.run()``.

What is simulated: weak stores and stale loads (:mod:`.weak`), streams, a clock, deadlocks, dead
ranks (``kill={rank: step}``), a limit of resident programs, regions with forbidden zones around
them. What is not: threads inside a program (a missing barrier shows through the memory model, or as
a :class:`Race`), how long things take, and that host code may write memory while kernels run (they
see it at once, and wake late from a wait for it).
"""

from __future__ import annotations

from tokenyard.testing.simulator.machine import Hardware
from tokenyard.testing.simulator.ranks import (
    SimulatedGroup,
    SimulatedMemory,
    SimulatedRank,
    simulate,
)
from tokenyard.testing.simulator.scheduler import Simulator
from tokenyard.testing.simulator.simulation_errors import (
    AddressError,
    Deadlock,
    Livelock,
    ProgramError,
    Race,
    RanksFailed,
    SimulationError,
)

__all__ = [
    "AddressError",
    "Deadlock",
    "Hardware",
    "Livelock",
    "ProgramError",
    "Race",
    "RanksFailed",
    "SimulatedGroup",
    "SimulatedMemory",
    "SimulatedRank",
    "SimulationError",
    "Simulator",
    "simulate",
]
