"""What the buffers of DeepEP V2.5 have in common."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any

from tokenyard.errors import NotSupported


class BufferBase(ABC):
    """A communication buffer. ``explicitly_destroy``: echoed; ``runtime``: None once destroyed."""

    explicitly_destroy: bool = False
    runtime: Any = None

    @property
    def main_context(self) -> Any:
        """(the communicator of DeepEP's compiled runtime) Not supported."""
        raise NotSupported("main_context: there is no compiled runtime here; use .group")

    def print_memory_usage(self) -> None:
        """(of DeepEP's compiled runtime) Not supported."""
        raise NotSupported("print_memory_usage(): use `tokenyard plan`, or torch.cuda.memory_*()")

    @abstractmethod
    def destroy(self) -> None:
        """Let go of connections and memory."""
