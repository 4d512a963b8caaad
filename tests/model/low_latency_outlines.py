"""The order of operations in the kernels of engine low_latency that its models mirror: see
``model_outlines.py``.
"""

LOW_LATENCY_VERBS = (
    "wait_flag",
    "wait_flags",
    "wait_row",
    "wait_chunks",
    "wait_counts",
    "wait_weights",
    "wait_packed",
    "wait_ready",
    "wait_for_ranks",
    "tl.debug_barrier",
    "tl.atomic_max",
    "tl.atomic_add",
    "count_packed",
    "put_far",
    "tell",
    "tell_or_put",
    "tl.store",
    "sum_rows",
    "sum_of_node",
    "hand_on",
    "hand_back",
    "_lead",
    "_receive_slot",
    "send_counts",
    "send_piece",
    "put_rows",
    "put_sums",
    "put_weights",
    "_add_neighbours",
    "_add_rows",
    "_send_in_node",
    "_send_sum",
    "_send_weights",
    "_place_row",
    "_store_part",
    "weigh",
    "_make_table",
    "leave_out",
    "agree",
    "_sum_of_nodes",
)
LOW_LATENCY_OUTLINES = {
    ("low_latency_dispatch", "low_dispatch_kernel"): """
if k.stages.send
  if pid >= P - R
    if is_active(active, to)
      send_counts(tokens)
  for range(pid, num_tokens * k.pieces, P)
    send_piece(tokens)
  if sizes.far
    for range(first_put(pid, sizes), R * tl.cdiv(M, k.chunk_rows), P)
      put_rows(tokens)
if k.stages.receive
  if sizes.per_node and pid < P - 1
    for range(pid, (R // sizes.per_node - 1) * M, P - 1)
      hand_on(source_of(u // M, me, sizes))
  if pid == P - 1
    _lead(result)
  wait_ready(state)
  for range(pid, R * M, P)
    _receive_slot(result)
  tl.debug_barrier()
  tl.store(epoch_of(state, pid, sizes))
""",  # Nodes._dispatch
    ("low_latency_send", "send_piece"): """
if sizes.far
  if piece == 0
    tl.store(numbers_of(result.slots, t, sizes) + pick)
_store_part(v)
tl.debug_barrier()
tl.atomic_max(flags)
if sizes.far
  count_packed(call.state)
""",  # model_rail._pack
    ("low_latency_send", "put_rows"): """
if takes_rows(to, call, sizes)
  if (count > 0) | (chunk == 0)
    wait_packed(call.state)
    if is_active(call.active, to)
      put_far(call)
""",  # model_rail._put
    ("low_latency_waits", "wait_row"): """
while live
  wait_flag(first + chunk)
""",  # model_low_latency.until
    ("low_latency_rail", "hand_on"): """
if is_active(call.active, s)
  wait_row(s)
if seen > want
  for range(0, N, block)
    for tl.static_range(1, P)
      if tl.sum(tl.where(r == d, goes, 0)) > 0
        tl.store(to + w0 + w)
tl.debug_barrier()
tl.atomic_max(flags)
""",  # model_rail._hand_on, Apart._rail
    ("low_latency_dispatch", "_lead"): """
wait_counts(counts_at)
leave_out(call.active)
tl.store(present_at)
_make_table(result)
""",  # Nodes._leads
    ("low_latency_dispatch", "_receive_slot"): """
if tl.load(ints(state) + sizes.state.present + s) != 0
  if sizes.far and takes_rows(s, call, sizes)
    wait_row(s)
  else
    wait_flag(flag)
  if seen == want + 1
    _place_row(result)
tl.store(places + pick)
""",  # model_rail._take, _receive
    ("low_latency_combine", "low_combine_kernel"): """
if k.stages.send
  if pid >= P - R
    if is_active(active, to)
      if sizes.far
        tell_or_put(at)
      else
        tell(at)
  if k.weighted == 2
    for range(pid, num_tokens, P)
      _send_weights(sent)
    if sizes.far and pid >= P - R
      put_weights(sent)
  for range(pid, R * M, P)
    if sizes.per_node
      _send_in_node(sent)
    else
      _send_sum(sent)
  if sizes.far and (not sizes.per_node)
    for range(first_put(pid, sizes), R * tl.cdiv(M, k.chunk_rows), P)
      put_sums(sent)
if k.stages.receive
  if sizes.per_node and pid < P - 1
    for range(pid, (R // sizes.per_node - 1) * M, P - 1)
      sum_of_node(sent)
    for range(pid, R * tl.cdiv(M, k.chunk_rows), P - 1)
      put_sums(sent)
  if pid == P - 1
    wait_for_ranks(tag)
  for range(pid, num_tokens * k.shares, P)
    _add_rows(sent)
  tl.debug_barrier()
  tl.store(epoch_of(state, pid, sizes))
""",  # Nodes._combine
    ("low_latency_combine", "_send_in_node"): """
if is_handed_on(s, call, k.sizes)
  hand_back(sent)
else
  if s // k.sizes.per_node == call.rank // k.sizes.per_node
    _send_sum(sent)
""",  # Nodes._combine
    ("low_latency_combine", "_send_sum"): """
if near & (tl.max(place) < 0) & (tl.min(place) == -2)
  tell(flag_of(base, call.parity, call.rank, t, sizes))
weigh(sent)
if ok
  sum_rows(sent)
  tl.debug_barrier()
  tl.atomic_max(flag)
if sizes.far and came
  count_packed(call.state)
""",  # model_rail._hand_back
    ("low_latency_combine", "_add_rows"): """
wait_flags(flags)
if sizes.far
  wait_chunks(sent)
if k.shares > 1
  agree(flags)
for range(share * k.share, tl.minimum(share * k.share + k.share, H), k.added_block)
  if sizes.per_node
    _sum_of_nodes(slots)
  tl.store(sums + at)
""",  # model_rail._add
    ("low_latency_waits", "wait_for_ranks"): """
wait_counts(tags_at[:, None])
leave_out(call.active)
""",  # Nodes._leads
    ("low_latency_far", "count_packed"): """
tl.debug_barrier()
tl.atomic_add(at)
""",  # model_rail._release
    ("low_latency_far", "wait_packed"): """
tl.atomic_add(at)
while packed < want
  tl.atomic_add(at)
tl.debug_barrier()
tl.store(at)
""",  # model_rail._put
    ("low_latency_sums", "wait_chunks"): """
wait_flags(flags)
""",  # model_low_latency.until
    ("low_latency_sums", "put_sums"): """
if takes_rows(to, call, sizes)
  if count > 0
    wait_packed(call.state)
  if ((count > 0) | (chunk == 0)) & is_active(call.active, to)
    put_far(call)
""",  # model_rail._put
    ("low_latency_sums", "put_weights"): """
if is_far(call.state, to, sizes)
  wait_packed(call.state)
  if is_active(call.active, to)
    put_far(call)
""",  # model_rail._put
    ("low_latency_rail", "hand_back"): """
weigh(sent)
if ok
  sum_rows(sent)
tl.debug_barrier()
tl.atomic_max(flag)
""",  # model_rail._hand_back
    ("low_latency_rail", "sum_of_node"): """
weigh(sent)
if came
  if ok
    sum_rows(sent)
    tl.debug_barrier()
    _add_neighbours(slot)
  count_packed(call.state)
""",  # model_rail._sum_of_node
    ("low_latency_rail", "_add_neighbours"): """
wait_flags(flags)
for range(0, k.hidden, k.added_block)
  tl.debug_barrier()
  tl.store(to + w)
tl.debug_barrier()
tl.store(ints(slot + k.kept_at) + pick)
""",  # model_rail._sum_of_node
    ("low_latency_sums", "weigh"): """
if k.weighted == 2
  if wait
    if sizes.far and is_far(call.state, s, sizes)
      wait_flag(arrival)
    wait_weights(at)
""",  # model_rail._weigh
}
"""By file and function; the role of the model behind it. Direct messages are also those of
``model_low_latency.py``."""
