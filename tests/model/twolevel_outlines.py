"""Those of ``model_outlines.py`` that are of the two-level engine."""

TWOLEVEL_OUTLINES = {
    ("two_dispatch", "_send_turn"): """
if left > 0
  load_acquire(head_of(mine, to, turn.channel, k))
  else
    if seen >= want
      send_chunk(payload)
      defer_signal(tail)
      tl.store(turn.done)
      if left == 0
        tl.store(sent_to(peers.state, to, turn.channel, k))
""",  # model_twolevel.send_near
    ("two_dispatch", "_receive_turn"): """
if left > 0
  load_acquire(tail_of(mine, source, turn.channel, k))
  else
    if seen >= want
      receive_chunk(routing)
      defer_signal(head)
      tl.store(turn.done)
      if left == 0
        tl.store(taken)
""",  # model_rings.receive
    ("two_far", "far_turn"): """
if left > 0
  load_acquire(words(mine + net_head(node, c, k)))
  else
    if seen >= want
      _pack_chunk(payload)
      put_chunk(peers)
      tl.store(turn.done)
      if left == 0
        tl.store(net_sent_to(state, node, c, k))
""",  # model_twolevel.send_far
    ("two_far", "_pack_chunk"): """
for range(0, n, k.rows_sent)
  pack_rows(payload.rows)
if k.row.metadata_words or (k.row.scale_words and (not k.cast.mode))
  for range(0, n, TOGETHER)
    pack_metadata(payload)
""",  # model_twolevel.send_far
    ("two_far", "put_chunk"): """
if k.grid.mapped
  defer_signal(tail)
else
  put(peers.regions)
""",  # model_twolevel.send_far
    ("two_forward", "forward_turn"): """
if left > 0
  load_acquire(words(mine + net_tail(node, c, k)))
  else
    if seen >= want
      _forward(peers)
""",  # model_twolevel.forward
    ("two_forward", "_forward"): """
look_at_all(heads)
while (moved < n) & ok
  if ok
    if k.placing.fresh
      tl.store(rows)
    _place_batch(routing)
    _copy_slots(peers)
if moved > 0
  _end_turn(peers)
""",  # model_twolevel.forward
    ("two_forward", "_place_batch"): """
if k.at_once
  place_metadata(slots)
else
  place_rows(slots)
""",  # model_twolevel.forward
    ("two_forward", "_copy_slots"): """
for range(0, SLOT if k.grid.ranks_per_node > 1 else 0, k.forward_block)
  if k.at_once
    tl.store(to)
  for tl.static_range(k.grid.ranks_per_node)
    tl.store(to)
""",  # model_twolevel.forward
    ("two_forward", "_end_turn"): """
defer_signal(tails)
tl.store(turn.done)
tl.store(put_at)
return_credits(peers)
if left == 0
  tl.store(sent_at)
  tl.store(net_taken_from(state, hop.node, c, k))
""",  # model_twolevel.forward
    ("two_forward", "return_credits"): """
if deferred > 0
  if grid.mapped
    defer_signal(to)
  else
    credit(account)
""",  # model_twolevel.forward
    ("two_combine", "_combine_turn"): """
if left > 0
  _combine(peers)
""",  # model_twolevel.combine_far
    ("two_combine", "_combine"): """
load_acquire(words(mine + net_head(node, c, k)))
look_at_all(tail_of(mine, node * P + q, c, k))
while (i < end) & ok
  if ok
    _combine_rows(parts)
if i > i0
  _end_combine(peers)
""",  # model_twolevel.combine_far
    ("two_combine", "_combine_rows"): """
for tl.range(0, k.row.hidden, k.tiles.block_summed, num_stages=k.stages)
  tl.store(to + w[None, :])
if k.picks
  tl.store(to)
""",  # model_twolevel.combine_far
    ("two_combine", "_end_combine"): """
defer_signal(heads)
if k.grid.mapped
  defer_signal(tail)
else
  if i == end
    put(peers.regions)
tl.store(turn.done)
tl.store(moved_of(state, 0, link.node * P + q, c, k))
if left == 0
  tl.store(bases_at)
  tl.store(net_sent_to(state, link.node, c, k))
""",  # model_twolevel.combine_far
    ("two_combine", "_send_turn"): """
if left > 0
  load_acquire(head_of(mine, s, c, k))
  else
    if seen >= want
      send_sums_chunk(parts)
      defer_signal(tail)
      tl.store(turn.done)
      if left == 0
        tl.store(sent_to(peers.state, s, c, k))
""",  # model_twolevel.send_near
    ("two_combine_reduce", "reduce"): """
look_at_all(words(tails))
while (i < end) & ok
  if ok
    _sum_tokens(parts)
if i > share.done
  _end_reduce(peers)
""",  # model_twolevel.reduce_both
    ("two_combine_reduce", "_sum_tokens"): """
for tl.range(0, k.row.hidden, k.tiles.block_summed, num_stages=k.stages)
  add_nodes(v_home)
if k.picks
  add_node_weights(w_home)
""",  # model_twolevel.reduce_both
    ("two_combine_reduce", "_end_reduce"): """
add_release(heads)
if not k.grid.mapped
  return_network_credits(peers)
  tl.store(moved_of(state, 1, r, c, k))
tl.store(turn.done)
tl.store(moved_of(state, 0, r, c, k))
if left == 0
  tl.store(near_at)
  tl.store(far_at)
""",  # model_twolevel.reduce_both
    ("two_combine_reduce", "return_network_credits"): """
for tl.static_range(k.grid.nodes)
  if (amount >= k.network_ring.credit) | last & (amount > 0)
    credit(account)
""",  # model_twolevel.reduce_both
    ("two_combine_reduce", "add_nodes"): """
store_sums(sums)
""",  # model_twolevel.reduce_both
    ("two_combine_reduce", "add_node_weights"): """
tl.store(to)
""",  # model_twolevel.reduce_both
    ("two_scheduler", "flush_signals"): """
if tl.max(count) > 0
  add_release(words(counter))
  tl.store(at + 1)
""",  # model_turns.Workers._published
    ("two_headers", "call_barrier_turn"): """
if i == 0
  announce_call_to_all(regions)
  tl.store(turn.done)
else
  if i == 1
    if all_are_here(regions, state, tag, tl.load(words(state) + EPOCH), turn.step, True, k)
      count_call(state)
      tl.store(turn.done)
""",  # model_rings.call_barrier
    ("two_headers", "all_are_here"): """
look_at_all(peer_word(mine, 'entered', r, k))
else
  if here
    in_same_call(state)
""",  # model_rings.call_barrier
    ("two_headers", "announce_call_to_all"): """
tl.store(peer_word(bases, 'tags', me, k, parity))
add_release(peer_word(bases, 'entered', me, k))
tl.store(words(mine + here))
for range(k.ranks)
  if to // P != me // P
    put(regions)
""",  # model_rings.call_barrier
    ("two_dispatch", "_turn"): """
if task < NODES - 1
  if FAR
    far_turn(peers)
else
  if task < FAR
    if FAR
      forward_turn(peers)
  else
    if task < FAR + 1
      _own_turn(peers)
    else
      if task < FAR + NEAR
        _send_turn(peers)
      else
        if task < num_tasks(k.ranks, NODES) - 1
          _receive_turn(peers)
        else
          if (task < num_tasks(k.ranks, NODES)) & (turn.channel == 0)
            call_barrier_turn(peers.regions)
""",  # model_turns.Workers
    ("two_dispatch", "two_dispatch_kernel"): """
if k.behind_heaps
  if moved & (pid == 0)
    announce_call_to_all(regions)
    count_call(state)
  if S
    if moved & (pid >= 0)
      copy_words(source)
if pid >= 0
  begin_tasks(state)
  while (left > 0) & (step < OVER)
    for range(ROUND)
      _turn(peers)
      if place == ROUND - 1
        flush_signals(state)
  flush_signals(state)
""",  # model_turns.Workers
    ("two_combine", "_turn"): """
if task < 1
  if rows > 0
    reduce(peers)
else
  if task < G
    if G > 1
      _combine_turn(peers)
  else
    if task < k.ranks
      _send_turn(peers)
    else
      if (task < k.ranks + 1) & (turn.channel == 0)
        call_barrier_turn(peers.regions)
""",  # model_turns.Workers
    ("two_combine", "two_combine_kernel"): """
if pid >= 0
  begin_tasks(state)
  while (left > 0) & (step < OVER)
    for range(ROUND)
      _turn(peers)
      if place == 0
        flush_signals(state)
  flush_signals(state)
""",  # model_turns.Workers
    ("two_direct", "_near_turn"): """
if (left > 0) & ready
  for range(0, n, k.rows_sent)
    write_rows(payload)
  tl.store(turn.done)
""",  # no model: no ring, nobody waits for it
    ("two_direct", "_place_turn"): """
if left > 0
  load_acquire(words(mine + net_tail(node, c, k)))
  else
    if (seen >= want) & ready & (turn.step == ON_TIME)
      for range(0, n, k.rows_forwarded)
        if k.placing.fresh
          tl.store(entries)
        write_rows(slots)
      tl.store(turn.done)
      if k.placing.fresh
        tl.store(moved_at)
      return_credits(peers)
      if left == 0
        tl.store(net_taken_from(peers.state, node, c, k))
""",  # model_twolevel.forward, without inner rings
    ("two_direct", "_turn"): """
if task < NODES - 1
  if FAR
    far_turn(peers)
else
  if task < FAR
    if FAR
      _place_turn(peers)
  else
    if task < FAR + near_tasks(NODES, k.grid.workers)
      _near_turn(peers)
""",  # model_turns.Workers
    ("two_direct", "_announce"): """
if k.told
  tl.store(told)
announce_call_to_all(peers.regions)
""",  # no model: the block's place before the announcement, as its tag
    ("two_direct", "_note_where"): """
if pid == 0
  tl.store(words(peers.state) + IN_HEAPS)
""",  # no model: read in the next launch of the stream
    ("two_direct", "two_direct_kernel"): """
if pid >= 0
  begin_tasks(state)
  if pid == 0
    _announce(peers)
  while (left > 0) & (step < OVER)
    if not ready
      if before > 0
        all_are_here(regions)
    for range((TASKS + grid.workers - 1) // grid.workers)
      _turn(peers)
    flush_signals(state)
  if step < OVER
    end_in_place(regions)
""",  # model_turns.Workers
    ("two_pull", "_combine_turn"): """
if left > 0
  load_acquire(words(mine + net_head(node, c, k)))
  else
    if (room >= want) & ready & (turn.step == ON_TIME)
      _sum_chunk(peers)
      put_chunk(peers)
      tl.store(turn.done)
      if left == 0
        tl.store(net_sent_to(state, node, c, k))
""",  # model_twolevel.combine_far, without inner rings
    ("two_pull", "_sum_chunk"): """
for range(0, n, k.tiles.rows_summed)
  for tl.range(0, hidden, k.tiles.block_summed, num_stages=k.stages)
    tl.store(to + w[None, :])
""",  # model_twolevel.combine_far, without inner rings
    ("two_pull", "_reduce"): """
look_at_all(words(mine + net_tail(node, c, k)))
while (i < end) & ok
  if ok
    _sum_tokens(rows_at)
if i > share.done
  if not k.grid.mapped
    return_network_credits(peers)
  tl.store(deferred_at)
  tl.store(turn.done)
  tl.store(taken_at)
  if left == 0
    tl.store(taken_from)
""",  # model_twolevel.reduce_both, without inner rings
    ("two_pull", "_sum_tokens"): """
for tl.range(0, k.row.hidden, k.tiles.block_summed, num_stages=k.stages)
  add_nodes(v_home)
""",  # model_twolevel.reduce_both, without inner rings
    ("two_pull", "_flush_signals"): """
if tl.max(count) > 0
  add_release(words(tl.where(r < 0, tails, heads)))
  tl.store(counts)
""",  # model_turns.Workers._published
    ("two_pull", "_turn"): """
if task < 1
  if (rows > 0) & ready
    _reduce(peers)
else
  if task < G
    if G > 1
      _combine_turn(peers)
  else
    if (task < G + 1) & (turn.channel == 0)
      if tl.load(turn.done) == 0
        announce_call_to_all(peers.regions)
        tl.store(turn.done)
""",  # model_turns.Workers
    ("two_pull", "two_pull_kernel"): """
if pid >= 0
  begin_tasks(state)
  while (left > 0) & (step < OVER)
    if not ready
      if before > 0
        all_are_here(regions)
    for range(tasks_of_worker(TASKS, k.ranks, k.grid.workers, 0, 1))
      _turn(peers)
    _flush_signals(peers)
  if step < OVER
    end_in_place(regions)
""",  # model_turns.Workers
    ("two_in_place", "end_in_place"): """
add_release(dones)
if tl.program_id(0) == 0
  if wait_beside(dones, want, r == me, state)
    wait_for_all(dones)
  count_call(state)
  tl.store(words(state) + DIRECT_CALLS)
""",  # no model: whoever waits there defers nothing
}
"""By file and function; the role of the model behind it."""
