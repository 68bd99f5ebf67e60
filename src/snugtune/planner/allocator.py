"""What CUDA's caching allocator makes of a stream of storages that are born and die.

torch asks CUDA for segments and cuts them into blocks; a block that is freed stays with torch. What a card must hold is
therefore what is reserved, not what is alive. Two ways are modelled: segments by cudaMalloc, as torch does by default,
and expandable segments (PYTORCH_ALLOC_CONF=expandable_segments:True), where each pool is one stretch of addresses that is
mapped page by page.

Source of the rules: pytorch/pytorch, c10/cuda/CUDACachingAllocator.cpp as of 2.11 to 2.13, with default settings. Not
modelled: several streams (blocks that wait for an event), CUDA graphs and private pools, `roundup_power2_divisions`,
`garbage_collection_threshold` and `max_split_size` (all off by default). cudaMalloc's addresses are not known; segments are
numbered in the order of their making, which only decides between free blocks of the same size.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Hashable, Iterable
from dataclasses import dataclass

from snugtune.units import MIB

MIN_BLOCK_BYTES = 512
"""Every size is rounded up to a multiple of this. This and the next five: c10/core/AllocatorConfig.h."""
SMALL_BYTES = 1 * MIB
"""The largest request of the small pool."""
SMALL_SEGMENT_BYTES = 2 * MIB
"""A segment, or a page of an expandable one, of the small pool."""
LARGE_SEGMENT_BYTES = 20 * MIB
"""The same of the large pool."""
MIN_LARGE_BYTES = 10 * MIB
"""From here on a request gets a segment of its own size."""
LARGE_ROUNDING_BYTES = 2 * MIB
"""That size is a multiple of this."""
ADDRESS_BYTES = LARGE_SEGMENT_BYTES << 20
"""Addresses of an expandable segment, 20 TiB. torch reserves 9/8 of the card's memory; no plan reaches either."""

CUBLAS_HANDLES = 2
"""Workspaces of one training step on one stream: torch keeps a handle for each thread
(aten/src/ATen/cuda/CublasHandlePool.cpp), and backward runs in a thread of its own. Not measured by us."""
CUBLASLT_WORKSPACE_BYTES = 1 * MIB
"""Of cublasLt where it has one of its own (TORCH_CUBLASLT_UNIFIED_WORKSPACE=0; same file). By default it shares cuBLAS's
(pytorch#181944), so that a plan adds nothing for it."""
NCCL_COMMUNICATOR_BYTES = 688 * MIB
"""Buffers of one NCCL communicator after an all-reduce, outside torch's allocator. Published for 4 A100 on NVLink, 544 MB
for groups of two (nccl#964); not measured by us. Linear in the number of channels, so that faster links take more
(nccl#986): 1.6 GB have been published too (nccl#864)."""

DIES = -1
"""In a stream, instead of a size."""
Stream = Iterable[tuple[Hashable, int]]
"""Births and deaths of storages in their order: (key, bytes) is born, (key, DIES) dies. A key may be used again after its
death; zero bytes take nothing."""


def cublas_workspace_bytes(compute_capability: tuple[int, int]) -> int:
    """Workspace of one cuBLAS handle, which torch takes from this allocator at the first product and then keeps.

    32 MiB on Hopper and Blackwell, otherwise two of 4 MiB and eight of 16 KiB: parseChosenWorkspaceSize in
    aten/src/ATen/cuda/CublasHandlePool.cpp, where CUBLAS_WORKSPACE_CONFIG is not set. On Blackwell since pytorch#175344
    (February 2026), before that the smaller one. A torch after 2.13 gives it back after each product unless
    TORCH_CUBLAS_WORKSPACE_CACHE=1.
    """
    return 32 * MIB if compute_capability[0] in (9, 10, 12) else 8 * MIB + 128 * 1024


class OutOfReserved(Exception):
    """A storage would take what is reserved past the limit, even with every cached segment given back."""

    def __init__(self, key: Hashable, *, segment_bytes: int, reserved_bytes: int, limit_bytes: int) -> None:
        super().__init__(
            f"storage {key!r} wants a segment of {segment_bytes} bytes beside {reserved_bytes} reserved ones; "
            f"the limit is {limit_bytes}"
        )
        self.segment_bytes = segment_bytes
        self.reserved_bytes = reserved_bytes
        self.limit_bytes = limit_bytes


@dataclass(frozen=True)
class Reserved:
    """What the allocator held while a stream was replayed."""

    peak_reserved_bytes: int
    """torch.cuda.max_memory_reserved()."""
    peak_allocated_bytes: int
    """torch.cuda.max_memory_allocated(): blocks in use, with what they are larger than the storages in them."""
    end_reserved_bytes: int
    """torch.cuda.memory_reserved() after the last event."""


