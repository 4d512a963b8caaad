"""``tokenyard demo``: an MoE layer in plain torch (byte embedding, softmax top-k router, SwiGLU
experts), over ranks and on one process."""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, metadata
from math import inf
from pathlib import Path
from typing import Annotated, Any

import torch
import torch.distributed as dist
import typer
from rich.bar import Bar
from rich.console import Console, RenderableType
from rich.markup import escape
from torch import Tensor, nn
from torch.nn import functional

import tokenyard as ty
from tokenyard.cli.consoles import (
    bytes_text,
    leads,
    on_all_ranks,
    print_line,
    print_table,
    say,
    table_console,
)
from tokenyard.cli.options import Device, Ranks, bad, command, file, option, word_of
from tokenyard.engines.known import AUTO, ENGINES
from tokenyard.launch import under_torchrun
from tokenyard.routing import expert_bounds, host_ints

LIMIT = 1e-5
"""Largest relative error (2-norm of the difference over 2-norm) that passes for rounding."""

BAR_COLOURS = ("cyan", "yellow")
"""Neighbouring ranks take turns; told apart by every kind of colour vision."""

SHARED, PER_EXPERT = ("embedding", "router"), ("gate", "up", "down")
"""Modules with weights: those that every rank uses, so that gradients are summed over ranks, and
those of an expert."""

README = "the project's README"
TEXT, PLOT = "File whose bytes are the tokens.", "Draw traffic and expert load as a PNG."


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    ranks: Ranks = 4
    text: Annotated[Path | None, option(TEXT, README)] = None
    tokens: Annotated[int, option("Use at most so many bytes of the text.", min=1)] = 4096
    hidden: Annotated[int, option("Channels of a token.", min=1)] = 128
    experts: Annotated[int, option("Experts, all ranks together.", min=1)] = 16
    topk: Annotated[int, option("Experts per token.", min=1)] = 2
    steps: Annotated[int, option("Forward and backward so often; compare the last.", min=1)] = 1
    device: Device = "cpu"
    engine: Annotated[str, option("What moves the rows.", parser=word_of(ENGINES))] = AUTO
    plot: Annotated[Path | None, file(PLOT, "--plot")] = None


@command(Options)
def demo(options: Options) -> None:
    """Run an MoE layer on a real text, forward and backward, over several ranks, and compare with
    one process.

    The exit code is 1 if the output or a gradient differs. Works under torchrun too.
    """
    if options.topk > options.experts:
        bad("--topk", f"{options.topk} experts per token, but there are {options.experts}")
    console = table_console(quiet=not leads())
    name, text = _read(options.text, options.tokens)
    layer = f"{options.hidden} channels, top {options.topk} of {options.experts} experts"
    title = f"{len(text)} bytes of {name}, {layer}"
    world = os.environ["WORLD_SIZE"] if under_torchrun() else options.ranks
    print_line(console, f"[bold]{world} ranks[/bold] on {options.device}: {escape(title)}")
    try:
        parts = on_all_ranks(run_rank, options.ranks, options.device, options, text)
    except ty.NotSupported as error:
        bad("--engine", str(error))
    good = print_result(console, parts)
    if leads() and options.plot is not None:
        from tokenyard.cli.plots import save_traffic  # matplotlib is an extra

        traffic, loads = [part.sent for part in parts], [part.load for part in parts]
        save_traffic(options.plot, traffic, loads, title)
        print_line(console, f"Wrote {escape(str(options.plot))}")
    raise typer.Exit(int(not good))


def _read(path: Path | None, most: int) -> tuple[str, bytes]:
    """A name for the text, and its first bytes. Default: the README, as the package has it."""
    name = "tokenyard's README" if path is None else path.name
    try:
        readme = "" if path else str(metadata("tokenyard").json.get("description", ""))
        content = path.read_bytes() if path else readme.encode()
    except PackageNotFoundError:
        bad("--text", "tokenyard is not installed, so its README is not at hand: name a file")
    except OSError as error:
        bad("--text", f"cannot read {path}: {error.strerror}")
    if not content:
        bad("--text", f"{name} is empty")
    return name, content[:most]


