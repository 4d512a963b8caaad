"""The name ``deep_ep`` for ``tokenyard.deep_ep``, unless a distribution of that name is
installed.
"""

from importlib.metadata import distributions

for _real in distributions(name="deep_ep"):
    raise ImportError(
        f"deep_ep {_real.version} is installed, and tokenyard-deep-ep does not shadow it: pip "
        f"uninstall one of the two "
        "(to run one program on tokenyard: python -m tokenyard.deep_ep run SCRIPT ...)"
    )

from tokenyard.deep_ep import (  # noqa: E402
    Buffer,
    Config,
    EventHandle,
    EventOverlap,
    __version__,
    topk_idx_t,
)

from . import utils  # noqa: E402

__all__ = ["Buffer", "Config", "EventHandle", "EventOverlap", "__version__", "topk_idx_t", "utils"]
