"""Ids of the hardware barriers of a forward CTA. Id 0 is `sync_threads`."""

import enum


class NamedBarrierSm90(enum.IntEnum):
    """Barriers of the consumer warpgroups: two, or three in the E4M3 forward of few rows."""

    WARPGROUP_0 = 1  # the four warps of one warpgroup: softmax maxima, P. Computed from the warpgroup: neighbours
    WARPGROUP_1 = 2
    WARPGROUP_2 = 3
    CONSUMERS = 4  # all of them: partial scores, row sums, queries
    SIDES = 5  # E4M3: the two warpgroups that own the value columns of an output
    P_READY_0 = 6  # many rows: the owner of a tile has stored P and the new maxima, the other warpgroup may use them
    P_READY_1 = 7