def replay_cuda(stream: Stream, *, expandable_segments: bool = True, limit_bytes: int | None = None) -> Reserved:
    """Peaks of a stream that starts with nothing reserved. For its parts, call CudaAllocator.replay with each of them.

    Raises:
        OutOfReserved: where `limit_bytes` is given and does not suffice.
    """
    return CudaAllocator(expandable_segments=expandable_segments, limit_bytes=limit_bytes).replay(stream)


class CudaAllocator:
    """torch's caching allocator for one card and one stream of work.

    `limit_bytes` is what torch.cuda.set_per_process_memory_fraction allows. As in torch it is compared with what is reserved
    and the segment that a request of this size would have by cudaMalloc. Expandable segments are mapped in whole pages, so
    that they may pass it by less than one page.
    """

    def __init__(self, *, expandable_segments: bool = True, limit_bytes: int | None = None) -> None:
        if expandable_segments:
            self._small: _Pool = _ExpandablePool(page_bytes=SMALL_SEGMENT_BYTES, first_address=0)
            self._large: _Pool = _ExpandablePool(page_bytes=LARGE_SEGMENT_BYTES, first_address=ADDRESS_BYTES)
        else:
            self._small = _Pool(min_rest_bytes=MIN_BLOCK_BYTES, first_address=0)
            self._large = _Pool(min_rest_bytes=SMALL_BYTES + MIN_BLOCK_BYTES, first_address=ADDRESS_BYTES)
        self._limit_bytes = limit_bytes
        self._live: dict[Hashable, range] = {}
        self.allocated_bytes = 0
        self.peak_allocated_bytes = 0
        self.peak_reserved_bytes = 0

    @property
    def reserved_bytes(self) -> int:
        """What CUDA has given and not got back."""
        return self._small.reserved_bytes + self._large.reserved_bytes

    def replay(self, stream: Stream) -> Reserved:
        """Go on with this part of a stream. The peaks are those within it, what stood before it included."""
        self.reset_peak()
        for key, size in stream:
            if size < 0:
                self.free(key)
            else:
                self.allocate(key, size)
        return Reserved(self.peak_reserved_bytes, self.peak_allocated_bytes, self.reserved_bytes)

    def allocate(self, key: Hashable, size: int) -> None:
        """Give a storage of `size` bytes its block.

        Raises:
            OutOfReserved: past the limit. The storage is not alive then, and the cache is empty.
            ValueError: for a key that is alive.
        """
        if key in self._live:
            raise ValueError(f"storage {key!r} is born while it is alive")
        if size == 0:
            self._live[key] = range(0)
            return
        size = _round_up(size, MIN_BLOCK_BYTES)
        pool = self._pool(size)
        start = pool.best_fit(size)
        if start is None:
            start = self._grow(pool, size, key)
        self._live[key] = block = pool.take(start, size)
        self.allocated_bytes += len(block)
        self.peak_allocated_bytes = max(self.peak_allocated_bytes, self.allocated_bytes)

    def free(self, key: Hashable) -> None:
        """Take the storage's block back into the cache.

        Raises:
            ValueError: for a key that is not alive.
        """
        if key not in self._live:
            raise ValueError(f"storage {key!r} dies while it is not alive")
        block = self._live.pop(key)
        if block:
            self.allocated_bytes -= len(block)
            self._pool(len(block)).free.add(block.start, block.stop)

    def empty_cache(self) -> None:
        """Give CUDA back every segment, or page of an expandable one, that no storage is in."""
        self._large.release()
        self._small.release()

    def reset_peak(self) -> None:
        """Count peaks from what stands now."""
        self.peak_allocated_bytes = self.allocated_bytes
        self.peak_reserved_bytes = self.reserved_bytes

    def blocks(self) -> dict[Hashable, range]:
        """Addresses of every storage that is alive and takes any."""
        return {key: block for key, block in self._live.items() if block}

    def _pool(self, size: int) -> _Pool:
        return self._small if size <= SMALL_BYTES else self._large

    def _grow(self, pool: _Pool, size: int, key: Hashable) -> int:
        segment_bytes, limit_bytes = _segment_bytes(size), self._limit_bytes
        if limit_bytes is not None and self.reserved_bytes + segment_bytes > limit_bytes:
            self.empty_cache()
            reserved_bytes = self.reserved_bytes
            if reserved_bytes + segment_bytes > limit_bytes:
                raise OutOfReserved(
                    key, segment_bytes=segment_bytes, reserved_bytes=reserved_bytes, limit_bytes=limit_bytes
                )
        start = pool.grow(size)
        self.peak_reserved_bytes = max(self.peak_reserved_bytes, self.reserved_bytes)
        return start


