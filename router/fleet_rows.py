"""Rows of the fleet's matrix: one quantity each, a column per worker. Seconds are real ones.

`router.fleet` keeps them, `router.pricing` reads them.
"""

# What a worker is: seconds per token to load, to compute, per pair of tokens to attend, to read the
# weights and a token of context; limits and prices; when it was last heard from; its network.
LOAD_TOKEN, LOAD_FIXED, TOKEN, PAIR, WEIGHTS, CONTEXT, STEP = range(7)
BUDGET, CAPACITY, CRIT, LINK_RATE, FLOPS, COST, OVERHEAD, SEEN, NET = range(7, 16)
# What it has to do: work reserved and not done on link and gpu, since when and how much the engine
# computes at the head of its queue, requests and tokens by state, use of late.
LINK_OUT, LINK_FREE, GPU_OUT, GPU_SINCE, GPU_HEAD, IN_FLIGHT, WAITING = range(16, 23)
QUEUED, RESIDENT, DECODING, DECODE_CONTEXT, GPU_USE, USE_AT = range(23, 29)
DILATION, LOADS, PREFILLS, NET_FREE, SPARE, PROMISED, HOST = range(29, 36)
ROWS = 36
