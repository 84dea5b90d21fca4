"""Launches of compiled kernels on the CPU, from their PTX, over torch tensors: what a decoder takes for its kernels where there is no GPU."""

from __future__ import annotations

import struct
from pathlib import Path
from typing import Any

import torch

from dense_mla.arch import ARCHITECTURES
from dense_mla.compiled import KernelSource, compile_options
from ptx import Array, Program
from ptx_cta import Cta, GlobalMemory

PAGES_AT = 1 << 45
PAGE_STRIDE = (1 << 32) + 16  # elements between pages: an offset in 32 bits is another page's, or nobody's


def stored_bytes(tensor: torch.Tensor) -> Array:
    """All of a tensor's storage, which the array shares."""
    return torch.empty(0, dtype=torch.uint8).set_(tensor.untyped_storage()).numpy()


def kernel_text(source: KernelSource, capability: tuple[int, int], folder: Path) -> str:
    """PTX of a kernel for an architecture."""
    artifact = source.compile(compile_options(capability, "--keep-ptx", f"--dump-dir {folder}")).artifacts.PTX
    return str(artifact) if "\n" in artifact else Path(artifact).read_text()


class Launch:
    """One kernel. Called as the compiled one is, with tensors on the CPU; its CTAs run one after another."""

    def __init__(self, source: KernelSource, capability: tuple[int, int], text: str):
        self.source, self.limit = source, ARCHITECTURES[capability].shared_memory_limit
        self.program = Program.parse(text)
        self.declared = [argument for argument in source.arguments() if argument is not None]

    def __call__(self, *arguments: Any) -> None:
        memory, placed = GlobalMemory(), dict[int, int]()
        given = [argument for argument in arguments if argument is not None]
        packed = []
        for place, (value, declared) in enumerate(zip(given, self.declared)):
            if not isinstance(value, torch.Tensor):
                packed.append(struct.pack("f" if isinstance(value, float) else "i", value))
            elif value.dim() == 3 and place == 0 and self.walks_pages:
                packed.append(pack(declared, PAGES_AT, value.shape, (PAGE_STRIDE, *value.stride()[1:])))
            else:
                storage = value.untyped_storage().data_ptr()
                if storage not in placed:
                    placed[storage] = memory.place(stored_bytes(value))
                packed.append(pack(declared, placed[storage] + value.storage_offset() * value.element_size(), value.shape, value.stride()))
        if self.walks_pages:
            packed.pop()  # the number of ranges is the grid's
            for page, keys in enumerate(given[0]):
                memory.place(keys.view(torch.uint8).numpy(), PAGES_AT + page * PAGE_STRIDE * keys.element_size())
        rows, columns = self.grid(arguments[-1])
        for y in range(rows):
            for x in range(columns):
                Cta(self.program, memory, packed, (x, y), self.shared_memory_bytes).run()

    @property
    def walks_pages(self) -> bool:
        return self.source.name.startswith("Forward")

    @property
    def shared_memory_bytes(self) -> int:
        return self.source.function.tile.shared_memory_bytes if self.walks_pages else self.limit

    def grid(self, last: int) -> tuple[int, int]:
        """Of y and x, by the launch's last argument: ranges of the forward, CTAs of the merge."""
        if self.walks_pages:
            return last, self.source.function.row_tiles
        return 1, last if self.source.name == "Merge" else 1


def pack(declared: Any, address: int, shape: tuple[int, ...], strides: tuple[int, ...]) -> bytes:
    """A tensor as a kernel takes it: its address, then the extents and the strides that are not static."""
    extents = [extent for extent, known in zip(shape, declared.shape, strict=True) if not isinstance(known, int)]
    steps = [step for step, known in zip(strides, declared.stride, strict=True) if not isinstance(known, int)]
    packed = struct.pack(f"Q{len(extents)}i", address, *extents)
    return packed + bytes(-len(packed) % 8) + struct.pack(f"{len(steps)}q", *steps)
