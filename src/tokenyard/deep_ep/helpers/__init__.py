"""What DeepEP V2 has under ``deep_ep.utils`` and ``deep_ep.comm``; ``generations`` says under which
name a generation shows it.
"""
