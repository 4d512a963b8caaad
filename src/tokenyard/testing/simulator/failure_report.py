"""What is said about those who wait."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from tokenyard.testing.simulator import hooks
from tokenyard.testing.simulator.pages import raw

if TYPE_CHECKING:
    from tokenyard.testing.simulator.program import Program
    from tokenyard.testing.simulator.scheduler import Simulator

_MOST_LINES = 40
_MOST_PLACES = 8


def deadlock(sim: Simulator, programs: list[Program], could_time_out: bool) -> str:
    """All waiters, and why nobody will wake them."""
    ways = (
        "they would time out; timeouts=True lets them"
        if could_time_out
        else "none of them has a timeout"
    )
    return f"nobody can go on after step {sim.steps} (seed {sim.seed}); {ways}" + waiters(
        sim, programs
    )


def waiters(sim: Simulator, programs: list[Program]) -> str:
    """One line for each."""
    lines = [_program(sim, p) for p in programs]
    lines += [
        f"rank {host.rank}, host: {host.waits_for}"
        for host in sim.hosts
        if host.rank not in sim.dead
    ]
    lines += _not_started(sim)
    lines += [f"rank {rank} is dead" for rank in sorted(sim.dead)]
    if len(lines) > _MOST_LINES:
        lines[_MOST_LINES:] = [f"... and {len(lines) - _MOST_LINES} more"]
    return "".join(f"\n  {line}" for line in lines)


def failures(errors: dict[int, BaseException], seed: int) -> str:
    """Which ranks raised what."""
    parts = [f"rank {rank}: {type(error).__name__}: {error}" for rank, error in errors.items()]
    return f"{'; '.join(parts)} (seed {seed})"


def _program(sim: Simulator, p: Program) -> str:
    read = [
        (address, key[-1]) for key, addresses in p.round.items() for address in addresses.tolist()
    ]
    read.sort(key=lambda place: place[0] not in p.compared)  # what it looks for first
    places = [_place(sim, address, size, p.compared.get(address, [])) for address, size in read]
    if len(places) > _MOST_PLACES:
        places[_MOST_PLACES:] = [f"... {len(places) - _MOST_PLACES} more"]
    inside = hooks.roles(p)
    return (
        f"{p.name}"
        + (f", in {' > '.join(inside)}," if inside else "")
        + " waits at "
        + "; ".join(places)
    )


def _place(sim: Simulator, address: int, size: int, wants: list[Any]) -> str:
    value = int.from_bytes(raw(address, size).tobytes(), "little", signed=True)
    compared = f", compared with {', '.join(str(want) for want in wants)}" if wants else ""
    return f"{sim.addresses.describe(address)} saw {value}{compared}"


def _not_started(sim: Simulator) -> list[str]:
    lines: list[str] = []
    for rank, stream in enumerate(sim.streams):
        for place, launch in enumerate(stream.queue):
            left = launch.size - launch.started
            if left and place == 0:
                lines.append(
                    f"rank {rank}, {launch.name}: {left} of its {launch.size} programs have not "
                    f"started, because "
                    f"{len(launch.running)} others fill the rank (resident={sim.resident})"
                )
            elif place > 0:
                lines.append(
                    f"rank {rank}, {launch.name}: {launch.size} programs wait for the launch "
                    f"before them"
                )
    return lines
