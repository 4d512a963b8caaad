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
    "write_rows",
    "say_hello",
    "all_are_here",
    "in_same_call",
    "end_in_views",
    "count_call",
    "_forward",
    "_place_batch",
    "_copy_slots",
    "_end_turn",
    "_pack_chunk",
    "_put_chunk",
    "_push_rows",
    "_copy",
    "raise_release",
    "_sum_rows",
    "_landed",
    "_leave",
    "store_sums",
    "owe",
    "publish",
    "_publish",
    "say_hello_to_all",
    "begin_tasks",
    "_turn",
    "far_turn",
    "_near_turn",
    "_place_turn",
    "forward_turn",
    "_own_turn",
    "_send_turn",
    "_receive_turn",
    "_reduce_turn",
    "_combine_turn",
    "greet_turn",
)
OUTLINES = {
    ("dispatch", "send_rows"): """
wait_at_least(head)
for range(begin, end, k.ring.chunk)
  if ok
    wait_at_least(head)
  if ok
    send_chunk(payload)
    add_release(tail)
tl.store(sent_to(peers.state, to, channel, k.ranks, k.channels))
""",  # model_rings.send
    ("dispatch", "send_chunk"): """
for range(0, count, k.rows_sent)
  pack_rows(payload.rows)
if k.row.metadata_words or (k.row.scale_words and (not k.cast.mode))
  for range(0, count, TOGETHER)
    pack_metadata(payload)
""",  # model_rings.send
    ("dispatch", "receive_rows"): """
while (taken < total) & ok
  wait_at_least(tail)
  if ok
    receive_chunk(routing)
    add_release(head)
tl.store(taken_from(peers.state, source, channel, k.ranks, k.channels))
""",  # model_rings.receive
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
    ("combine", "send_sums"): """
wait_at_least(head_of(mine, s, c, R, C))
for range(lo, hi, CHUNK)
  if ok
    wait_at_least(head_of(mine, s, c, R, C))
  if ok
    send_sums_chunk(x)
    add_release(tail)
tl.store(sent_to(state, s, c, R, C))
""",  # model_rings.send
    ("combine", "send_sums_chunk"): """
for range(0, n, B)
  for range(0, H, BLOCK)
    tl.store(to + w[None, :])
  if REDUCE
    tl.store((at + PAY).to(tl.pointer_type(tl.float32))[:, None] + k[None, :])
""",  # model_rings.send
    ("combine", "_reduce"): """
for range(c * share, t1, B)
  if ok & (tl.max((upto > seen).to(tl.int32)) > 0)
    wait_for_all(tail_of(mine, r, c, R, C))
  if ok
    for tl.range(0, H, BLOCK, num_stages=STAGES)
      store_sums(out)
    if REDUCE
      tl.store(to)
    if (t0 + B >= t1) | ((t0 - c * share) // B % BATCHES == BATCHES - 1)
      add_release(heads)
tl.store(taken_from(state, r, c, R, C))
""",  # model_rings.reduce
    ("push", "_push_rows"): """
for range(tl.program_id(0), chunks * OTHERS, P)
  if n > 0
    _copy(as_words(x, BITS) + row * N)
    raise_release(landed_of(base, me, k, CHUNKS))
""",  # no model: nobody waits in it
    ("push", "_sum_rows"): """
for range(first, pieces, Q)
  if ok
    _landed(state)
  if ok
    for tl.range(k1, tl.minimum(k1 + SPAN, H), BLOCK, num_stages=STAGES)
      store_sums(out)
""",  # no model: nobody waits for who sums
    ("push", "push_kernel"): """
if not given_up(state)
  if pid == 0
    say_hello(peers)
  if greeted(peers, state, tag, R, C, RP)
    if pid < P
      _push_rows(plan)
    else
      _sum_rows(state)
  _leave(state)
""",  # no model: all wait for greetings, then reducers for pushers only
} | TWOLEVEL_OUTLINES
"""By file and function; the role of the model behind it."""
