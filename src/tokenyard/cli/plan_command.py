"""``tokenyard plan``: what dispatch and combine would take on a machine that need not be
at hand.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated

import typer

from tokenyard.cli.consoles import table_console
from tokenyard.cli.options import check_plot, check_words, command, option
from tokenyard.cli.plan_report import as_json, print_plan
from tokenyard.engines.rings import DEFAULT_BUFFER_BYTES
from tokenyard.planner.prediction import plan as make_plan
from tokenyard.planner.prediction import scaling
from tokenyard.planner.rates import H200
from tokenyard.planner.record import rates_from
from tokenyard.planner.traffic import SKEWS
from tokenyard.planner.workload import DTYPES, H200_SMS, Dtype, Workload

WORK = ("nodes", "gpus_per_node", "tokens", "hidden", "experts", "topk", "sms", "buffer_bytes")

Dtypes = Annotated[
    list[str] | None,
    option("bf16, fp8: of dispatched rows; may be given several times.", show_default="both"),
]
Rate = Annotated[
    float | None, option("GB/s that leave a GPU inside its node.", show_default="as measured")
]
Network = Annotated[float | None, option("GB/s of network per GPU, one way.", show_default="45")]
Latency = Annotated[float | None, option("us of a put over the network.", show_default="5")]
FILE = "JSON of tokenyard bench --json or of the suite nvlink."
Record = Annotated[Path | None, option(FILE, dir_okay=False, show_default="recorded on 2x H200")]
Plot = Annotated[Path | None, option("Draw times over numbers of GPUs, as a PNG.", dir_okay=False)]


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """Of ``tokenyard plan``."""

    nodes: Annotated[int, option("Machines.")] = 1
    gpus_per_node: Annotated[int, option("GPUs that map each other's memory, a rank each.")] = 8
    tokens: Annotated[int, option("Tokens per rank.")] = 4096
    hidden: Annotated[int, option("Channels of a token.")] = 7168
    experts: Annotated[int, option("Experts over all ranks.")] = 256
    topk: Annotated[int, option("Experts per token.")] = 8
    dtype: Dtypes = None
    sms: Annotated[int, option(f"Multiprocessors for calls, of {H200_SMS}.")] = H200_SMS
    buffer_bytes: Annotated[int, option("Bytes of all rings of a GPU.")] = DEFAULT_BUFFER_BYTES
    nvlink: Rate = None
    nic: Network = None
    latency: Latency = None
    rates: Record = None
    seed: Annotated[int, option("Which experts are popular under zipf.", min=0)] = 0
    json: Annotated[bool, option("Print one JSON document, and nothing else.")] = False
    plot: Plot = None


@command(Options)
def plan(options: Options) -> None:
    """Predict time, bytes per link, memory and ring sizes of dispatch and combine, for a machine of
    any size. Needs no GPU.

    Bytes are expected values under uniform and zipf routing. Times come from a small model;
    docs/how-to/planner.md says how far it is off.
    """
    check_plot(options.plot)
    asked, given = options.dtype or list(DTYPES), asdict(options)
    check_words("--dtype", asked, DTYPES)
    dtypes: list[Dtype] = [dtype for dtype in DTYPES if dtype in asked]
    try:
        workload = Workload(**{name: given[name] for name in WORK})
        measured = H200 if options.rates is None else rates_from(options.rates, H200)
        rates = measured.with_links(nvlink=options.nvlink, nic=options.nic, latency=options.latency)
        found = make_plan(workload, rates, dtypes, SKEWS, options.seed)
        shown, refused = ([], {}) if options.plot is None else scaling(workload, rates, dtypes)
    except ValueError as wrong:
        raise typer.BadParameter(str(wrong)) from None
    if options.json:
        typer.echo(json.dumps(as_json(found), indent=1))
    else:
        print_plan(table_console(), found)
    if options.plot is not None:
        from tokenyard.cli.plots import save_plans  # matplotlib is an extra

        save_plans(options.plot, shown)
        if refused:
            gpus, why = ", ".join(map(str, refused)), next(iter(refused.values()))
            typer.echo(f"Not in the picture: machines of {gpus} GPUs: {why}", err=True)
