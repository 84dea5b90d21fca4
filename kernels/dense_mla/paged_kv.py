"""How the keys of a paged request fall into tiles of 64: page-aligned, so that one TMA box is one tile.

A page of 48 keys or more is cut into ceil(page_size / 64) tiles; the last one of a page may be short and TMA zero-fills it.
Pages of 16 and 32 keys go four and two to a tile, one box each.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from .problem import TILE_KEYS


@dataclass(frozen=True)
class PageTiling:
    """Tile arithmetic of one page size. The methods take Python integers, torch tensors and CuTe Int32 alike (all values >= 0)."""

    page_size: int

    @property
    def pages_per_tile(self) -> int:
        """TMA boxes of a tile: 4, 2 or 1."""
        return TILE_KEYS // self.page_size if self.page_size in (16, 32) else 1

    @property
    def tiles_per_page(self) -> int:
        """Tiles of a page where a page fills at least one."""
        return -(-self.page_size // TILE_KEYS)

    @property
    def box_keys(self) -> int:
        """Keys of one TMA box."""
        return TILE_KEYS // self.pages_per_tile

    def num_tiles(self, seq_len: Any) -> Any:
        """Tiles that hold the first `seq_len` keys of a request."""
        if self.pages_per_tile > 1:
            return (seq_len + (TILE_KEYS - 1)) // TILE_KEYS
        full_pages, rest = seq_len // self.page_size, seq_len % self.page_size
        return full_pages * self.tiles_per_page + (rest + (TILE_KEYS - 1)) // TILE_KEYS

    def first_key(self, tile: Any) -> Any:
        """Position in the request of the first key of a tile."""
        if self.pages_per_tile > 1:
            return tile * TILE_KEYS
        return tile // self.tiles_per_page * self.page_size + tile % self.tiles_per_page * TILE_KEYS