def _round_up(size: int, multiple: int) -> int:
    return -(-size // multiple) * multiple


def _segment_bytes(size: int) -> int:
    """What cudaMalloc is asked for when a request of this size fits nowhere."""
    if size <= SMALL_BYTES:
        return SMALL_SEGMENT_BYTES
    return LARGE_SEGMENT_BYTES if size < MIN_LARGE_BYTES else _round_up(size, LARGE_ROUNDING_BYTES)


class _Spans:
    """Stretches of addresses; two that touch become one."""

    def __init__(self) -> None:
        self.end_of: dict[int, int] = {}
        self.start_of: dict[int, int] = {}
        self.by_size: list[tuple[int, int]] = []  # size and start, the order in which torch searches free blocks

    def add(self, start: int, end: int) -> None:
        if start in self.start_of:
            before = self.start_of[start]
            self.remove(before)
            start = before
        if end in self.end_of:
            end = self.remove(end)
        self.end_of[start], self.start_of[end] = end, start
        insort(self.by_size, (end - start, start))

    def remove(self, start: int) -> int:
        """Take out the span that starts here; its end."""
        end = self.end_of.pop(start)
        del self.start_of[end]
        del self.by_size[bisect_left(self.by_size, (end - start, start))]
        return end


class _Pool:
    """Segments by cudaMalloc, and what of them no storage is in."""

    def __init__(self, *, min_rest_bytes: int, first_address: int) -> None:
        self.reserved_bytes = 0
        self.free = _Spans()
        self.unmapped = _Spans()
        self._min_rest_bytes = min_rest_bytes
        self._next_address = first_address
        self._segments: dict[int, int] = {}  # start: end

    def best_fit(self, size: int) -> int | None:
        """Start of the smallest free block that is large enough, then of the lowest.

        A block counts with the unmapped addresses behind it, so that those that can grow are spared. As in torch the search
        stops at the first block that is no smaller in this sense than the one before it.
        """
        by_size = self.free.by_size
        index = bisect_left(by_size, (size, -1))
        if index == len(by_size):
            return None
        while index + 1 < len(by_size) and self._reach(index + 1) < self._reach(index):
            index += 1
        return by_size[index][1]

    def _reach(self, index: int) -> int:
        size, start = self.free.by_size[index]
        return self.unmapped.end_of.get(start + size, start + size) - start

    def take(self, start: int, size: int) -> range:
        """Cut `size` bytes off a free block, or take all of it where the rest would be too small for a block."""
        end = self.free.remove(start)
        if end - start - size >= self._min_rest_bytes:
            self.free.add(start + size, end)
            end = start + size
        return range(start, end)

    def grow(self, size: int) -> int:
        """Start of a new free block of at least `size` bytes."""
        start, end = self._next_address, self._next_address + _segment_bytes(size)
        self._next_address = end + MIN_BLOCK_BYTES  # segments never touch, for blocks do not merge across them
        self._segments[start] = end
        self.free.add(start, end)
        self.reserved_bytes += end - start
        return start

    def release(self) -> None:
        """Give CUDA back the segments that are free as a whole."""
        for start, end in list(self._segments.items()):
            if self.free.end_of.get(start) == end:
                self.free.remove(start)
                del self._segments[start]
                self.reserved_bytes -= end - start


class _ExpandablePool(_Pool):
    """One segment whose pages are mapped when they are needed."""

    def __init__(self, *, page_bytes: int, first_address: int) -> None:
        super().__init__(min_rest_bytes=MIN_BLOCK_BYTES, first_address=first_address)
        self._page_bytes = page_bytes
        self.unmapped.add(first_address, first_address + ADDRESS_BYTES)

    def grow(self, size: int) -> int:
        """Map pages where free and unmapped addresses in a row have room for `size` bytes, at the lowest such place."""
        start = self._lowest_room(size)
        while (mapped := self.free.end_of.get(start, start)) < start + size:
            end = self.unmapped.remove(mapped)
            page_end = min(mapped + _round_up(start + size - mapped, self._page_bytes), end)
            if page_end < end:
                self.unmapped.add(page_end, end)
            self.free.add(mapped, page_end)
            self.reserved_bytes += page_end - mapped
        return start

    def _lowest_room(self, size: int) -> int:
        for address in sorted(self.unmapped.end_of):
            start = self.free.start_of.get(address, address)
            end: int | None = address
            while end is not None and end - start < size:
                end = self.unmapped.end_of.get(end) or self.free.end_of.get(end)
            if end is not None:
                return start
        raise AssertionError(f"a storage of {size} bytes is beyond every card")

    def release(self) -> None:
        """Unmap the pages that are free as a whole."""
        for start, end in list(self.free.end_of.items()):
            first, last = _round_up(start, self._page_bytes), end // self._page_bytes * self._page_bytes
            if first < last:
                self.free.remove(start)
                if start < first:
                    self.free.add(start, first)
                if last < end:
                    self.free.add(last, end)
                self.unmapped.add(first, last)
                self.reserved_bytes -= last - first
