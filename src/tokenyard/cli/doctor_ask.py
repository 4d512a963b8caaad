"""Asking child processes, so that a question that raises, crashes or hangs takes nothing down."""

from __future__ import annotations

import json
import os
import platform
import re
import signal
import subprocess
import sys
from collections.abc import Sequence
from contextlib import suppress
from tempfile import TemporaryFile
from typing import Any, BinaryIO

from tokenyard.cli import doctor_probes
from tokenyard.cli.consoles import say
from tokenyard.cli.doctor_probes import QUESTIONS, Record, bare, reason
from tokenyard.engines.known import ENGINES

RUN = "import runpy, sys; runpy.run_path(sys.argv[1])['main'](*sys.argv[2:])"
PROGRAM = (sys.executable, "-c", RUN, doctor_probes.__file__)
"""Runs the file of probes without the package around it, which imports torch."""

KILL_SECONDS = 2.0
"""A killed process that is still there after this (stuck inside a driver) is left behind."""

NO_ANSWER, NOT_ASKED = "no answer within", "no process to ask in"
"""How reasons begin: time was up; no process could be started, or no file made for its answers."""

LAUNCHER = re.compile(
    r"(RANK|WORLD_SIZE|MASTER_ADDR|MASTER_PORT)$|(LOCAL|GROUP|ROLE|TORCHELASTIC)_"
)
"""Variables of ``torchrun``, which a process of our own must not take for its own."""

VARIABLES = re.compile(
    "(CUDA_VISIBLE_DEVICES|CUDA_DEVICE_ORDER|HIP_VISIBLE_DEVICES|LD_PRELOAD|LD_LIBRARY_PATH)$|"
    "(NCCL|NVSHMEM|TORCH_NCCL|TORCH_SYMM_MEM|GLOO|TRITON)_"
)
"""Those that change how ranks talk to each other."""


def gather(timeout: float) -> tuple[dict[str, Any], dict[str, str]]:
    """All facts by name, None for what could not be told or is not there; and why it could not."""
    facts: dict[str, Any] = {"python": platform.python_version(), "engines": list(ENGINES)}
    variables = sorted(os.environ.items())
    facts["environment"] = {name: value for name, value in variables if VARIABLES.match(name)}
    untold: dict[str, str] = {}
    for group, what in (("host", "this host"), ("torch", "torch"), ("nvml", "the driver")):
        say(f"asking {what}")
        uuids = [gpu["uuid"] for gpu in facts.get("gpus") or () if group == "nvml"]
        answers, errors = ask(group, *uuids, timeout=timeout)
        facts |= dict.fromkeys(QUESTIONS[group]) | answers
        untold |= errors
    seen: list[Record] = facts["driver"]["gpus"] if facts["driver"] else []
    by_uuid = {known["uuid"]: known for known in seen}
    for gpu in facts["gpus"] or ():
        if known := by_uuid.get(bare(gpu["uuid"])):
            gpu["mig"] = known["mig"]
            # without the memory of our own context
            gpu["memory_free"] = known["memory_free"] or gpu["memory_free"]
    return facts, untold


def ask(
    group: str, *words: str, timeout: float, program: Sequence[str] = PROGRAM
) -> tuple[dict[str, Any], dict[str, str]]:
    """Run ``program group *words``, which prints answers as ``doctor_probes.main`` does: answers by
    name, those before a crash or a hang too, and the reason of each question without one."""
    answers: dict[str, Any] = {}
    errors: dict[str, str] = {}
    said = ""
    try:
        with TemporaryFile() as file:  # some grandchild may keep a pipe open
            end = _run([*program, group, *words], file, timeout)
            file.seek(0)
            lines = file.read().decode(errors="replace").splitlines()
    except OSError as error:
        end, lines = f"{NOT_ASKED}: {reason(error)}", list[str]()
    for line in lines:
        if not line.startswith('{"name": '):
            said = line.strip() or said
            continue
        with suppress(ValueError, KeyError):  # cut short when the process was killed
            told = json.loads(line)
            into, key = (errors, "error") if "error" in told else (answers, "value")
            into[told["name"]] = told[key]
    if end.startswith("exit code") and said:
        end = f"{end}: {said}"[:500]
    missing = [name for name in QUESTIONS[group] if name not in answers]
    return answers, dict.fromkeys(missing, end) | errors


def _run(command: Sequence[str], file: BinaryIO, timeout: float) -> str:
    """How a command ended; its session is killed after ``timeout`` seconds, or by an interrupt."""
    env = {name: value for name, value in os.environ.items() if not LAUNCHER.match(name)}
    streams: dict[str, Any] = {"stdin": subprocess.DEVNULL, "stdout": file, "stderr": file}
    process = subprocess.Popen(command, env=env, start_new_session=True, **streams)
    try:
        code = process.wait(timeout)
    except subprocess.TimeoutExpired:
        return f"{NO_ANSWER} {timeout:g} s"
    finally:
        if process.poll() is None:
            with suppress(OSError, subprocess.TimeoutExpired):
                os.killpg(process.pid, signal.SIGKILL)
                process.wait(KILL_SECONDS)
    return f"signal {-code}" if code < 0 else f"exit code {code}"
