"""Asking nvidia-smi, and reading its answers."""

from __future__ import annotations

import re
import shutil
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from tokenyard.cli.doctor_facts import Driver, Gpu
from tokenyard.cli.doctor_guard import run

NVIDIA_SMI = "nvidia-smi"
DRIVER_FILE = "proc/driver/nvidia/version"
MIB = 1 << 20

FIELDS = (
    "index",
    "name",
    "uuid",
    "memory.total",
    "memory.free",
    "driver_version",
    "compute_cap",
    "mig.mode.current",
)
OLD_FIELDS = FIELDS[:6]
"""What drivers of before 2021 know too."""


def ask_driver(timeout: float, root: Path) -> Driver | None:
    """The driver and its GPUs; None if there is no sign of one.

    Raises:
        RuntimeError: nvidia-smi is there but has no answer.
    """
    if shutil.which(NVIDIA_SMI) is None:
        file = root / DRIVER_FILE
        version = driver_version(file.read_text()) if file.is_file() else None
        return None if version is None else Driver(version=version)
    version, gpus = _query(timeout)
    cuda = driver_cuda(_smi([], timeout))
    return Driver(version=version, cuda=cuda, gpus=gpus)


def _query(timeout: float) -> tuple[str | None, list[Gpu]]:
    for fields in (FIELDS, OLD_FIELDS):
        done = run(
            [NVIDIA_SMI, f"--query-gpu={','.join(fields)}", "--format=csv,noheader,nounits"],
            timeout,
        )
        if done.code == 0:
            return parse_query(done.out)
        if "not a valid field" not in done.out + done.err:
            raise RuntimeError(f"nvidia-smi: {done.why(timeout)}")
    raise RuntimeError("nvidia-smi does not know what it was asked")


def ask_matrix(words: list[str], order: list[int], timeout: float) -> list[list[str]] | None:
    """A table of GPU pairs, its rows and columns in ``order`` (indices as nvidia-smi counts)."""
    matrix = parse_matrix(_smi(words, timeout))
    return [[matrix[a][b] for b in order] for a in order]


def _smi(words: list[str], timeout: float) -> str:
    done = run([NVIDIA_SMI, *words], timeout)
    if done.code != 0:
        raise RuntimeError(f"nvidia-smi {' '.join(words)}: {done.why(timeout)}")
    return done.out


def driver_version(text: str) -> str | None:
    """The version in ``/proc/driver/nvidia/version``."""
    match = re.search(r"Kernel Module.*?\s(\d+(?:\.\d+)+)\s", text)
    return match[1] if match else None


def driver_cuda(banner: str) -> str | None:
    """The newest CUDA that the driver serves, from the head of nvidia-smi's table."""
    match = re.search(r"CUDA(?: \w+)? Version\s*:\s*(\d+\.\d+)", banner)
    return match[1] if match else None


def parse_query(text: str) -> tuple[str | None, list[Gpu]]:
    """Driver version and GPUs from ``--query-gpu`` with :data:`FIELDS` (the last two may be
    missing).
    """
    rows = [
        [cell.strip() for cell in line.split(",")] for line in text.splitlines() if line.strip()
    ]
    gpus = [_gpu(row) for row in rows]
    return (rows[0][5] if rows else None), gpus


def _gpu(row: list[str]) -> Gpu:
    capability, mig = (row[6], row[7]) if len(row) > 7 else ("", "")
    return Gpu(
        index=int(row[0]),
        name=row[1],
        uuid=row[2],
        memory_total=_bytes(row[3]),
        memory_free=_bytes(row[4]),
        capability=capability if re.fullmatch(r"\d+\.\d+", capability) else None,
        mig={"Enabled": True, "Disabled": False}.get(mig),
    )


def _bytes(mib: str) -> int | None:
    return int(mib) * MIB if mib.isdecimal() else None


def parse_matrix(text: str) -> list[list[str]]:
    """The GPU part of a ``topo`` table: what stands at ``[from][to]``. Columns of NICs and
    affinities are left out.

    Raises:
        ValueError: there is no such table.
    """
    lines = re.sub(r"\x1b\[[\d;]*m", "", text).splitlines()
    head = next((at for at, line in enumerate(lines) if re.match(r"\s+GPU\d+\b", line)), None)
    if head is None:
        raise ValueError("nvidia-smi topo shows no table of GPUs")
    count = len([word for word in lines[head].split() if re.fullmatch(r"GPU\d+", word)])
    rows = [line.split()[1:] for line in lines[head + 1 :] if re.match(r"\s*GPU\d+\s", line)]
    if len(rows) != count or any(len(row) < count for row in rows):
        raise ValueError(f"nvidia-smi topo names {count} GPUs, but its rows do not match")
    return [row[:count] for row in rows]


def by_uuid(gpus: Sequence[Gpu], seen: Sequence[Gpu]) -> tuple[list[Gpu], list[int] | None]:
    """Add to torch's GPUs what nvidia-smi saw of them (free memory without our own context, MIG).

    Returns: The GPUs, and where each stands in nvidia-smi's tables; None if one is not there (a MIG
    instance, another order).
    """
    places = {_bare(gpu.uuid): at for at, gpu in enumerate(seen) if gpu.uuid}
    found = [places.get(_bare(gpu.uuid)) for gpu in gpus]
    merged = [
        gpu
        if at is None
        else replace(gpu, memory_free=seen[at].memory_free or gpu.memory_free, mig=seen[at].mig)
        for gpu, at in zip(gpus, found, strict=True)
    ]
    order = [at for at in found if at is not None]
    return merged, (order if len(order) == len(gpus) else None)


def _bare(uuid: str | None) -> str:
    return (uuid or "").removeprefix("GPU-").removeprefix("MIG-").lower()
