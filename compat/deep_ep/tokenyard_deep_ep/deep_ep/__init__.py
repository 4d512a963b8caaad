"""The name ``deep_ep`` for ``tokenyard.deep_ep``, unless a distribution of that name is
installed.
"""

from importlib.metadata import distributions as _distributions

for _real in _distributions(name="deep_ep"):
    raise ImportError(
        f"deep_ep {_real.version} is installed, and tokenyard-deep-ep does not shadow it: pip "
        f"uninstall one of the two "
        "(to run one program on tokenyard: python -m tokenyard.deep_ep run SCRIPT ...)"
    )

from tokenyard.deep_ep.generations import present as _present  # noqa: E402

_present(__name__)
