"""Rows of a priced request: one of the float arrays of `router.offers.Offers` each.

`router.pricing` fills them, `router.fleet` hands them out by name.
"""

NEW, LOAD, LOAD_TOKEN, WORK, COMPUTE, FIXED, LINK_BACKLOG, GPU_BACKLOG = range(8)
HARM, DECODE, GPU_USE, LOADS, PREFILLS, IN_FLIGHT, WAITING, QUEUED = range(8, 16)
RESIDENT, CAPACITY, LINK_RATE, FLOPS, COST, CRIT, FETCH, NET_BACKLOG = range(16, 24)
TTFT, TPOT, OWN_LATE = range(24, 27)
ROWS = 27
