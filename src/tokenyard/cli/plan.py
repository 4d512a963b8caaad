"""``tokenyard plan``: what dispatch and combine would take on a machine that need not be
at hand.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from tokenyard.cli.options import check_plot
from tokenyard.cli.plan_report import as_json, print_plan
from tokenyard.engines.rings import DEFAULT_BUFFER_BYTES
from tokenyard.planner.fit import rates_from
from tokenyard.planner.picks import SKEWS
from tokenyard.planner.plan import plan as make_plan
from tokenyard.planner.plan import scaling
from tokenyard.planner.rates import H200, Rates
from tokenyard.planner.workload import DTYPES, H200_SMS, Dtype, Workload

PIPED_WIDTH = 150


def _dtypes(given: list[str] | None) -> list[Dtype]:
    asked = given or list(DTYPES)
    for word in asked:
        if word not in DTYPES:
            raise typer.BadParameter(
                f"{word!r} is unknown; use one of {', '.join(DTYPES)}", param_hint="--dtype"
            )
    return [dtype for dtype in DTYPES if dtype in asked]


def _rates(
    record: Path | None, nvlink: float | None, nic: float | None, latency: float | None
) -> Rates:
    measured = H200 if record is None else rates_from(record, H200)
    return measured.with_links(nvlink=nvlink, nic=nic, latency=latency)


def plan(
    nodes: Annotated[int, typer.Option(help="Machines.")] = 1,
    gpus_per_node: Annotated[
        int, typer.Option(help="GPUs that map each other's memory, one rank each.")
    ] = 8,
    tokens: Annotated[int, typer.Option(help="Tokens per rank.")] = 4096,
    hidden: Annotated[int, typer.Option(help="Channels of a token.")] = 7168,
    experts: Annotated[int, typer.Option(help="Experts over all ranks.")] = 256,
    topk: Annotated[int, typer.Option(help="Experts per token.")] = 8,
    dtype: Annotated[
        list[str] | None,
        typer.Option(
            help="bf16, fp8: of dispatched rows; may be given several times.", show_default="both"
        ),
    ] = None,
    sms: Annotated[int, typer.Option(help=f"Multiprocessors for calls, of {H200_SMS}.")] = H200_SMS,
    buffer_bytes: Annotated[
        int, typer.Option(help="Bytes of all rings of a GPU.")
    ] = DEFAULT_BUFFER_BYTES,
    nvlink: Annotated[
        float | None,
        typer.Option(help="GB/s that leave a GPU inside its node.", show_default="as measured"),
    ] = None,
    nic: Annotated[
        float | None, typer.Option(help="GB/s of network per GPU, one way.", show_default="45")
    ] = None,
    latency: Annotated[
        float | None, typer.Option(help="us of a put over the network.", show_default="5")
    ] = None,
    rates: Annotated[
        Path | None,
        typer.Option(
            dir_okay=False,
            help="JSON of tokenyard bench --json or --suite nvlink.",
            show_default="recorded on 2x H200",
        ),
    ] = None,
    seed: Annotated[int, typer.Option(min=0, help="Which experts are popular under zipf.")] = 0,
    as_document: Annotated[
        bool, typer.Option("--json", help="Print one JSON document, and nothing else.")
    ] = False,
    plot: Annotated[
        Path | None, typer.Option(dir_okay=False, help="Draw times over numbers of GPUs, as a PNG.")
    ] = None,
) -> None:
    """Predict time, bytes per link, memory and ring sizes of dispatch and combine, for a machine of
    any size. Needs no GPU.

    Bytes are expected values under uniform and zipf routing. Times come from a small model;
    docs/planner.md says how far it is off.
    """
    check_plot(plot)
    dtypes = _dtypes(dtype)
    try:
        workload = Workload(
            nodes=nodes,
            gpus_per_node=gpus_per_node,
            tokens=tokens,
            hidden=hidden,
            experts=experts,
            topk=topk,
            sms=sms,
            buffer_bytes=buffer_bytes,
        )
        known = _rates(rates, nvlink, nic, latency)
        found = make_plan(workload, known, dtypes, SKEWS, seed)
        shown, refused = ([], {}) if plot is None else scaling(workload, known, dtypes)
    except ValueError as wrong:
        raise typer.BadParameter(str(wrong)) from None
    if as_document:
        typer.echo(json.dumps(as_json(found), indent=1))
    else:
        terminal = Console()
        print_plan(terminal if terminal.is_terminal else Console(width=PIPED_WIDTH), found)
    if plot is not None:
        from tokenyard.cli.plan_plot import draw  # matplotlib is an extra

        draw(shown, plot)
        if refused:
            gpus, why = ", ".join(map(str, refused)), next(iter(refused.values()))
            typer.echo(f"Not in the picture: machines of {gpus} GPUs: {why}", err=True)
