"""The order of operations in kernels that models mirror (``test_model_kernels.py``): what ``model_source.outline`` must say."""

VERBS = (
    "wait_at_least", "wait_for_all", "load_acquire", "look_at_all", "add_release", "put", "credit", "pack_payload", "pack_riders",
    "copy_rows", "place_rows", "place_riders", "send_chunk", "receive_chunk", "send_sums_chunk", "tl.store", "_return_credits",
    "say_hello", "count_call", "_sum_rows", "owe", "publish", "say_hello_to_all", "begin_tasks", "_far_turn",
    "forward_turn", "_own_turn", "_send_turn", "_receive_turn", "_reduce_turn", "_combine_turn", "greet_turn",
)  # fmt: skip
OUTLINES = {
    ("dispatch", "send_rows"): """
wait_at_least(head_of(mine, to, c, R, C))
for range(lo, hi, CHUNK)
  if ok
    wait_at_least(head_of(mine, to, c, R, C))
  if ok
    send_chunk(x)
    add_release(tail)
tl.store(sent_to(state, to, c, R, C))
""",  # model_rings.send
    ("dispatch", "send_chunk"): """
for range(0, n, B)
  pack_payload(x)
if MW or (S and (not MODE))
  for range(0, n, TOGETHER)
    pack_riders(scales)
""",  # model_rings.send
    ("dispatch", "receive_rows"): """
while (taken < total) & ok
  wait_at_least(tail_of(mine, s, c, R, C))
  if ok
    receive_chunk(plan)
    add_release(head)
tl.store(taken_from(state, s, c, R, C))
""",  # model_rings.receive
    ("dispatch", "receive_chunk"): """
for range(0, n, B)
  if PLACED
    place_rows(ring)
  else
    copy_rows(as_words(ring, BITS))
if not PLACED and (S or FRESH)
  for range(0, n, TOGETHER)
    place_riders(ring + PAY)
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
      tl.store(to + at)
    if REDUCE
      tl.store(to)
    if (t0 + B >= t1) | ((t0 - c * share) // B % BATCHES == BATCHES - 1)
      add_release(heads)
tl.store(taken_from(state, r, c, R, C))
""",  # model_rings.reduce
    ("pull", "_sum_rows"): """
for range(low, high)
  tl.store(to + at)
""",  # no model: no ring, nobody waits in it
    ("pull", "pull_kernel"): """
if not given_up(state)
  if pid == 0
    say_hello(peers)
  if greeted(peers, state, tag, R, C, RP)
    _sum_rows(views)
    add_release(done_of(bases, me, R, C))
  if pid == 0
    wait_for_all(done_of(mine, r, R, C))
    count_call(state)
    tl.store(words(state) + DIRECT_CALLS)
""",  # no model: all wait for what others do before they wait
    ("two_dispatch", "_send_turn"): """
if left > 0
  load_acquire(head_of(peer_base(peers, me), to, c, R, C))
  else
    if seen >= want
      send_chunk(x)
      owe(tail_of(there, me, c, R, C).to(tl.int64))
      tl.store(done)
      if left == 0
        tl.store(sent_to(state, to, c, R, C))
""",  # model_twolevel.send_near
    ("two_dispatch", "_receive_turn"): """
if left > 0
  load_acquire(tail_of(mine, s, c, R, C))
  else
    if seen >= want
      receive_chunk(plan)
      owe(head.to(tl.int64))
      tl.store(done)
      if left == 0
        tl.store(taken_from(state, s, c, R, C))
""",  # model_rings.receive
    ("two_dispatch", "_far_turn"): """
if left > 0
  load_acquire(words(mine + net_head(node, c, G, C, FAR)))
  else
    if seen >= want
      for range(0, n, B)
        pack_payload(x)
      if MW or (S and (not MODE))
        for range(0, n, TOGETHER)
          pack_riders(scales)
      if MAPPED
        owe(peer_base(peers, to) + tail)
      else
        put(peers)
      tl.store(done)
      if left == 0
        tl.store(net_sent_to(state, node, c, R, G, C))
""",  # model_twolevel.send_far
    ("two_forward", "forward_turn"): """
if left > 0
  load_acquire(words(mine + net_tail(node, c, C, FAR)))
  else
    if seen >= want
      look_at_all(heads)
      while (moved < n) & ok
        if ok
          if FRESH
            tl.store(rows)
          if AT_ONCE
            place_riders(ring + PAY)
          else
            place_rows(ring)
          for range(0, SLOT // 4 if P > 1 else 0, BLOCK)
            if AT_ONCE
              tl.store(to)
            for tl.static_range(P)
              tl.store(to)
      if moved > 0
        owe(tail_of(bases, source, c, R, C).to(tl.int64))
        tl.store(done)
        tl.store(put_at)
        if owed > 0
          if MAPPED
            owe(peer_base(peers, source) + head)
          else
            credit(account)
        if left == 0
          tl.store(sent_at)
          tl.store(net_taken_from(state, node, c, R, G, C))
""",  # model_twolevel.forward
    ("two_combine", "_combine_turn"): """
if left > 0
  load_acquire(words(mine + net_head(node, c, G, C, FAR)))
  look_at_all(tail_of(mine, node * P + q, c, R, C))
  while (i < end) & ok
    if ok
      for range(0, H, BLOCK)
        tl.store(to + w[None, :])
      if REDUCE
        tl.store(to)
  if i > i0
    owe(heads.to(tl.int64))
    if MAPPED
      owe(peer_base(peers, owner) + tail)
    else
      if i == end
        put(peers)
    tl.store(done)
    tl.store(taken_at)
    if left == 0
      tl.store(bases_at)
      tl.store(net_sent_to(state, node, c, R, G, C))
""",  # model_twolevel.combine_far
    ("two_combine", "_send_turn"): """
if left > 0
  load_acquire(head_of(peer_base(peers, me), s, c, R, C))
  else
    if seen >= want
      send_sums_chunk(x)
      owe(tail_of(there, as_me, c, R, C).to(tl.int64))
      tl.store(done)
      if left == 0
        tl.store(sent_to(state, s, c, R, C))
""",  # model_twolevel.send_near
    ("two_combine", "_reduce_turn"): """
if left > 0
  look_at_all(words(tails))
  while (i < end) & ok
    if ok
      for range(0, H, BLOCK)
        tl.store(to + to_row)
      if REDUCE
        tl.store(to)
  if i > i0
    add_release(heads)
    if not MAPPED
      _return_credits(state)
      tl.store(owed_at)
    tl.store(done)
    tl.store(taken_at)
    if left == 0
      tl.store(near_at)
      tl.store(far_at)
""",  # model_twolevel.reduce_both
    ("two_combine", "_return_credits"): """
for tl.static_range(R // P)
  if (amount >= CREDIT) | last & (amount > 0)
    credit(account)
""",  # model_twolevel.reduce_both
    ("two_turns", "publish"): """
if tl.max(count) > 0
  add_release(words(counter))
  tl.store(at + 1)
""",  # model_turns.Workers._published
    ("two_letters", "greet_turn"): """
if i == 0
  say_hello_to_all(peers)
  tl.store(done)
else
  if i == 1
    look_at_all(hello_of(mine, r, R, C))
    else
      if lacking(seen, want, others) == 0
        count_call(state)
        tl.store(done)
""",  # model_rings.greet
    ("two_letters", "say_hello_to_all"): """
tl.store(tag_of(bases, half, me, R, C))
add_release(hello_of(bases, me, R, C))
tl.store(words(mine + here))
for range(R)
  if to // P != me // P
    put(peers)
""",  # model_rings.greet
    ("two_dispatch", "two_dispatch_kernel"): """
if pid >= 0
  begin_tasks(state)
  while (left > 0) & (step < OVER)
    for range((TASKS + WORKERS - 1) // WORKERS)
      if task < G - 1
        _far_turn(peers)
      else
        if task < 2 * (G - 1)
          forward_turn(peers)
        else
          if task < 2 * (G - 1) + 1
            _own_turn(state)
          else
            if task < 2 * (G - 1) + P
              _send_turn(peers)
            else
              if task < TASKS - 1
                _receive_turn(peers)
              else
                if (task < TASKS) & (c == 0)
                  greet_turn(peers)
      if place == LAST
        publish(state)
  publish(state)
""",  # model_turns.Workers
    ("two_combine", "two_combine_kernel"): """
if pid >= 0
  begin_tasks(state)
  while (left > 0) & (step < OVER)
    for range((TASKS + WORKERS - 1) // WORKERS)
      if task < 1
        _reduce_turn(peers)
      else
        if task < G
          _combine_turn(peers)
        else
          if task < R
            _send_turn(peers)
          else
            if (task < TASKS) & (c == 0)
              greet_turn(peers)
      if place == 0
        publish(state)
  publish(state)
""",  # model_turns.Workers
}
"""By file and function; the role of the model behind it."""
