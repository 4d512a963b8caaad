"""DeepEP V2's ``deep_ep.utils`` and ``deep_ep.comm``, shown by ``generations``."""