# The layer


class Expert(nn.Module):
    """SwiGLU with twice as many channels inside: rows ``[n, H]`` to as many."""

    def __init__(self, hidden: int) -> None:
        super().__init__()
        self.gate, self.up = (nn.Linear(hidden, 2 * hidden, bias=False) for _ in range(2))
        self.down = nn.Linear(2 * hidden, hidden, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(functional.silu(self.gate(x)) * self.up(x))


class MoeLayer(nn.Module):
    """One MoE layer, float32, with the same weights on every rank. Called on byte values ``[T]`` it
    runs all of its experts in one process, and returns ``[T, H]``."""

    def __init__(self, options: Options) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embedding = nn.Embedding(256, options.hidden)
        self.router = nn.Linear(options.hidden, options.experts, bias=False)
        self.experts = nn.ModuleList(Expert(options.hidden) for _ in range(options.experts))
        self.num_topk = options.topk

    def route(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Rows ``[T, H]`` to ids ``[T, K]`` int64 and weights that add up to 1."""
        top, topk_idx = self.router(x).softmax(-1).topk(self.num_topk)
        return topk_idx, top / top.sum(-1, keepdim=True)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens)
        topk_idx, topk_weights = self.route(x)
        out = torch.zeros_like(x)
        for number, expert in enumerate(self.experts):
            row, pick = (topk_idx == number).nonzero(as_tuple=True)
            out = out.index_add(0, row, topk_weights[row, pick, None] * expert(x[row]))
        return out

    def over_ranks(
        self, ep: ty.ExpertParallel, tokens: Tensor, held: slice
    ) -> tuple[Tensor, ty.Received]:
        """The same of a rank's own ``tokens [T]``, of experts ``held`` on this rank and others on
        others; and the rows that came here. Collective."""
        x = self.embedding(tokens)
        recv = ep.dispatch(x, *self.route(x), layout=ty.Layout.EXPERT_MAJOR)
        blocks = torch.split_with_sizes(recv.x, recv.tokens_per_expert_list)
        mine = zip(self.experts[held], blocks, strict=True)
        # Where there are no experts, no rows keep the rank in the backward exchange.
        rows = torch.cat([recv.x[:0], *(expert(block) for expert, block in mine)])
        return ep.combine(rows, recv.handle, weighted=True), recv


def results(layer: MoeLayer, y: Tensor, held: slice = slice(None)) -> dict[str, Tensor]:
    """The output and every gradient by name: ``output``, ``embedding gradient``, ``gate gradient``,
    ... Those of the experts ``held`` are one behind the other. A gradient that backward did not
    make counts as zero."""
    owners: dict[str, Iterable[Any]] = {name: [layer] for name in SHARED}
    owners |= dict.fromkeys(PER_EXPERT, layer.experts[held])
    found = {"output": y.detach()}
    for name, modules in owners.items():
        weights: list[Tensor] = [getattr(module, name).weight for module in modules]
        parts = [torch.zeros_like(w) if w.grad is None else w.grad for w in weights]
        found[f"{name} gradient"] = torch.cat(parts) if parts else torch.zeros(0)
    return found


def relative_error(got: Tensor, want: Tensor) -> float:
    """``|got - want| / |want|`` (2-norms, float64); infinite: not finite, or only ``want`` is 0."""
    gap = torch.dist(got.double(), want.double()).item()
    size = float(want.double().square().sum().sqrt())
    return 0.0 if gap == 0 else gap / size if size > 0 and gap < inf else inf


# What a rank does


@dataclass(frozen=True, slots=True)
class Part:
    """What one rank saw.

    Attributes:
        why: the engine that ran, and the reason for it.
        tokens, rows: that it owns, that dispatch brings it.
        sent, received: bytes of a step, forward and backward, to and from each rank.
        load: tokens routed to each expert that it holds; rank 0 has the first ones, and so on.
        errors: relative error of each tensor of :func:`results`.
    """

    why: str
    tokens: int
    rows: int
    sent: list[int]
    received: list[int]
    load: list[int]
    errors: dict[str, float]


def run_rank(device: torch.device, options: Options, text: bytes) -> list[Part]:
    """Be one rank, with a part of the text and of the experts: what all saw, in their order.
    Collective."""
    world, rank = dist.get_world_size(), dist.get_rank()
    split, owned = expert_bounds(len(text), world), expert_bounds(options.experts, world)
    mine, held = slice(*split[rank : rank + 2]), slice(*owned[rank : rank + 2])
    layer, whole = (MoeLayer(options).to(device) for _ in range(2))
    tokens = torch.tensor(list(text), device=device)
    gradient = torch.randn(len(text), options.hidden).to(device)  # behind a seed: alike on all
    sizes = {"num_experts": options.experts, "hidden": options.hidden, "num_topk": options.topk}
    where: dict[str, Any] = {"engine": options.engine, "device": device}
    with ty.ExpertParallel(**sizes, max_tokens_per_rank=split[1], **where) as ep:

        def step(number: int) -> tuple[Tensor, ty.Received]:
            say(f"step {number} of {options.steps}: forward and backward")
            layer.zero_grad()
            y, recv = layer.over_ranks(ep, tokens[mine], held)
            y.backward(gradient[mine])
            return y, recv

        y, recv = step(1)
        for number in range(2, options.steps + 1):
            y, recv = step(number)
        ep.check()
        stats = ep.stats()
    say("comparing with one process")
    got = results(layer, y, held)
    for name in SHARED:
        dist.all_reduce(got[f"{name} gradient"])
    wanted = whole(tokens)
    wanted.backward(gradient)
    want = results(whole, wanted[mine], held)
    parts: list[Any] = [None] * world
    part = Part(
        why=ep.why,
        tokens=y.shape[0],
        rows=recv.x.shape[0],
        sent=[count // options.steps for count in stats.bytes_sent],  # alike in all steps
        received=[count // options.steps for count in stats.bytes_received],
        load=host_ints(recv.tokens_per_expert),
        errors={name: relative_error(tensor, want[name]) for name, tensor in got.items()},
    )
    dist.all_gather_object(parts, part)
    return parts


# What is printed


def print_result(console: Console, parts: Sequence[Part]) -> bool:
    """All that there is to say about a run; returns whether no error exceeds :data:`LIMIT`."""
    print_line(console, f"Engine {escape(parts[0].why)}")
    ranks: list[tuple[str, ...]] = []
    load: list[tuple[int, int]] = []
    for rank, part in enumerate(parts):
        counts, moved = (rank, len(part.load), part.tokens, part.rows), (part.sent, part.received)
        ranks.append((*map(str, counts), *map(bytes_text, map(sum, moved))))
        load += [(rank, count) for count in part.load]
    columns = "Rank|Experts|Tokens|Rows received|Bytes sent|Bytes received"
    title = "Ranks (bytes over the wire per step, forward and backward)"
    print_table(console, title, columns, ranks)
    most, mean = max(count for _, count in load), sum(count for _, count in load) / len(load)
    experts: list[tuple[RenderableType, ...]] = []
    for number, (rank, count) in enumerate(load):
        bar = Bar(most, 0, count, width=40, color=BAR_COLOURS[rank % 2])
        experts.append((*map(str, (number, rank, count)), bar))
    title = f"Expert load (the largest is {most / mean:.2f} times the mean of {mean:.3g} tokens)"
    print_table(console, title, "Expert|Rank|Tokens|<", experts)
    errors = {name: max(part.errors[name] for part in parts) for name in parts[0].errors}
    compared = [(escape(name), f"{error:.1e}") for name, error in errors.items()]
    title = "Relative error against the same layer on one process"
    print_table(console, title, "<Tensor|Error", compared)
    print_line(console, "")
    wrong = {name: error for name, error in errors.items() if not error <= LIMIT}
    for name, error in wrong.items():
        text = f"MISMATCH: {name}: relative error {error:.1e}, but the limit is {LIMIT:.0e}"
        print_line(console, f"[bold red]{escape(text)}[/bold red]")
    if not wrong:
        text = "The output and all gradients match; the largest relative error is"
        print_line(console, f"[green]{text} {max(errors.values()):.1e}[/green]")
    return not wrong
