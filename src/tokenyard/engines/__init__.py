"""Engines: how rows travel. All give the same bits for a dispatch."""
