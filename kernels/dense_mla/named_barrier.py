"""Ids of the hardware barriers of a forward CTA. Id 0 is `sync_threads`."""

import enum


class NamedBarrierSm90(enum.IntEnum):
    """Barriers of the two consumer warpgroups."""

    WARPGROUP_0 = 1  # the four warps of one warpgroup: softmax maxima, P
    WARPGROUP_1 = 2
    CONSUMERS = 3  # both warpgroups: partial scores, row sums
    P_READY_0 = 4  # many rows: the owner of a tile has stored P and the new maxima, the other warpgroup may use them
    P_READY_1 = 5
