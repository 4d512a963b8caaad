"""The name of DeepEP's compiled module, with what others import from it."""

from tokenyard.deep_ep import Config, EventHandle, topk_idx_t

__all__ = ["Config", "EventHandle", "topk_idx_t"]
