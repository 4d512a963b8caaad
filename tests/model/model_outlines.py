"""The order of operations in kernels that models mirror (``test_model_kernels.py``): what
``model_source.outline`` must say.
"""

from twolevel_outlines import TWOLEVEL_OUTLINES

VERBS = (
    "wait_at_least",
    "wait_for_all",
    "load_acquire",
    "look_at_all",
    "add_release",
    "put",
    "credit",
    "pack_rows",
    "pack_metadata",
    "copy_rows",
    "place_rows",
    "place_metadata",
    "send_chunk",
    "receive_chunk",
    "send_sums_chunk",
    "tl.store",
    "return_credits",
    "return_network_credits",
    "add_nodes",
    "add_node_weights",
    "write_rows",
    "announce_call",
    "all_are_here",
    "in_same_call",
    "end_in_place",
    "count_call",
    "_forward",
    "_combine",
    "_combine_rows",
    "_end_combine",
    "_reduce",
    "reduce",
    "_sum_tokens",
    "_sum_chunk",
    "_end_reduce",
    "_place_batch",
    "_copy_slots",
    "_end_turn",
    "_pack_chunk",
    "put_chunk",
    "_push_rows",
    "_add_rows",
    "_add_weights",
    "copy_words",
    "raise_release",
    "_sum_rows",
    "_landed",
    "_leave",
    "store_sums",
    "defer_signal",
    "flush_signals",
    "_flush_signals",
    "announce_call_to_all",
    "_announce",
    "begin_tasks",
    "_turn",
    "far_turn",
    "_near_turn",
    "_place_turn",
    "forward_turn",
    "_own_turn",
    "_send_turn",
    "_receive_turn",
    "_combine_turn",
    "call_barrier_turn",
)
OUTLINES = {
    ("dispatch", "send_chunk"): """
for range(0, count, k.rows_sent)
  pack_rows(payload.rows)
if k.row.metadata_words or (k.row.scale_words and (not k.cast.mode))
  for range(0, count, TOGETHER)
    pack_metadata(payload)
""",  # model_rings.send
    ("dispatch", "receive_chunk"): """
for range(0, count, k.rows_received)
  if k.placing.by_expert
    place_rows(slots)
  else
    copy_rows(from_slot)
if not k.placing.by_expert and (row.scale_words or k.placing.fresh)
  for range(0, count, TOGETHER)
    place_metadata(slots)
""",  # model_rings.receive
    ("combine", "send_sums_chunk"): """
for range(0, chunk.count, k.tiles.rows_sent)
  for range(0, H, k.tiles.block_sent)
    tl.store(to + w[None, :])
  if K
    tl.store(floats(at + k.row.scales_at)[:, None] + pick[None, :])
""",  # model_rings.send
    ("push", "_push_rows"): """
for range(tl.program_id(0), chunks * OTHERS, k.pushers)
  if count > 0
    if k.by_expert
      _sum_chunk(parts)
    else
      copy_words(source)
    if k.picks
      copy_words(floats(parts.picks) + row * k.picks)
    raise_release(landed_of(base, me, i, k))
""",  # no model: nobody waits in it
    ("push", "_sum_rows"): """
for range(first, pieces, k.reducers)
  if ok
    _landed(peers.state)
  if ok
    _add_rows(parts)
    if k.picks
      if begin == 0
        _add_weights(sums)
""",  # no model: nobody waits for who sums
    ("push", "push_kernel"): """
if not given_up(state)
  if pid == 0
    announce_call(regions)
  if all_in_call(regions, state, tag, k)
    if pid < k.pushers
      _push_rows(plan)
    else
      _sum_rows(peers)
  _leave(state)
""",  # no model: all wait for announcements, then reducers for pushers only
} | TWOLEVEL_OUTLINES
"""By file and function; the role of the model behind it."""
